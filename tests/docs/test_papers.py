"""The page of papers: its figures are the files', nothing unmeasured is claimed, Leviathan's table 1 is reproduced."""

import json
from pathlib import Path
from typing import Any

from generate.papers.page import page_text
from generate.papers.pictures import pieces
from generate.papers.tables import (
    Place,
    operations_and_speed,
    place,
    ratio,
)
from support.places import ROOT

from draftsmith.eval.bench.traced import TracedAnswer, TracedRound


def row(speedup: float, tau: float) -> dict[str, Any]:
    return {"speedup_mean": speedup, "tau": tau}


def results(folder: Path, **files: dict[str, Any]) -> Path:
    folder = folder / "results"
    folder.mkdir(parents=True)
    for name, rows in files.items():
        (folder / f"{name}.json").write_text(json.dumps({"figures": {"rows": rows}}), encoding="utf-8")
    return folder


def test_ratio_is_within_one_measurement(tmp_path: Path) -> None:
    folder = results(tmp_path, a={"p@0": row(3.0, 2.0), "q@0": row(2.0, 1.0)}, b={"q@0": row(1.0, 1.0)})
    above = Place(folder, "a", "p@0")
    assert ratio(above, Place(folder, "a", "q@0"), "speedup_mean") == "1.50x"
    assert ratio(above, Place(folder, "b", "q@0"), "speedup_mean") == "-"
    assert ratio(above, Place(folder, "a", "r@0"), "speedup_mean") == "-"
    # A table may have several runs.
    folder = results(
        tmp_path / "t", t={"p@0": row(3, 2)}, t_b={"p@0": row(2, 2), "p@1": row(2, 1)}, tea={"p@2": row(1, 1)}
    )
    assert place(folder, "t", "p", 0.0).file == "t"
    assert place(folder, "t", "p", 1.0).file == "t_b"
    assert place(folder, "t", "p", 1.0).text("tau") == "1.00"
    assert place(folder, "t", "p", 2.0).text("tau") == "-"


def test_leviathans_table_1_is_reproduced() -> None:
    printed = ["1.53x 1.96x", "1.58x 2.53x", "1.23x 2.44x", "1.63x 3.69x", "1.11x 2.71x", "1.60x 6.86x"]
    lines = [line.strip("| ").split(" | ") for line in operations_and_speed().splitlines()]
    assert [" ".join(line[2:]) for line in lines[2:]] == printed


def test_answer_marks_draft_and_target_tokens() -> None:
    rounds = [
        TracedRound(["", " is", "\n", "its"], [-1, 0, 1, 2], [0, 1, 2, 3], " & own"),
        TracedRound(["", "x"], [-1, 0], [0], " end" + "." * 100),
    ]
    answer = TracedAnswer("a/tree@0", "parallel", 1, "qa", "What?", "This", rounds)
    assert pieces(answer) == [("This", False), (" is\nits", True), (" & own", False), (" end" + "." * 100, False)]


def test_page_agrees_with_the_files() -> None:
    """If it does not, `cd docs && python -m generate.papers` rewrites the page."""
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    assert page.split() == page_text(ROOT / "docs" / "results").split()
