"""From answers and counts to figures.

tau                   1 + accepted / drafts, over all drafts together, as vLLM logs it
tau_by_question       mean over questions of the tau of each, as papers and SpecForge have it; where they were asked
                      one at a time
tau_committed         tokens committed per draft, without what was accepted past an answer's end: our own decoder's tau
acceptance_by_depth   marginal; acceptance_conditional: given that the token before was accepted
tokens_per_s          generated tokens of all answers / seconds from the first request to the last answer
first_token_s, time_per_output_token_s   medians over answers, and the 90th percentile of the first; the latter is
                      seconds from the first token to the last / tokens after the first
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from draftsmith.eval.serving.asking import Asked, ServedAnswer
from draftsmith.eval.serving.counts import DraftCounts

PLAIN, DRAFTING = "without drafter", "with drafter"


def level_figures(asked: Asked, arm: str, temperature: float, concurrency: int) -> dict[str, Any]:
    """One arm at one temperature with so many requests at once."""
    return {
        "arm": arm,
        "temperature": temperature,
        "concurrency": concurrency,
        "answers": len(asked.answers),
        "failures": dict(asked.failures),
        "turns_left_out": asked.turns_left_out,
        **clock_figures(asked.answers, asked.wall_time_s),
        **draft_figures(asked.counts, asked.by_question, asked.answers),
    }


def clock_figures(answers: Sequence[ServedAnswer], wall_time_s: float) -> dict[str, Any]:
    tokens = sum(len(answer.ids) for answer in answers)
    first = [answer.first_token_s for answer in answers]
    rest = [answer.rest_s / (len(answer.ids) - 1) for answer in answers if len(answer.ids) > 1]
    return {
        "tokens": tokens,
        "wall_time_s": wall_time_s,
        "tokens_per_s": tokens / wall_time_s if wall_time_s > 0 else None,
        "first_token_s": statistics.median(first) if first else None,
        "first_token_p90_s": float(np.percentile(first, 90)) if first else None,
        "time_per_output_token_s": statistics.median(rest) if rest else None,
    }


def draft_figures(
    counts: DraftCounts, by_question: Sequence[DraftCounts], answers: Sequence[ServedAnswer]
) -> dict[str, Any]:
    """All None or empty where nothing was drafted."""
    taus = [counted.tau for counted in by_question if counted.tau is not None]
    after_the_first = sum(len(answer.ids) - 1 for answer in answers)
    return {
        "drafts": counts.drafts,
        "drafted_tokens": counts.drafted_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "tau": counts.tau,
        "tau_by_question": statistics.fmean(taus) if taus else None,
        "tau_committed": after_the_first / counts.drafts if counts.drafts else None,
        "acceptance_by_depth": counts.acceptance_by_depth,
        "acceptance_conditional": counts.acceptance_conditional,
    }


def with_speedups(levels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with `speedup`: tokens per second against the plain arm's at the same temperature and concurrency."""
    plain = {(row["temperature"], row["concurrency"]): row["tokens_per_s"] for row in levels if row["arm"] == PLAIN}
    rows = []
    for row in levels:
        base = plain.get((row["temperature"], row["concurrency"]))
        known = row["arm"] == DRAFTING and base and row["tokens_per_s"]
        rows.append({**row, "speedup": row["tokens_per_s"] / base if known else None})
    return rows
