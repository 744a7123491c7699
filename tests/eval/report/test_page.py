"""The page of a run with every section."""

import html
import re
from pathlib import Path

import pytest
from support.report_facts import BASELINE, SUMMARY, all_facts, facts, records_of, row

from draftsmith.eval.engines.load_test import EngineMeasurement, LoadTestRow
from draftsmith.eval.report.page import SECTIONS, compare_methods, write_report
from draftsmith.eval.report.summary import summarize
from draftsmith.recipes.schema import Recipe

METHODS = {f"method-{number}": 0.7 + 0.06 * number for number in range(6)}


def text_of(page: str) -> str:
    """Return the text of a page's body, and check that its elements are closed."""
    for tag in ("section", "div", "table", "tr", "dl", "p", "span"):
        assert len(re.findall(rf"<{tag}\b", page)) == page.count(f"</{tag}>"), tag
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page[page.index("<body>") :])).split())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build a page with every section, for 6 methods at two temperatures."""
    folder = tmp_path_factory.mktemp("page")
    return write_report(folder, all_facts(METHODS, (0.0, 1.0))).read_text(encoding="utf-8")


def test_every_section_exists_and_is_linked(page: str) -> None:
    """The page needs no other file and runs no script."""
    ids = re.findall(r'<section id="(\w+)"', page)
    assert ids == [name for name in SECTIONS if name not in ("vocabulary", "served")]
    assert re.findall(r'href="([^"]*)"', page) == [f"#{name}" for name in ids]
    assert not re.search(r"<(script|link|iframe|object|embed|base)\b|\bsrc=|\bon\w+=|@import|url\(|@font-face", page)


def test_first_screen_answers_three_questions(page: str) -> None:
    """2 s against 0.7, 0.77 and 0.84 of the fastest; three tokens a round.

    By task 8 / 3.08, 4 / 1.54 and 4 / 1.47, whose mean is 2.64; pooled 16 / 6.09.
    """
    text = text_of(page)
    first = text[: text.index("Methods By category")]
    assert re.search(
        r"How much faster\? 2\.64× faster 2\.64× faster at T = 1 method-0, the fastest of 6 methods, generates", first
    )
    assert "in the mean over 3 tasks. speedup 2.64 (95 %: 2." in first
    assert "2.63" not in first  # the pooled one is in a table below
    assert "3 tasks (questions: mt_bench 4, translation 2, rag 2)" in text
    assert "tau 3.00 (95 %: 3.00 to 3.00) tokens per round · T = 0" in first
    assert "At T = 1: method-0 2.64×" in first
    assert "Is it lossless? Lossless All 48 greedy answers are the target's, token for token." in first
    assert "Why? A round of method-0 commits 3.00 tokens" in first
    assert '<div class="card verdict good">' in page
    assert '<span class="tag">faster</span>' in page


def test_engines_and_seeds_have_their_tables(tmp_path: Path) -> None:
    served = LoadTestRow("drafting", 0.0, 4, 123.4, 0.2, 2.5, 2.3, [0.5], 1.7)
    values = all_facts({"a/tree": 1.0, "a-seed-1/tree": 0.5})
    values["served"] = [EngineMeasurement("started for this measurement", [served], ["a <note>"])]
    values["proof"] = {
        "holds": True, "greedy": [], "distribution": [], "significance": 0.001, "enumeration_error": 1e-16,
    }  # fmt: skip
    shown = write_report(tmp_path, values).read_text(encoding="utf-8")
    assert '<section id="served">' in shown
    assert "<td>123.4</td>" in shown
    assert "a &lt;note&gt;" in shown
    assert "Proved: 0 greedy tokens" in text_of(shown)
    assert "Over training seeds" in shown
    # The means over tasks, 8 / 4.4, 4 / 2.2 and 4 / 2.1, are 1.85, and twice that.
    assert "<td>2.77</td><td>1.31</td>" in shown


def test_texts_are_escaped_and_rounds_have_their_times(tmp_path: Path) -> None:
    """The run has a lossy method, stop strings, questions that were left out, and a slow baseline."""
    summary = [
        each | {"category": {"writing": "[red]a <d> $f$"}.get(each["category"], each["category"])} for each in SUMMARY
    ]
    reduced = {"decoded_coverage": 0.962, "rounds_ended_outside": 0.0714, "tau_lost_at_most": 0.126}
    summary += [
        row("fast", "overall", lossless=False, greedy_identical=None),
        row("small", "overall", **reduced),
    ]
    values = facts(summary) | {"baseline": BASELINE}
    values["recipe"] = Recipe.model_validate({"name": "demo", "eval": {"stop": ["\n\n", "Q:"]}})
    page = write_report(tmp_path, values).read_text(encoding="utf-8")
    for said in (
        '<th scope="col">[red]a &lt;d&gt; $f$</th>',
        "tree, the fastest of 4 methods, reached 2.01 times the speed",
        "A round of tree commits 2.50 tokens and takes as long as 1.38 steps",
        '<td>4.00</td><td>1.00</td><td>4.50</td><td>0.20</td><td>0.12</td><td class="text">50% 40% </td>',
        "1 question(s) (all of rag), 2 later turn(s)",
        "fast <small>not lossless</small>",
        "<td>96.2%</td><td>7.1%</td><td>0.13</td>",
        "measured with lenience below 1",
        "with a parallel drafter",
    ):
        assert said in page
    assert "Part of any speedup here is due to a slow baseline" in page.split("<nav")[0]


def test_intervals_against_the_fastest_are_paired_by_question() -> None:
    """Twice the time on every question, also on different ones: 0.5 with zero width."""
    records = records_of({"fast": 0.5, "slow": 1.0}, (0.0, 1.0))
    cold, hot = compare_methods(summarize(records), records)
    assert (cold["temperature"], hot["temperature"]) == (0.0, 1.0)
    assert [each["method"] for each in cold["rows"]] == ["fast", "slow"]
    assert cold["against_best"] == {"fast@0": None, "slow@0": pytest.approx([0.5, 0.5])}
