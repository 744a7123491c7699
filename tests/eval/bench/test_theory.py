"""Leviathan's theory by hand."""

import pytest

from draftsmith.eval.bench.theory import expected_tokens, theory_row
from draftsmith.eval.decoding.generate import AnswerRecord


def answer(draft_lengths: list[int], depths: list[int], tried: int) -> AnswerRecord:
    return AnswerRecord(draft_lengths=draft_lengths, draft_depths=depths, tried=tried)


def test_theory_by_hand() -> None:
    """3 of 5 verified tokens accepted at depths 2, 2, 1: alpha .6, tau (1.96 + 1.96 + 1.6) / 3, c = .5 per round."""
    answers = [answer([2, 0, 1], [2, 2, 1], 4), answer([0], [2], 1)]
    row = theory_row(answers, True, 0.5)
    assert (row["gamma"], row["alpha"]) == (2, 0.6)
    tau = (3 * 1.96 + 1.6) / 4
    assert row["tau_predicted_iid"] == pytest.approx(tau)
    assert row["speedup_predicted_iid"] == pytest.approx(tau / 1.5)
    assert row["c"] == pytest.approx(0.5 / (7 / 4))
    # 1, 1.6 / 1.2857, 1.96 / 1.5714, 2.176 / 1.8571: gamma 2 is slightly the best.
    assert row["best_gamma"] == 2
    at_once = theory_row([answer([2, 0, 1], [2, 2, 1], 5)], False, 0.5)
    assert at_once["c"] == 0.5
    assert at_once["best_gamma"] == 9  # .6^10 = .006 is the first power below .01


def test_leviathans_table_1_is_reproduced() -> None:
    """Speed of a drafter without cost (2211.17192)."""
    printed = {(0.6, 2): 1.96, (0.7, 3): 2.53, (0.8, 2): 2.44, (0.8, 5): 3.69, (0.9, 2): 2.71, (0.9, 10): 6.86}
    assert {each: round(expected_tokens(*each), 2) for each in printed} == printed
