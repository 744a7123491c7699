"""How methods compare: all beside each other, by category, by depth, and predicted beside measured.

Functions choose and order rows of the summary and the timing; the templates place their figures on the scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from draftsmith.eval.bench.records import QuestionRecord
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report import bootstrap
from draftsmith.eval.report.page.curves import Scale, scale_around
from draftsmith.eval.report.report import NO_GAIN, SLOWER, verdict_word
from draftsmith.eval.report.summary import OVERALL, Row, by_temperature, drafted_rows, method_key, question_sums

# Speedups from which a cell has the next tint.
LEVELS = (1.0, 1.25, 1.5, 2.0, 2.5)
MOST_DEPTHS = 8
SELDOM = 0.005  # of all rounds: what is deeper is not worth a line


@dataclass(frozen=True)
class MethodTable:
    """The methods of one temperature, the fastest first; rows: of the summary.

    against_best: by `method@temperature`, 95 % of its speedup over the fastest one's; scale: of all speedups.
    """

    temperature: float
    baseline_tokens_per_s: float | None
    rows: list[Row]
    against_best: dict[str, list[float] | None]
    scale: Scale


def method_tables(summary: list[Row], records: Sequence[QuestionRecord] = ()) -> list[MethodTable]:
    """Compare the methods of each temperature, the lowest first, all on one scale.

    Args:
        summary: Rows of `summarize`.
        records: What they are of; without them nothing is paired.
    """
    drafted = drafted_rows(summary)
    if not drafted:
        return []
    ends = [end for row in drafted for end in (row["speedup_interval"] or [row["speedup_mean"]])]
    scale = scale_around([*ends, *(row["speedup_mean"] for row in drafted)], 1.0)
    baselines = {
        row["temperature"]: row["tokens_per_s"]
        for row in summary
        if row["category"] == OVERALL and row["method"] == AUTOREGRESSIVE
    }
    tables = []
    for temperature, rows in by_temperature(drafted).items():
        rows.sort(key=lambda row: -row["speedup_mean"])
        sums = {method_key(row): question_sums(list(records), method_key(row)) for row in rows if records}
        best = sums.get(method_key(rows[0]))
        against = {
            key: None if best is None or each is best else bootstrap.paired_ratio(bootstrap.speedup, each, best)
            for key, each in sums.items()
        }
        tables.append(MethodTable(temperature, baselines.get(temperature), rows, against, scale))
    return tables


def category_tables(
    summary: list[Row], categories: list[str]
) -> list[tuple[float, list[tuple[Row, list[Row | None]]]]]:
    """Of each temperature, list every method's overall row, the fastest first, and its row of each category."""
    cells = {(method_key(row), row["category"]): row for row in summary}
    return [
        (
            temperature,
            [
                (row, [cells.get((method_key(row), category)) for category in categories])
                for row in sorted(rows, key=lambda row: -row["speedup_mean"])
            ],
        )
        for temperature, rows in by_temperature(drafted_rows(summary)).items()
    ]


def tint(row: Row) -> str:
    """The class of a cell by its speedup; what is shown to be neither gain nor loss is tinted like neither."""
    word = verdict_word(row["speedup_interval"])
    if word == NO_GAIN:
        return "plain"
    if word == SLOWER or row["speedup_mean"] < LEVELS[0]:
        return "slow"
    return f"level-{sum(row['speedup_mean'] >= level for level in LEVELS)}"


@dataclass(frozen=True)
class Depths:
    """How deep drafts of one method were accepted.

    shares: (of all rounds, of those that accepted the depth before), from depth 1; more: depths below those listed,
    where few rounds arrive.
    """

    method: str
    temperature: float
    tau_without_bonus: float
    shares: list[tuple[float, float]]
    more: int


def depths_of(timing: list[Row]) -> list[Depths]:
    """Compute the shares of every method that drafts, the one that keeps most first, temperature by temperature.

    Args:
        timing: Rows of `summarize_timing`, whose `acceptance_by_depth` are the conditional shares.
    """
    found = []
    for row in timing:
        conditional = row["acceptance_by_depth"]
        if row["method"] == AUTOREGRESSIVE or not conditional:
            continue
        marginal = list(accumulate(conditional, mul))  # which falls, so that what is shown is a beginning
        count = max(1, sum(share >= SELDOM for share in marginal[:MOST_DEPTHS]))
        shares = list(zip(marginal, conditional, strict=True))[:count]
        # The shares of rounds that kept at least so many tokens add up to the mean number of tokens.
        found.append(Depths(row["method"], row["temperature"], sum(marginal), shares, len(marginal) - count))
    return sorted(found, key=lambda each: (each.temperature, -each.tau_without_bonus))


def predictions(timing: list[Row]) -> tuple[list[Row], Scale] | None:
    """Choose the timing of every method that drafts, the fastest first, and a scale for its speedups.

    None if no method drafts.
    """
    rows = [row for row in timing if row["method"] != AUTOREGRESSIVE]
    if not rows:
        return None
    keys = ("speedup_predicted", "speedup_predicted_iid", "speedup_decoding")
    scale = scale_around([row[key] for row in rows for key in keys], 1.0)
    return sorted(rows, key=lambda row: (row["temperature"], -row["speedup_decoding"])), scale
