"""What of the documents is made from something else is what that says today."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from generate import commands, recipe_keys
from generate.markdown import cell
from generate.picture import ARMS, LEFT, measured, pictures
from typer.testing import CliRunner

from draftsmith.eval.commands.cli import app
from draftsmith.recipes.schema import Recipe

SPEEDUPS = pictures()
MADE = {**commands.pages(), **recipe_keys.pages()}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("file", SPEEDUPS, ids=lambda file: file.stem)
def test_the_picture_shows_the_figures(file: Path) -> None:
    """If not: `make reference`."""
    assert file.read_text(encoding="utf-8") == SPEEDUPS[file]
    drawn = ElementTree.fromstring(SPEEDUPS[file])
    rows, _ = measured()
    speedups = [rows[name]["speedup_mean"] for name in ARMS]
    lengths = [float(bar.attrib["width"]) for bar in drawn.iter(f"{SVG}rect")]
    assert [length / lengths[0] for length in lengths] == pytest.approx(speedups, rel=0.002)  # a tenth of a pixel
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert [text for text in texts if re.fullmatch(r"[\d.]+x", text or "")] == [f"{each:.2f}x" for each in speedups]
    whiskers = [path.attrib["d"] for path in drawn.iter(f"{SVG}path")]
    ends = [[float(end) for end in re.findall(r"[MH]([\d.]+)", whisker)[:2]] for whisker in whiskers]
    scale = lengths[0]
    intervals = [interval for name in ARMS if (interval := rows[name]["speedup_interval"])]
    assert [[(end - LEFT) / scale for end in pair] for pair in ends] == [
        pytest.approx(each, rel=0.002) for each in intervals
    ]


@pytest.mark.parametrize("file", MADE, ids=lambda file: file.name)
def test_a_page_made_from_the_code_is_up_to_date(file: Path) -> None:
    """If not: `make reference`."""
    assert file.read_text(encoding="utf-8") == MADE[file]


def test_every_key_and_option_says_what_it_means() -> None:
    assert recipe_keys.undescribed_keys() == []
    assert commands.undescribed() == []


def test_the_recipe_reference_has_every_key() -> None:
    """By walking through a recipe itself, as it is written into a run's folder."""
    values = Recipe(name="mine", data={"conversations": {"mixture": [{"source": "a.json"}]}}).model_dump()
    text = next(text for file, text in MADE.items() if file.name == "recipes.md")
    tables = {
        heading.strip("`").replace("The recipe itself", ""): set(re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE))
        for heading, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    }

    def walk(section: dict[str, object], key: str) -> None:
        found = tables["data.conversations"] if key == "data.conversations.mixture" else set()
        assert set(section) <= tables[key] | found, key
        for name, value in section.items():
            place = f"{key}.{name}".lstrip(".")
            inner = value[0] if isinstance(value, list) and value else value
            if isinstance(inner, dict) and place in tables:
                walk(inner, place)

    walk(values, "")
    assert {key for key in tables if key} >= {"target", "data.conversations.filters", "eval.methods", "validation"}


def test_the_command_reference_is_what_help_says() -> None:
    text = next(text for file, text in MADE.items() if file.name == "commands.md")
    for name, body in re.findall(r"^## `draftsmith (\w+)`\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE):
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).stdout
        options = re.findall(r"^\| `(--[\w-]+)[^`]*` \|[^|]*\| (.*) \|$", body, re.MULTILINE)
        for option, meaning in options:
            assert option in shown
            assert meaning in cell(shown)
        assert set(re.findall(r"(?<!\S)--[a-z][\w-]+", shown)) - {"--help"} == {option for option, _ in options}


def test_a_cell_stays_in_its_row() -> None:
    assert cell("a | b\n c_d **e** `f_g | *`") == r"a \| b c\_d \*\*e\*\* `f_g \| *`"
