"""What a reader is told first is what the interval says, of what was fastest."""

import pytest
from support.report_facts import SUMMARY, TIMING, row

from draftsmith.eval.report.page.verdict import (
    FASTER,
    NO_GAIN,
    SLOWER,
    UNCLEAR,
    fastest_trained,
    verdict_word,
    verdicts,
)
from draftsmith.recipes.schema import Recipe


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
def test_the_interval_decides(ends: list[float] | None, word: str, tone: str) -> None:
    assert verdict_word(ends) == word
    (verdict,) = verdicts([row("x", "overall", speedup_interval=ends)], [])
    assert (verdict.word, verdict.tone, verdict.why) == (word, tone, None)


def test_sentences_say_it_in_words() -> None:
    def sentence(ends: list[float] | None, speedup: float, others: int = 0) -> str:
        rows = [row("x", "overall", speedup_interval=ends, speedup_mean=speedup)]
        rows += [row(f"y{n}", "overall", speedup_mean=0.1) for n in range(others)]
        return verdicts(rows, [])[0].sentence

    assert sentence([1.2, 1.9], 1.5) == "x generates at 1.50 times the speed of the target alone."
    assert sentence([1.2, 1.9], 1.5, 2).startswith("x, the fastest of 3 methods, generates")
    assert "no gain is shown" in sentence([0.9, 1.4], 1.1)
    assert "slows the target down, to 0.80 times" in sentence([0.7, 0.9], 0.8)
    assert "too few questions" in sentence(None, 1.1)


def test_the_fastest_lossless_method_of_each_temperature() -> None:
    rows = [
        row("slow", "overall", speedup_mean=1.2),
        row("fast", "overall", speedup_mean=1.7),
        row("hasty", "overall", speedup_mean=3.0, lossless=False, greedy_identical=None),
        row("hot", "overall", 1.0, speedup_mean=1.1),
        row("fast", "writing", speedup_mean=9.0),
    ]
    assert [(each.row["method"], each.row["temperature"]) for each in verdicts(rows, [])] == [("fast", 0), ("hot", 1)]
    assert verdicts(SUMMARY[:3], TIMING) == []


def test_why_is_tau_over_what_a_round_costs() -> None:
    """0.25 to draft and 4.5 ms over 4 ms to check: 1.375 steps, for 2.5 tokens."""
    why = verdicts(SUMMARY, TIMING)[0].why
    assert why == (
        "A round keeps 2.50 tokens and takes as long as 1.38 steps of the target alone: 0.25 to draft, 1.12 to check "
        "the draft. 2.50 / 1.38 makes 1.90, of which decoding reaches 95%."
    )


def test_what_was_trained_is_named_where_something_else_won() -> None:
    methods = [{"name": "tree"}, {"name": "chain"}, {"name": "lookup", "kind": "prompt_lookup"}]
    recipe = Recipe.model_validate({"name": "demo", "eval": {"methods": methods}}).model_dump()
    (verdict,) = verdicts(SUMMARY, TIMING)
    assert fastest_trained(verdict, SUMMARY, recipe) is None
    rows = [*SUMMARY, row("lookup", "overall", speedup_mean=2.5), row("chain", "overall", 1.0, speedup_mean=9.0)]
    found = fastest_trained(verdicts(rows, TIMING)[0], rows, recipe)
    assert found is not None
    assert (found["method"], found["temperature"], found["speedup_mean"]) == ("tree", 0.0, 2.01)
    only = [row("lookup", "overall")]
    assert fastest_trained(verdicts(only, [])[0], only, recipe) is None
