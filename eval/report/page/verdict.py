"""What a reader is told first: faster, no gain or SLOWER, by how much and how surely; and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report.summary import OVERALL
from draftsmith.recipes.schema import DRAFTER_KIND

FASTER, NO_GAIN, SLOWER, UNCLEAR = "faster", "no gain", "SLOWER", "too few questions"
# Classes of the style sheet.
TONES = {FASTER: "good", NO_GAIN: "even", SLOWER: "bad", UNCLEAR: "unknown"}


@dataclass(frozen=True)
class Verdict:
    """Of the fastest method at one temperature; `row` is its row of the summary, over all questions."""

    word: str
    sentence: str
    why: str | None
    row: dict[str, Any]

    @property
    def tone(self) -> str:
        return TONES[self.word]


def verdict_word(ends: list[float] | None) -> str:
    """By the 95 % interval of the speedup; of a single question there is none."""
    if ends is None:
        return UNCLEAR
    if ends[0] > 1:
        return FASTER
    return SLOWER if ends[1] < 1 else NO_GAIN


def verdicts(summary: list[dict[str, Any]], timing: list[dict[str, Any]]) -> list[Verdict]:
    """Of each temperature, the lowest first; empty where only the baseline was measured.

    Args:
        summary: Rows of `summarize`.
        timing: Rows of `summarize_timing`.
    """
    drafted = [row for row in summary if row["category"] == OVERALL and row["method"] != AUTOREGRESSIVE]
    found = []
    for temperature in sorted({row["temperature"] for row in drafted}):
        rows = [row for row in drafted if row["temperature"] == temperature]
        # What is not lossless only wins where nothing else was measured.
        best = max(rows, key=lambda row: (row["lossless"], row["speedup_mean"]))
        same = (row for row in timing if (row["method"], row["temperature"]) == (best["method"], temperature))
        found.append(_verdict(best, len(rows), next(same, None)))
    return found


def fastest_trained(verdict: Verdict, summary: list[dict[str, Any]], recipe: dict[str, Any]) -> dict[str, Any] | None:
    """The row of the fastest method with a trained drafter, where the verdict is about one that needs none."""
    trained = {method["name"] for method in recipe["eval"]["methods"] if method["kind"] == DRAFTER_KIND}
    if verdict.row["method"] in trained:
        return None
    rows = (row for row in summary if row["category"] == OVERALL and row["method"] in trained)
    same = [row for row in rows if row["temperature"] == verdict.row["temperature"]]
    return max(same, key=lambda row: (row["lossless"], row["speedup_mean"]), default=None)


def _verdict(best: dict[str, Any], methods: int, timing: dict[str, Any] | None) -> Verdict:
    word = verdict_word(best["speedup_interval"])
    name, times = best["method"], f"{best['speedup_mean']:.2f} times the speed of the target alone"
    among = f", the fastest of {methods} methods," if methods > 1 else ""
    if word == FASTER:
        sentence = f"{name}{among} generates at {times}."
    elif word == NO_GAIN:
        sentence = f"{name}{among} reaches {times}, but the interval includes 1: no gain is shown."
    elif word == SLOWER:
        sentence = f"{name}{among} slows the target down, to {times}."
    else:
        sentence = f"{name}{among} reached {times}, on too few questions to say how surely."
    return Verdict(word, sentence, None if timing is None else _why(timing), best)


def _why(timing: dict[str, Any]) -> str:
    """tau over what a round costs, and what the loop makes of that."""
    draft = timing["cost_ratio"]
    forward = timing["t_verify_forward_s"] / timing["t_target_step_s"]
    tau, steps = f"{timing['tau']:.2f}", f"{draft + forward:.2f}"
    return (
        f"A round keeps {tau} tokens and takes as long as {steps} steps of the target alone: {draft:.2f} to draft, "
        f"{forward:.2f} to check the draft. {tau} / {steps} makes "
        f"{timing['speedup_predicted']:.2f}, of which decoding reaches {timing['loop_efficiency']:.0%}."
    )
