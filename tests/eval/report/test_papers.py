"""The papers' page: each figure is the file's, what was not measured is not told, and Leviathan's table 1 comes out."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.places import ROOT

from draftsmith.eval.report.page.rounds import ShownAnswer, ShownQuestion, ShownRound
from draftsmith.eval.report.papers.page import page_text, write_page
from draftsmith.eval.report.papers.pictures import DRAFTED, draw_answer, draw_rounds, pieces, steps
from draftsmith.eval.report.papers.tables import (
    EMBEDDED,
    SMOLLM2,
    Place,
    expected_and_measured,
    main_table,
    ngram_alphas,
    number_of_masks,
    operations_and_speed,
    place,
    ratio,
)


def row(speedup: float, tau: float, **timing: Any) -> dict[str, Any]:
    return {
        "speedup_mean": speedup,
        "speedup_interval": [speedup - 0.1, speedup + 0.1],
        "tau": tau,
        "by_category": {"mt_bench": {"speedup_mean": speedup + 0.5}, "qa": {"speedup_mean": speedup - 0.5}},
        "timing": {
            "cost_ratio": 0.25,
            "t_target_step_s": 0.02,
            "t_draft_s": 0.005,
            "t_verify_forward_s": 0.03,
            **timing,
        },
    }


def results(folder: Path, **files: dict[str, Any]) -> Path:
    folder = folder / "results"
    folder.mkdir(parents=True)
    for name, rows in files.items():
        (folder / f"{name}.json").write_text(json.dumps({"figures": {"rows": rows}}), encoding="utf-8")
    return folder


def cells(markdown: str) -> list[list[str]]:
    """Without the links."""
    lines = [line.strip("| ").split(" | ") for line in markdown.splitlines()]
    return [[cell.split("](")[0].lstrip("[") for cell in line] for line in lines]


def test_a_figure_is_quoted_with_its_place(tmp_path: Path) -> None:
    place = Place(results(tmp_path, a={"x/y@0": row(1.25, 2.345)}), "a", "x/y@0")
    assert place.quoted("speedup_mean", "{:.2f}x") == "[1.25x](results/a.json#figures.rows.x/y@0.speedup_mean)"
    assert place.value("speedup_interval.1") == pytest.approx(1.35)
    assert place.quoted("speedup_interval.2") == place.quoted("nothing.there") == "-"
    assert Place(tmp_path / "results", "b", "x/y@0").quoted("tau") == "-"


def test_a_ratio_is_of_one_measurement(tmp_path: Path) -> None:
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
    assert place(folder, "t", "p", 1.0).quoted("tau") == "[1.00](results/t_b.json#figures.rows.p@1.tau)"
    assert place(folder, "t", "p", 2.0).quoted("tau") == "-"


def test_the_main_table_sets_each_flavour_over_what_it_replaces(tmp_path: Path) -> None:
    folder = results(
        tmp_path,
        smollm2_table={
            "smollm2-135m-medusa/medusa-tree@0": row(1.5, 2.0),
            "smollm2-135m/smollm2-tree@0": row(2.0, 2.5),
            "smollm2-135m-seed-1/smollm2-tree@0": row(1.9, 2.4),
        },
    )
    head, _, medusa, flavour, again, over = cells(main_table(folder, SMOLLM2, 0.0))
    assert head[1:4] == ["MT-bench", "translation", "summary"]
    assert head[-4:] == [
        "overall",
        "tau",
        "draft / step",
        "95 %",
    ]
    assert medusa == ["Medusa", "2.00x", "-", "-", "1.00x", "-", "-", "1.50x", "2.00", "0.25", "1.40 to 1.60"]
    assert flavour[0] == "Medusa-ParallelSpec, inner features"
    assert flavour[7:9] == ["2.00x", "2.50"]
    assert again[0].endswith("second seed")
    assert again[7:9] == ["1.90x", "2.40"]
    assert over[:2] == ["*flavour over base*", "1.25x"]
    assert over[7:9] == ["1.33x", "1.25x"]
    assert main_table(folder, EMBEDDED, 1.0) == "*Not measured yet.*"
    # Where only one seed was trained, methods have no recipe's name before their own.
    one = results(tmp_path / "one", table={"eagle-tree@1": row(1.5, 2.0), "eagle-parallel-tree@1": row(1.8, 1.9)})
    named = [line[0] for line in cells(main_table(one, EMBEDDED, 1.0))[2:]]
    assert named == ["EAGLE", "EAGLE-ParallelSpec", "*flavour over base*"]


def test_masks_and_ngrams_and_expectations(tmp_path: Path) -> None:
    folder = results(
        tmp_path,
        masks={
            "quickstart-num_masks-3/parallel-chain@0": row(1.2, 2.1),
            "quickstart-num_masks-3/parallel-tree@0": row(1.3, 2.4),
        },
        table={
            "bigram@1": row(1.0, 1.2, alpha=0.2),
            "eagle-chain@0": row(
                1.1, 2.0, gamma=5, alpha=0.5, c=0.1, speedup_predicted_iid=1.31, speedup_decoding=1.21
            ),
        },
    )
    assert cells(number_of_masks(folder, range(1, 7)))[2:] == [["3", "2.10", "1.20x", "2.40", "1.30x", "0.25"]]
    assert cells(ngram_alphas(folder, [("us", "table", "", 1.0), ("us", "table", "", 0.0)]))[2:] == [
        ["us", "1", "-", "0.20", "-"]
    ]
    rows = [("EAGLE", "table", "eagle-chain", 0.0), ("EAGLE", "table", "eagle-chain", 1.0)]
    assert cells(expected_and_measured(folder, rows))[2:] == [["EAGLE", "0", "5", "0.50", "0.10", "1.31x", "1.21x"]]


def test_leviathans_table_1() -> None:
    """As printed there."""
    printed = ["1.53x 1.96x", "1.58x 2.53x", "1.23x 2.44x", "1.63x 3.69x", "1.11x 2.71x", "1.60x 6.86x"]
    assert [" ".join(line[2:]) for line in cells(operations_and_speed())[2:]] == printed


def test_a_round_is_drawn_in_single_steps(tmp_path: Path) -> None:
    folder = results(tmp_path, a={"x@0": row(1.5, 2.0), "old@0": {"tau": 2.0}})
    place = Place(folder, "a", "x@0")
    assert (steps(place, "t_draft_s"), steps(place, "t_verify_forward_s"), steps(place, "t_choose_s")) == (
        0.25,
        1.5,
        0.0,
    )
    file = tmp_path / "round.svg"
    assert draw_rounds({"X": place, "old": Place(folder, "a", "old@0")}, file) == ["X"]
    drawn = file.read_text(encoding="utf-8")
    assert "2.00 tokens" in drawn
    assert "drafting" in drawn
    draw_rounds({"X": place}, file)
    assert file.read_text(encoding="utf-8") == drawn, "the same figures draw the same file"
    assert draw_rounds({"old": Place(folder, "a", "old@0")}, tmp_path / "none.svg") == []
    assert not (tmp_path / "none.svg").exists()


def test_a_page_without_any_result_is_whole(tmp_path: Path) -> None:
    page = write_page(results(tmp_path), tmp_path / "paper.md")
    text = page.read_text(encoding="utf-8")
    assert text.count("*Not measured yet.*") == 7
    assert "6.86x" in text
    assert not (tmp_path / "pictures").exists()


def test_an_answer_shows_who_made_its_tokens(tmp_path: Path) -> None:
    rounds = [
        ShownRound(1, " is\nits", 3, [], " & own", 5),
        ShownRound(2, "", 0, ["x"], " end" + "." * 100, 5),
    ]
    answer = ShownAnswer("a/tree", "parallel", "This", rounds)
    assert pieces(answer) == [("This", False), (" is\nits", True), (" & own", False), (" end" + "." * 100, False)]
    file = draw_answer(ShownQuestion(1, "qa", "What?", [answer, answer]), tmp_path / "a.svg")
    drawn = ElementTree.parse(file).getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in drawn.iter(f"{space}text")]
    head = "a/tree: 5 tokens in 2 rounds"
    block = [head, "This", " is", "its", " & own", " end" + "." * 79, "." * 21]
    assert texts == block * 2
    green = [element for element in drawn.iter(f"{space}rect") if element.get("fill") == DRAFTED]
    assert [float(element.attrib["width"]) for element in green] == [23.4, 23.4] * 2
    lines = [float(element.attrib["y"]) for element in drawn.iter(f"{space}text")]
    assert lines[3] - lines[2] == 20.0
    assert lines == sorted(lines)
    assert max(lines) < float(drawn.attrib["height"])


def test_the_page_says_what_the_files_say() -> None:
    """`python -m draftsmith.eval.report.papers docs` writes it anew."""
    assert (ROOT / "docs" / "paper.md").read_text(encoding="utf-8") == page_text(ROOT / "docs" / "results")
