"""What the documents say is so: links, paths, recipes and measured figures. Their commands have a test of their own."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from generate.picture import pictures
from support.places import PACKAGES, ROOT

from draftsmith.recipes.results import RESULT_KEYS
from draftsmith.recipes.schema import Recipe

PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "models/embedded_target/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]


QUOTED = re.compile(r"\[([^\]\[]+)\]\(((?:[\w.-]+/)*results/(?:[\w.-]+/)*[\w.-]+\.json)#([^)\s]+)\)")


def text_of(page: Path) -> str:
    """Without samples of the embedded target's answers, which name anything."""
    return page.read_text(encoding="utf-8").partition("## Samples")[0]


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
            place = (page.parent / link.partition("#")[0]).resolve()
            if not re.match(r"[a-z]+:|#", link) and not place.exists():
                broken.append((page.name, link))
    assert broken == []


def test_paths_in_sources_exist() -> None:
    """Docstrings and comments that name a file of ours by its folder."""
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
    """Whole ones or parts; anything else says of what kind it is, as Kubernetes' files do."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```yaml\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE):
            values = yaml.safe_load(block)
            if "apiVersion" not in values:
                found.append(Recipe.model_validate({"name": "mine", **values}))
    assert [recipe.drafter.kind for recipe in found if recipe.name != "mine"] == ["one_block"]


def value_at(tree: Any, path: str) -> Any:
    """What stands there, key by key; None if nothing does. A key may hold dots itself."""
    keys = range(len(tree)) if isinstance(tree, list) else tree if isinstance(tree, dict) else ()
    inner = (value_at(tree[key], path[len(str(key)) + 1 :]) for key in keys if f"{path}.".startswith(f"{key}."))
    return tree if not path else next((value for value in inner if value is not None), None)


def says(text: str, value: float) -> bool:
    """Whether the first number of the text is this value, rounded to as many digits; `%` means hundredths."""
    number = re.search(r"-?\d[\d,]*(\.\d+)?", text)
    assert number is not None, text
    value *= 100 if re.match(r"\s*%", text[number.end() :]) else 1
    half_a_digit = 0.5 * 10.0 ** -len((number[1] or ".")[1:])
    return abs(value - float(number[0].replace(",", ""))) <= half_a_digit + 1e-9


def test_quoted_figures_are_those_of_the_files() -> None:
    """`[1.52x](docs/results/name.json#figures.rows.tree@0.tau)` is what that file says there."""
    wrong = []
    for page in PAGES:
        for text, name, path in QUOTED.findall(text_of(page)):
            value = value_at(json.loads((page.parent / name).read_text(encoding="utf-8")), path)
            if not isinstance(value, int | float) or not says(text, value):
                wrong.append(f"{page.name}: {text} is quoted from {name}, where {path} is {value!r}")
    assert wrong == []
    for name in ("README.md", "docs/smollm2.md"):  # a link that the pattern does not know would not be compared
        text = text_of(ROOT / name)
        assert len(QUOTED.findall(text)) == text.count(".json#") >= 8


def test_a_result_says_where_it_comes_from() -> None:
    for file in (ROOT / "docs" / "results").rglob("*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        assert tuple(result) == RESULT_KEYS, file
        assert all(result.values()), file


def test_the_pictures_are_made_of_the_figures() -> None:
    """If they are not, `make reference` draws them again."""
    assert [file.name for file, text in pictures().items() if file.read_text(encoding="utf-8") != text] == []


def test_code_that_quotes_the_standard_library_is_in_the_notice() -> None:
    """The embedded target was trained on its text, and some questions show it."""
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert "models/embedded_target/" in notice
    asked = map(json.loads, (ROOT / "data/embedded/embedded.jsonl").read_text(encoding="utf-8").splitlines())
    quoting = {question["category"] for question in asked if max(map(len, question["turns"])) > 160}
    named = re.search(r"those of the categories (.*?)\s+quote", notice, re.DOTALL)
    assert named is not None
    assert set() < quoting <= set(re.findall(r"\w+", named[1]))
