"""How much of a difference between drafters is chance: the same recipe trained with several seeds, mean and spread.

The rows of one recipe's seeds are told by their methods' names: `recipe/method`, `recipe-seed-1/method`, ...
"""

import re
import statistics
from typing import Any

from draftsmith.eval.report.summary import OVERALL
from draftsmith.recipes.schema import SEED_SUFFIX


def seed_spread(summary: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each method and temperature that several seeds were trained of: means and standard deviations over them.

    Args:
        summary: Rows of `summarize`.
    """
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in summary:
        if row["category"] == OVERALL and row["tau"] is not None:
            name = re.sub(rf"{SEED_SUFFIX}\d+(?=/|$)", "", row["method"])
            groups.setdefault((name, row["temperature"]), []).append(row)
    return [
        {
            "method": name,
            "temperature": temperature,
            "seeds": len(rows),
            **{
                f"{figure}_{kind}": over([row[key] for row in rows])
                for figure, key in (("tau", "tau"), ("speedup", "speedup_mean"))
                for kind, over in (("mean", statistics.fmean), ("std", statistics.stdev))
            },
        }
        for (name, temperature), rows in groups.items()
        if len(rows) > 1
    ]
