"""Verdicts of the report: speed by its interval, and equality with the target's answers."""

from typing import Any

import pytest
from support.report_facts import BUG, SUMMARY, TIES, row

from draftsmith.eval.report.sentences import FASTER, NO_GAIN, SLOWER, UNCLEAR, lossless, verdict_word, verdicts


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
    (verdict,) = verdicts([row("x", "overall", speedup_interval=ends)])
    assert (verdict.word, verdict.tone, verdict.why) == (word, tone, None)


def test_verdict_names_the_fastest_lossless_method() -> None:
    rows = [
        row("slow", "overall", speedup_mean=1.2),
        row("fast", "overall", speedup_mean=1.7),
        row("hasty", "overall", speedup_mean=3.0, lossless=False, greedy_identical=None),
        row("hot", "overall", 1.0, speedup_mean=1.1),
        row("fast", "writing", speedup_mean=9.0),
    ]
    assert [(each.row["method"], each.row["temperature"]) for each in verdicts(rows)] == [("fast", 0), ("hot", 1)]
    assert verdicts(SUMMARY[:3]) == []


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
