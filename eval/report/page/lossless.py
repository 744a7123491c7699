"""Whether the answers stayed the target's, in one word and one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report.summary import OVERALL
from draftsmith.eval.report.text import only_ties


@dataclass(frozen=True)
class Lossless:
    """tone: a class of the style sheet; wrong: methods whose answers are not the target's, for no good reason."""

    word: str
    tone: str
    sentence: str
    wrong: list[str]


def lossless(summary: list[dict[str, Any]], proof: dict[str, Any] | None, answers: int) -> Lossless:
    """
    Args:
        summary: Rows of `summarize`.
        proof: What `draftsmith prove` found, if it was run.
        answers: Of each method: questions times runs.
    """
    rows = [row for row in summary if row["category"] == OVERALL and row["method"] != AUTOREGRESSIVE]
    greedy = [row for row in rows if row["greedy_identical"] is not None]
    wrong = [row["method"] for row in greedy if not row["greedy_identical"] and not only_ties(row)]
    whose = "the changed target's" if any(row.get("target_change") for row in rows) else "the target's"
    if wrong:
        names = ", ".join(wrong)
        return Lossless("NOT LOSSLESS", "bad", f"Greedy answers of {names} differ from {whose}.", wrong)
    if proof is not None and not proof["holds"]:
        return Lossless("NOT PROVED", "bad", "`draftsmith prove` found answers that are not the target's.", [])
    if not greedy:
        if proof is not None:
            return Lossless("Lossless", "good", "Proved on greedy and on sampled answers.", [])
        return Lossless(
            "Lossless by construction",
            "unknown",
            "Sampled answers cannot be compared one by one; `draftsmith prove` tests their distribution.",
            [],
        )
    total, parted = answers * len(greedy), sum(row["different_answers"] for row in greedy)
    if parted:
        sentence = (
            f"{total - parted:,} of {total:,} greedy answers are {whose}, token for token. The other {parted} part "
            "from it where its two best tokens are equally likely within rounding; none differs otherwise."
        )
        return Lossless("Lossless, but for rounding", "good", sentence, [])
    return Lossless("Lossless", "good", f"All {total:,} greedy answers are {whose}, token for token.", [])
