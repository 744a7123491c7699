"""What the documents say is so: links, paths, recipes and measured figures. Their commands have a test of their own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from generate import quoted, reference
from generate.picture import pictures
from support.places import PACKAGES, ROOT
from support.served_drafters import IN_LLAMACPP, SERVED

from draftsmith.models.formats.exporting import EXPORTERS
from draftsmith.recipes.results import RESULT_KEYS
from draftsmith.recipes.schema import Recipe

PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "models/embedded_target/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]


LONGEST_LINE = 300


def text_of(page: Path) -> str:
    """With the figures as links; without samples of the embedded target's answers, which name anything."""
    return quoted.linked(page).partition("## Samples")[0]


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
    """A page's 1.52x is what docs/quoted/ says: `[1.52x](docs/results/name.json#figures.rows.tree@0.tau)`."""
    wrong = []
    for page in PAGES:
        for text, name, path in quoted.LINK.findall(text_of(page)):
            value = value_at(json.loads((page.parent / name).read_text(encoding="utf-8")), path)
            if not isinstance(value, int | float) or not says(text, value):
                wrong.append(f"{page.name}: {text} is quoted from {name}, where {path} is {value!r}")
    assert wrong == []
    for name in (
        "README.md",
        "docs/measured/results.md",
    ):  # a link that the pattern does not know would not be compared
        text = text_of(ROOT / name)
        assert len(quoted.LINK.findall(text)) == text.count(".json#") >= 8


def test_pages_can_be_read_in_an_editor() -> None:
    """Where figures come from is in docs/quoted/ (`make reference` moves it there), and lines end somewhere."""
    for page in quoted.pages():
        text = page.read_text(encoding="utf-8")
        assert quoted.plain(page, quoted.linked(page)) == (text, quoted.figures_of(page)), page
        long = [number for number, line in enumerate(text.splitlines(), start=1) if len(line) > LONGEST_LINE]
        assert (page.name, long) == (page.name, [])
    assert sum(len(page.read_bytes()) for page in quoted.pages()) < 200_000
    known = {quoted.file_of(page) for page in quoted.pages()}
    assert set((ROOT / "docs" / "quoted").rglob("*.json")) <= known


def test_a_number_that_is_another_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its text, the one of several that was meant; a page that no longer says it is told of."""
    monkeypatch.setattr(quoted, "ROOT", tmp_path)
    monkeypatch.setattr(quoted, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(quoted, "QUOTED", tmp_path / "docs" / "quoted")
    page = tmp_path / "docs" / "a" / "b.md"
    page.parent.mkdir(parents=True)
    written = (
        "1.5, 11.5 and 1.52, [1.5](../results/x/y.json#figures.rows.a@0.tau)x, [2 %](../results/z.json#figures.b)."
    )
    page.write_text(written)
    monkeypatch.setattr(quoted, "pages", lambda: [page])
    quoted.keep()
    assert page.read_text() == "1.5, 11.5 and 1.52, 1.5x, 2 %."
    assert quoted.figures_of(page) == [
        ("1.5", "x/y.json", "figures.rows.a@0.tau", 1),
        ("2 %", "z.json", "figures.b", 0),
    ]
    assert quoted.linked(page) == written
    quoted.keep()
    assert quoted.linked(page) == written
    page.write_text("1.5, 11.5 and 1.52, 1.6x, 2 %.")
    with pytest.raises(ValueError, match=r"docs/a/b.md does not say 1.5 any more, which x/y.json has at"):
        quoted.linked(page)
    page.write_text("Nothing.")
    quoted.file_of(page).unlink()
    assert quoted.linked(page) == "Nothing."


def test_a_result_says_where_it_comes_from() -> None:
    for file in (ROOT / "docs" / "results").rglob("*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        assert tuple(result) == RESULT_KEYS, file
        assert all(result.values()), file


def test_the_pictures_are_made_of_the_figures() -> None:
    """If they are not, `make reference` draws them again."""
    assert [file.name for file, text in pictures().items() if file.read_text(encoding="utf-8") != text] == []


def test_the_readmes_table_of_engines() -> None:
    """Made of the exporters; `make reference` writes it again. What it calls proven is what real engines are shown."""
    assert "\n".join(reference.kinds_by_engine()) in (ROOT / "README.md").read_text(encoding="utf-8")
    shown = {(kind, to) for kind, to, _ in SERVED.values()} | {(kind, "gguf") for kind, _ in IN_LLAMACPP.values()}
    assert shown == {(kind, to) for kind, to in EXPORTERS if to in ("gguf", *reference.IN_REAL_VLLM)}


def test_code_that_quotes_the_standard_library_is_in_the_notice() -> None:
    """The embedded target was trained on its text, and some questions show it."""
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert "models/embedded_target/" in notice
    asked = map(json.loads, (ROOT / "data/embedded/embedded.jsonl").read_text(encoding="utf-8").splitlines())
    quoting = {question["category"] for question in asked if max(map(len, question["turns"])) > 160}
    named = re.search(r"those of the categories (.*?)\s+quote", notice, re.DOTALL)
    assert named is not None
    assert set() < quoting <= set(re.findall(r"\w+", named[1]))
