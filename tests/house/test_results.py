"""Measured figures that documents quote: each file says where it comes from, and the documents say what it says."""

import json
from pathlib import Path

import pytest
from support.places import ROOT
from support.quoted_figures import LINK, disagreements, rounds_to, value_at

from draftsmith.recipes.results import RESULT_KEYS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = sorted((ROOT / "docs" / "results").rglob("*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_result_says_where_it_comes_from(file: Path) -> None:
    result = json.loads(file.read_text(encoding="utf-8"))
    assert tuple(result) == RESULT_KEYS
    assert all(result.values())
    assert {"processor", "cpu_count", "memory_bytes"} <= result["machine"].keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_quoted_figures_are_those_of_the_files(page: Path) -> None:
    assert disagreements(page.read_text(encoding="utf-8"), page.parent) == []


def test_figures_are_quoted() -> None:
    """By the pages that live by them: a link that the pattern does not know would not be compared."""
    for name in ("README.md", "docs/smollm2.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert len(LINK.findall(text)) == text.count(".json#") >= 8


def test_how_a_quoted_figure_is_checked(tmp_path: Path) -> None:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    figures = {"rows": {"a/tree@0.5": {"tau": 2.348}}, "list": [{"n": 2200}], "share": 0.857}
    (tmp_path / "docs" / "results" / "a.json").write_text(json.dumps({"figures": figures}))
    place = "docs/results/a.json#figures"
    right = f"[2.35]({place}.rows.a/tree@0.5.tau) [2,200 conversations]({place}.list.0.n) [86 %]({place}.share)"
    assert disagreements(right, tmp_path) == []
    assert disagreements(right.replace("2.35", "2.34x"), tmp_path) == [
        "2.34x is quoted from docs/results/a.json, where figures.rows.a/tree@0.5.tau is 2.348"
    ]
    (tmp_path / "docs" / "guides").mkdir()
    assert disagreements(right.replace("docs/", "../"), tmp_path / "docs" / "guides") == []
    assert len(disagreements(f"[2]({place}.rows.b.tau) [2]({place}.rows)", tmp_path)) == 2


def test_rounding_and_paths() -> None:
    assert rounds_to(1.25, "1.2")
    assert rounds_to(1.25, "1.3")
    assert not rounds_to(1.26, "1.2")
    assert rounds_to(0.005, "0.01 s")
    assert not rounds_to(0.004, "0.01 s")
    assert not rounds_to(1.0, "none")
    assert value_at({"a.b": {"c": 1}, "a": {"b": {"d": 2}}}, "a.b.d") == 2
