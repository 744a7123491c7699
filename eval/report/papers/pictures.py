"""ParallelSpec's figure 1 as measured: how long a round takes, what of it is drafting, what it is good for."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from draftsmith.eval.report.charts import COLOURS
from draftsmith.eval.report.papers.quoted import Place

PHASES = {
    "t_draft_s": "drafting",
    "t_verify_forward_s": "the target's forward over the draft",
    "t_choose_s": "choosing the path",
    "t_commit_s": "keeping it",
}


def draw_rounds(places: dict[str, Place], file: Path) -> list[str]:
    """A bar a method, in the time of single steps of the target; beside it the tokens that a round commits.

    Args:
        places: By what the picture calls them.
        file: An SVG.

    Returns:
        The names of those that were measured; no file is written where there are none.
    """
    measured = {name: place for name, place in places.items() if place.value("timing.t_target_step_s")}
    if not measured:
        return []
    with matplotlib.rc_context({"svg.hashsalt": "draftsmith", "svg.fonttype": "none", "font.size": 11}):
        figure, axes = plt.subplots(figsize=(9.5, 0.9 + 0.52 * (len(measured) + 1)))
        axes.barh([0], [1.0], color="#999999", height=0.6)
        axes.text(1.02, 0, "one token", va="center")
        for number, place in enumerate(measured.values(), start=1):
            left = 0.0
            for colour, phase in zip(COLOURS, PHASES, strict=False):
                width = steps(place, phase)
                axes.barh([number], [width], left=left, color=colour, height=0.6)
                left += width
            axes.text(left + 0.02, number, f"{place.value('tau'):.2f} tokens", va="center")
        axes.set_yticks(range(len(measured) + 1), ["a single step", *measured])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
        axes.set_xlabel("time of a round, in single steps of the target")
        axes.spines[["top", "right"]].set_visible(False)
        handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour, _ in zip(COLOURS, PHASES, strict=False)]
        axes.legend(handles, list(PHASES.values()), frameon=False, fontsize=9, loc="lower right")
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
    return list(measured)


def steps(place: Place, phase: str) -> float:
    """A phase's median time over a single step's; 0 of what older results did not time."""
    return (place.value(f"timing.{phase}") or 0.0) / (place.value("timing.t_target_step_s") or 1.0)
