"""How deep drafts are kept: of all rounds (marginal), and of those that kept the token before (conditional)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from draftsmith.eval.decoding.method import AUTOREGRESSIVE

MOST_DEPTHS = 8
SELDOM = 0.005  # of all rounds: what is deeper is not worth a line


@dataclass(frozen=True)
class Depth:
    """Shares from 0 to 1."""

    depth: int
    marginal: float
    conditional: float


@dataclass(frozen=True)
class Depths:
    """more: depths below those listed, where few rounds arrive."""

    method: str
    temperature: float
    tau_without_bonus: float
    depths: list[Depth]
    more: int


def depths_of(timing: list[dict[str, Any]]) -> list[Depths]:
    """Of every method that drafts, the one that keeps most first, temperature by temperature.

    Args:
        timing: Rows of `summarize_timing`, whose `acceptance_by_depth` are the conditional shares.
    """
    rows = [row for row in timing if row["method"] != AUTOREGRESSIVE and row["acceptance_by_depth"]]
    found = [_depths(row) for row in rows]
    return sorted(found, key=lambda each: (each.temperature, -each.tau_without_bonus))


def _depths(row: dict[str, Any]) -> Depths:
    conditional = row["acceptance_by_depth"]
    marginal = list(accumulate(conditional, mul))
    every = [Depth(number, *pair) for number, pair in enumerate(zip(marginal, conditional, strict=True), start=1)]
    shown = [each for each in every[:MOST_DEPTHS] if each.depth == 1 or each.marginal >= SELDOM]
    # The shares of rounds that kept at least so many tokens add up to the mean number of tokens.
    return Depths(row["method"], row["temperature"], sum(marginal), shown, len(every) - len(shown))
