"""Lossless is said only of what is, and ties and missing proofs are named."""

from typing import Any

from support.report_facts import BUG, SUMMARY, TIES, row

from draftsmith.eval.report.page.lossless import Lossless, lossless

HOLDS: dict[str, Any] = {"holds": True}


def said(rows: list[dict[str, Any]], proof: dict[str, Any] | None = None) -> Lossless:
    return lossless(rows, proof, answers=10)


def test_identical_answers() -> None:
    """chain and tree, 10 answers each; the baseline's own count nowhere."""
    found = said(SUMMARY)
    assert (found.word, found.tone, found.wrong) == ("Lossless", "good", [])
    assert found.sentence == "All 20 greedy answers are the target's, token for token."
    changed = [each | {"target_change": "LoRA"} for each in SUMMARY]
    assert "the changed target's" in said(changed).sentence


def test_ties_are_counted() -> None:
    found = said([*SUMMARY, TIES])
    assert (found.word, found.tone) == ("Lossless, but for rounding", "good")
    assert found.sentence.startswith("27 of 30 greedy answers are the target's, token for token. The other 3 part")


def test_other_differences_are_not_lossless_whatever_else_holds() -> None:
    found = said([*SUMMARY, TIES, BUG], HOLDS)
    assert (found.word, found.tone, found.wrong) == ("NOT LOSSLESS", "bad", ["bad"])
    assert "Greedy answers of bad differ" in found.sentence


def test_proofs() -> None:
    hot = [row("x", "overall", 1.0)]
    assert (said(hot).word, said(hot).tone) == ("Lossless by construction", "unknown")
    assert (said(hot, HOLDS).word, said(hot, HOLDS).tone) == ("Lossless", "good")
    assert said(SUMMARY, {"holds": False}).word == "NOT PROVED"
