"""What `gpu.py` measured, in four panels; a part that is missing leaves its panel empty."""

from pathlib import Path
from typing import Any

REACH = {"tree": 1.15, "loop": 0.9, "attention": 1.3}  # what is to be reached, at 48 nodes, is a line
COLOURS = ("tab:blue", "tab:orange")


def draw(parts: dict[str, Any], title: str, file: Path) -> None:
    """parts: figures by part and measurement."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((trees, loop), (attention, training)) = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    figure.suptitle(title)
    _draw_trees(trees, parts)
    _draw_loop(loop, parts)
    _draw_attention(attention, parts.get("attention", {}))
    _draw_training(training, parts.get("training", {}))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _draw_trees(axes: Any, parts: dict[str, Any]) -> None:
    for part, label, colour in zip(("trees", "compiled_trees"), ("eager", "compiled"), COLOURS, strict=True):
        points = sorted((int(name.split("_")[0]), row["ratio"]) for name, row in parts.get(part, {}).items())
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label, color=colour)
    axes.axhline(REACH["tree"], color="gray", linestyle=":")
    nodes = {int(name.split("_")[0]) for part in ("trees", "compiled_trees") for name in parts.get(part, {})}
    axes.set_xticks(sorted(nodes))
    axes.set(title="target forward over a tree", xlabel="nodes", ylabel="single steps")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _draw_loop(axes: Any, parts: dict[str, Any]) -> None:
    kinds = list(dict.fromkeys(kind for part in ("drafts", "compiled_drafts") for kind in parts.get(part, {})))
    for part, label, colour, shift in zip(
        ("drafts", "compiled_drafts"), ("eager", "compiled"), COLOURS, (-0.2, 0.2), strict=True
    ):
        rows = parts.get(part, {})
        places = [kinds.index(kind) + shift for kind in rows]
        if rows:
            efficiencies = [row["tree@0"]["loop_efficiency_of_parts"] for row in rows.values()]
            axes.bar(places, efficiencies, width=0.4, label=label, color=colour)
    axes.axhline(REACH["loop"], color="gray", linestyle=":")
    axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
    axes.set(title="loop efficiency, tree at T = 0", ylabel="measured / predicted")
    _legend(axes)


def _draw_attention(axes: Any, rows: dict[str, Any]) -> None:
    names = list(rows)
    axes.bar(names, [rows[name]["ratio"] for name in names], color=COLOURS[0])
    axes.axhline(REACH["attention"], color="gray", linestyle=":")
    axes.set(title="group attention, forward + backward", ylabel="plain causal attention's time")


def _draw_training(axes: Any, rows: dict[str, Any]) -> None:
    axes.bar(list(rows), [row["tokens_per_s"] for row in rows.values()], color=COLOURS[0])
    for place, row in enumerate(rows.values()):
        memory = "" if row["peak_bytes"] is None else f"\n{row['peak_bytes'] / 2**30:.1f} GiB"
        label = f"{row['roofline_frac']:.0%} of peak{memory}"
        axes.text(place, row["tokens_per_s"] / 2, label, ha="center", va="center", color="white")
    axes.set(title="training step", ylabel="tokens/s")


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
