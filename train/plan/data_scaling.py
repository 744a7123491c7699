"""What more data is worth: tau against distilled answer tokens, as `benchmarks/data_scaling.py` measured it.

tau(n) = a + b log2(n / 100,000): each doubling of the data adds b. Two parameters, since a power law's third (where it
levels off) is not determined by four sizes; how far the points lie from the line is told with it, and beyond the
largest size that was measured nothing is promised.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.recipes.run_folder import read_json

REFERENCE_TOKENS = 100_000
LEAST_SIZES = 3
STORED = Path(__file__).with_name("data_scaling.json")


@dataclass(frozen=True)
class ScalingFit:
    """tau(n), n in answer tokens. `residual`: of a point, with the two parameters taken off (n - 2)."""

    tau_at_100k: float
    tau_per_doubling: float
    tau_per_doubling_error: float
    residual: float
    least_tokens: int
    most_tokens: int

    def tau(self, answer_tokens: float) -> float:
        return self.tau_at_100k + self.tau_per_doubling * float(np.log2(answer_tokens / REFERENCE_TOKENS))


@dataclass(frozen=True)
class StoredFits:
    """The part of the result file that `plan` reads: a fit for each kind of drafter, with the tree."""

    target: str
    trees: dict[str, ScalingFit]


def fit_scaling(answer_tokens: list[int], taus: list[float]) -> ScalingFit:
    """Least squares.

    Args:
        answer_tokens: Of each training, at least three different sizes.
        taus: Of each drafter.

    Raises:
        ValueError: Too few sizes.
    """
    if len(set(answer_tokens)) < LEAST_SIZES:
        raise ValueError(f"a line needs {LEAST_SIZES} sizes of data at least, not {sorted(set(answer_tokens))}")
    doublings = np.log2(np.array(answer_tokens, dtype=np.float64) / REFERENCE_TOKENS)
    slope, intercept = np.polyfit(doublings, np.array(taus, dtype=np.float64), 1)
    left = np.array(taus) - intercept - slope * doublings
    residual = float(np.sqrt((left**2).sum() / (len(taus) - 2)))
    spread = float(np.sqrt(((doublings - doublings.mean()) ** 2).sum()))
    return ScalingFit(
        float(intercept), float(slope), residual / spread, residual, min(answer_tokens), max(answer_tokens)
    )


def stored_fits(file: Path = STORED) -> StoredFits | None:
    """What ships with draftsmith; None where nothing was measured.

    Raises:
        UserError: The file is damaged.
    """
    if not file.is_file():
        return None
    return read_json(file, StoredFits, "install draftsmith again", "figures")


def what_more_data_is_worth(fits: StoredFits, kind: str, answer_tokens: int | None) -> str | None:
    """A sentence without its full stop, or None for a kind that was not measured.

    Args:
        answer_tokens: Of the recipe's data, if they are distilled already.
    """
    fit = fits.trees.get(kind)
    if fit is None:
        return None
    gain = f"{fit.tau_per_doubling:+.2f} ± {fit.tau_per_doubling_error:.2f}"
    measured = (
        f"each doubling of the answer tokens changed the tree's tau by {gain} between {fit.least_tokens:,} and "
        f"{fit.most_tokens:,} (measured on {fits.target} with {kind}, points {fit.residual:.2f} off the line; your "
        "target may differ)"
    )
    if answer_tokens is None:
        return f"more data: {measured}"
    here = f"more data: there are {answer_tokens:,} answer tokens; {measured}"
    if answer_tokens <= fit.most_tokens:
        return here
    return f"{here}; that is more than was measured, so what more are worth is not known"


def as_stored(result: dict[str, Any]) -> dict[str, Any]:
    """Of a whole result file, what ships: where it comes from, and the fits alone."""
    figures = result["figures"]
    return {**result, "figures": {"target": figures["target"], "trees": figures["fits"]["tree"]}}
