"""What Leviathan's theory (`theory.py`) makes of one method's records, for the report's table.

gamma                the longest path that was drafted
alpha                accepted over tried: drafted positions that verification came to, and those where it went on
alpha (overlap)      E[sum min(p, q)] at the same positions, corollary 3.6: measured apart, see `overlap.py`
c                    drafting time over a target step's: of one drafted token for a sequential drafter, of the round
                     for one that drafts at once
c (operations)       the same ratio in arithmetic, of one drafted token; measured apart too
tau (equation 1)     expected tokens with this alpha at each round's own depth. What the measured tau has above that is
                     due to rounds being alike, as easy text comes in stretches
theorem 3.8          that tau over (gamma c + 1), or over (c + 1): as if acceptances were independent and verification
                     cost a single step
theorem 3.11         arithmetic per token over the target's own; as counted, in the pass that is measured apart
best gamma           section 3.5; for a drafter that drafts at once, where c does not grow, `sufficient_gamma`

Theory knows chains. Of a tree, a position is tried once whatever number of children it has, and gamma is its depth.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from draftsmith.eval.decoding.answer import AnswerRecord
from draftsmith.eval.report.theory import best_gamma, expected_tokens, operations_factor, sufficient_gamma


def theory_row(
    turns: list[AnswerRecord], sequential: bool, cost_ratio: float, untimed: dict[str, Any] | None
) -> dict[str, Any]:
    """The table's figures.

    Args:
        turns: All answers of one method at one temperature.
        sequential: See `draftsmith.eval.decoding.method.Method`.
        cost_ratio: A round's drafting time over a target step's.
        untimed: What `overlap.py` measured of this method; None where it was not asked to.
    """
    depths = [depth for turn in turns for depth in turn.draft_depths]
    tried = sum(turn.tried for turn in turns)
    alpha = sum(turn.accepted_drafts for turn in turns) / tried if tried else 0.0
    gamma, mean_depth = max(depths), statistics.fmean(depths)
    tau = sum(count * expected_tokens(alpha, depth) for depth, count in Counter(depths).items()) / len(depths)
    c = cost_ratio / mean_depth if sequential and mean_depth else cost_ratio
    untimed = untimed or {}
    c_operations = untimed.get("operations_ratio")
    return {
        "sequential": sequential,
        "gamma": gamma,
        "alpha": alpha,
        "alpha_overlap": untimed.get("alpha_overlap"),
        "alpha_drafter": untimed.get("alpha_drafter"),
        "c": c,
        "c_operations": c_operations,
        "tau_predicted_iid": tau,
        "speedup_predicted_iid": tau / (cost_ratio + 1),
        "operations_factor": None if c_operations is None else operations_factor(alpha, gamma, c_operations),
        "operations_measured": untimed.get("operations_per_token"),
        "best_gamma": best_gamma(alpha, c) if sequential else sufficient_gamma(alpha),
    }
