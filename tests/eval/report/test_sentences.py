"""The report is complete and states missing results."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.report_facts import BASELINE, BUG, SUMMARY, TIES, TIMING, facts, row

from draftsmith.eval.report.page.page import write_report
from draftsmith.eval.report.sentences import (
    FASTER,
    NO_GAIN,
    SLOWER,
    UNCLEAR,
    lossless,
    next_steps,
    verdict_word,
    verdicts,
)
from draftsmith.recipes.schema import Recipe

SLOWNESS = "Part of any speedup here is due to a slow baseline"


def test_report_in_markdown(tmp_path: Path) -> None:
    """The run has two temperatures, a draft vocabulary, a lossy method, stop strings, and a slow baseline."""
    reduced = {"decoded_coverage": 0.962, "rounds_ended_outside": 0.0714, "tau_lost_at_most": 0.126}
    strange = "[red]a|*b* _c_ <d>\n~~e~~ $f$ multi_turn"
    summary = [
        entry | {"category": {"writing": strange}.get(entry["category"], entry["category"])} for entry in SUMMARY
    ]
    summary += [entry | {"temperature": 1.0, "greedy_identical": None} for entry in summary]
    summary += [
        row("small", "overall", **reduced),
        row("fast", "overall", lossless=False, greedy_identical=None),
    ]
    values = facts(summary) | {"baseline": BASELINE}
    values["recipe"] = Recipe.model_validate({"name": "demo", "eval": {"stop": ["\n\n", "Q:"]}}).model_dump()
    markdown, html = write_report(tmp_path, values)
    text = markdown.read_text()
    assert text.index("**Lossless.** All 720 greedy answers are the target's") < text.index("## Overall")
    assert "- T = 0: **too few questions**. tree, the fastest of 4 methods, reached 2.01 times the speed" in text
    assert "2.50 tokens per round. A round of tree commits 2.50 tokens and takes as long as 1.38 steps" in text
    for said in (
        "| tree | 0 | 2.50 | 2.31 to 2.74 | 2.61 | 1.50 | 2.01 | - | 0.100 | 1.73 | - | 1234 | yes |",
        r"| \[red\]a\|\*b\* \_c\_ \<d\> \~\~e\~\~ \$f\$ multi_turn |",
        "draftsmith run runs/demo/recipe.yaml",
        "1 question(s) (all of rag), 2 later turn(s)",
        r'new tokens a turn (ended by "\n\n", "Q:" too), ',
        "The baseline's step reads 2.0 of 4.0 GB/s (50 %). " + SLOWNESS,
        "measured with lenience below 1",
        "with a parallel drafter",
    ):
        assert said in text
    assert re.search(r"\| fast \| 0 \| .* \| not lossless \|", text)
    # Tables are valid: no blank line between rows, and each row has as many cells as its header.
    for table in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        lines = table.strip().split("\n")
        assert len(lines) > 2
        assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1
    page = html.read_text()
    assert "&lt;d&gt;" in page
    assert "<td>96.2%</td><td>7.1%</td><td>0.13</td>" in page
    assert "fast <small>not lossless</small>" in page
    # 1 ms of 5.823, then 4.5 ms, on a scale that is 2 % longer.
    assert '<rect class="forward" x="16.84%" width="75.76%"' in page
    assert SLOWNESS.replace("'", "&#39;") in page.split("<nav")[0]


@pytest.mark.parametrize(
    ("ends", "word", "tone"),
    [
        ([1.001, 2.0], FASTER, "good"),
        ([1.0, 2.0], NO_GAIN, "even"),
        ([0.9, 1.0], NO_GAIN, "even"),
        ([0.5, 0.999], SLOWER, "bad"),
        (None, UNCLEAR, "unknown"),
    ],
)
def test_verdict_follows_from_the_interval(ends: list[float] | None, word: str, tone: str) -> None:
    assert verdict_word(ends) == word
    (verdict,) = verdicts([row("x", "overall", speedup_interval=ends)], [])
    assert (verdict.word, verdict.tone, verdict.why) == (word, tone, None)


def test_verdict_names_the_fastest_lossless_method() -> None:
    rows = [
        row("slow", "overall", speedup_mean=1.2),
        row("fast", "overall", speedup_mean=1.7),
        row("hasty", "overall", speedup_mean=3.0, lossless=False, greedy_identical=None),
        row("hot", "overall", 1.0, speedup_mean=1.1),
        row("fast", "writing", speedup_mean=9.0),
    ]
    assert [(each.row["method"], each.row["temperature"]) for each in verdicts(rows, [])] == [("fast", 0), ("hot", 1)]
    assert verdicts(SUMMARY[:3], TIMING) == []


def test_advice_is_about_the_lowest_temperature() -> None:
    hot = TIMING[0] | {"method": "hot", "temperature": 1.0, "speedup_with_prefill": 9.0}
    steps = " ".join(next_steps(SUMMARY, [hot, TIMING[0] | {"cost_ratio": 52.887}], Recipe(name="demo").model_dump()))
    assert "in 50% of the rounds of tree:" in steps
    assert "Drafting costs 52.89 steps of the target:" in steps


def test_lossless_verdict() -> None:
    """chain and tree have 10 answers each, the baseline's do not count. Differences other than ties decide."""

    def sentences(rows: list[dict[str, Any]], proof: dict[str, Any] | None = None) -> tuple[str, str, str]:
        found = lossless(rows, proof, answers=10)
        return found.word, found.tone, found.sentence

    everything = "All 20 greedy answers are the target's, token for token."
    assert sentences(SUMMARY) == ("Lossless", "good", everything)
    assert "the changed target's" in sentences([each | {"target_change": "LoRA"} for each in SUMMARY])[2]
    word, tone, sentence = sentences([*SUMMARY, TIES])
    assert (word, tone) == ("Lossless, but for rounding", "good")
    assert sentence.startswith("27 of 30 greedy answers are the target's, token for token. The other 3 differ")
    wrong = ("NOT LOSSLESS", "bad", "Greedy answers of bad differ from the target's.")
    assert sentences([*SUMMARY, TIES, BUG], {"holds": True}) == wrong
    hot = [row("x", "overall", 1.0)]
    assert sentences(hot)[:2] == ("Lossless by construction", "unknown")
    assert sentences(hot, {"holds": True})[:2] == ("Lossless", "good")
    assert sentences(SUMMARY, {"holds": False})[0] == "NOT PROVED"
