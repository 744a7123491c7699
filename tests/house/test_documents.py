"""Links, paths and recipes in the documents are valid. Their commands have a separate test."""

import json
import re
from pathlib import Path

import yaml
from generate import reference
from generate.picture import pictures
from support.places import PACKAGES, ROOT
from support.served_drafters import IN_LLAMACPP, SERVED

from draftsmith.models.formats.exporting import EXPORTERS
from draftsmith.recipes.schema import Recipe
from draftsmith.results import RESULT_KEYS

PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "models/embedded_target/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def read_page(page: Path) -> str:
    """Return the page without sample answers of the embedded target, which may contain any name."""
    return page.read_text(encoding="utf-8").partition("## Samples")[0]


def test_link_targets_exist() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", read_page(page)):
            place = (page.parent / link.partition("#")[0]).resolve()
            if not re.match(r"[a-z]+:|#", link) and not place.exists():
                broken.append((page.name, link))
    assert broken == []


def test_paths_in_sources_exist() -> None:
    """Paths in docstrings and comments that start with one of our folders."""
    pattern = re.compile(rf"(?<![\w./-])(?:{'|'.join((*PACKAGES, 'tests', 'benchmarks'))})/[\w/-]+\.(?:py|yaml|j2)\b")
    sources = [file for name in (*PACKAGES, "benchmarks", "tests") for file in (ROOT / name).rglob("*.py")]
    sources += [
        *(ROOT / "recipes").glob("*.yaml"),
        *(ROOT / ".ci").iterdir(),
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
    ]
    found = {(file.name, name) for file in sources for name in pattern.findall(file.read_text(encoding="utf-8"))}
    assert {(file, name) for file, name in found if not (ROOT / name).exists()} == set()


def test_yaml_blocks_are_recipes() -> None:
    """Blocks are recipes or parts of recipes; others name their kind, as Kubernetes' files do."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```yaml\n(.*?)^```", read_page(page), re.DOTALL | re.MULTILINE):
            values = yaml.safe_load(block)
            if "apiVersion" not in values:
                found.append(Recipe.model_validate({"name": "mine", **values}))
    assert [recipe.drafter.kind for recipe in found if recipe.name != "mine"] == ["one_block"]


def test_documents_stay_small() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    written = [reference.without_made(page.read_text(encoding="utf-8")) for page in pages]
    assert sum(len(text.encode()) for text in written) < 200_000


def test_tables_agree_with_the_code() -> None:
    """If they do not, `make reference` rewrites them. None is empty without a built site, as on GitHub."""
    texts = {page: page.read_text(encoding="utf-8") for page in reference.PAGES}
    assert [page.name for page, text in texts.items() if reference.filled(text) != text] == []
    made = {name for text in texts.values() for name in re.findall(r"^<!-- made: (\w+) -->$", text, re.MULTILINE)}
    assert made == {*reference.MADE}
    assert not any("{config" in text for text in texts.values())  # a part of a `Refusal.why`
    assert all(text.count("<!-- made: ") == text.count("<!-- /made -->") for text in texts.values())


def test_results_name_their_origin() -> None:
    for file in (ROOT / "docs" / "results").rglob("*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        assert tuple(result) == RESULT_KEYS, file
        assert all(result.values()), file


def test_pictures_agree_with_the_figures() -> None:
    """If they do not, `make reference` redraws them."""
    assert [file.name for file, text in pictures().items() if file.read_text(encoding="utf-8") != text] == []


def test_kinds_that_the_readme_calls_proven_are_tested_in_real_engines() -> None:
    shown = {(kind, to) for kind, to, _ in SERVED.values()} | {(kind, "gguf") for kind, _ in IN_LLAMACPP.values()}
    assert shown == {(kind, to) for kind, to in EXPORTERS if to in ("gguf", *reference.IN_REAL_VLLM)}


def test_quoted_standard_library_text_is_in_the_notice() -> None:
    """The embedded target was trained on its text, and some questions quote it."""
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert "models/embedded_target/" in notice
    asked = map(json.loads, (ROOT / "data/embedded/embedded.jsonl").read_text(encoding="utf-8").splitlines())
    quoting = {question["category"] for question in asked if max(map(len, question["turns"])) > 160}
    named = re.search(r"those of the categories (.*?)\s+quote", notice, re.DOTALL)
    assert named is not None
    assert set() < quoting <= set(re.findall(r"\w+", named[1]))
