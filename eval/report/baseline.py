"""How good the baseline is: what a step of it reads in its time, beside what a plain read of as many bytes reaches.

A speedup over a slow baseline is partly the baseline's slowness, and no reader sees that in the speedup itself.
"""

from __future__ import annotations

import statistics
from typing import Any

from draftsmith.eval.bench.records import QuestionRecord

SLOW_SHARE = 0.7  # below it the report says that the speedup is partly the baseline's slowness
GIGABYTE = 1e9
MEANING = (
    "the baseline's step reads = bytes of the target's weights over the time of its step (t_target_step), of what a "
    "plain read of as many bytes reached on this machine between the questions"
)


def baseline_speeds(records: list[QuestionRecord], timing: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each temperature; none where nothing was read, as by earlier versions.

    Args:
        timing: Rows of `summarize_timing` of the same records.
    """
    reads = [
        (record.weights_bytes, record.weights_read_s)
        for record in records
        if record.weights_bytes and record.weights_read_s
    ]
    if not reads:
        return []
    read_bytes_per_s = statistics.median(count / seconds for count, seconds in reads)
    weights_bytes = reads[0][0]
    rows = []
    for temperature, step_s in {row["temperature"]: row["t_target_step_s"] for row in timing}.items():
        if step_s > 0:
            step_bytes_per_s = weights_bytes / step_s
            rows.append(
                {
                    "temperature": temperature,
                    "weights_bytes": weights_bytes,
                    "step_s": step_s,
                    "step_bytes_per_s": step_bytes_per_s,
                    "read_bytes_per_s": read_bytes_per_s,
                    "share": step_bytes_per_s / read_bytes_per_s,
                }
            )
    return rows


def baseline_sentences(rows: list[dict[str, Any]]) -> list[str]:
    """Of each temperature, and what it means for the speedup where the share is small.

    Args:
        rows: Of `baseline_speeds`.
    """
    return [_sentence(row, f"At T = {row['temperature']:g} the" if len(rows) > 1 else "The") for row in rows]


def _sentence(row: dict[str, Any], begins: str) -> str:
    step, read = (_gigabytes(row[key]) for key in ("step_bytes_per_s", "read_bytes_per_s"))
    said = f"{begins} baseline's step reads {step} of {read} GB/s ({100 * row['share']:.0f} %)."
    if row["share"] >= SLOW_SHARE:
        return said
    return (
        f"{said} Part of any speedup here is the baseline's slowness: beside a step at the speed of a plain read the "
        "same round would gain less."
    )


def _gigabytes(bytes_per_s: float) -> str:
    value = bytes_per_s / GIGABYTE
    return f"{value:.1f}" if value >= 1 else f"{value:.3f}"
