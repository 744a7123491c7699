"""Accuracy by depth over training, of finished trainings side by side: who learns what, and how fast.

    python benchmarks/drafters/learning_curves.py runs/smollm2-135m runs/smollm2-135m-dspark \\
        --json docs/results/drafters/learning_curves.json --picture docs/pictures/learning_curves.png

Reads what training wrote (`drafter/training.json`); nothing is trained or measured here. Accuracies are those on
training rows, teacher-forced (each depth sees the true tokens before it, as far as it sees tokens), averaged over the
logs of a tenth of the training; `kept_out` are the last ones on rows kept out of it, with the tau of a chain of each
length that they belong to.
"""

import argparse
from pathlib import Path
from typing import Any

from draftsmith.models.base.registry import TRAINING_FILE
from draftsmith.recipes.errors import UserError, exit_with_one_sentence
from draftsmith.recipes.results import write_result
from draftsmith.recipes.run_folder import read_json

PARTS = 10


def curve(run: Path, parts: int = PARTS) -> dict[str, Any]:
    """One run's.

    Raises:
        UserError: There is no finished training.
    """
    file = run / "drafter" / TRAINING_FILE
    if not file.is_file():
        raise UserError(f"{run} holds no finished training: name the folder of a run that `draftsmith train` has ended")
    record = read_json(file, dict[str, Any], "train it again")
    logs = [log for log in record["history"] if "accuracy_depth1" in log]
    if not logs:
        raise UserError(f"{file} has no accuracies by depth: train with train.logging_steps smaller than the steps")
    depths = sum(name.startswith("accuracy_depth") for name in logs[0])
    steps = record["steps"]
    ends = [steps * part // parts for part in range(1, parts + 1)]
    points = []
    for begin, end in zip([0, *ends], ends, strict=False):
        here = [log for log in logs if begin < log["step"] <= end]
        if here:
            means = [sum(log[f"accuracy_depth{d}"] for log in here) / len(here) for d in range(1, depths + 1)]
            points.append({"step": end, "accuracy_by_depth": [round(mean, 4) for mean in means]})
    last = next((log for log in reversed(record["history"]) if "eval_accuracy_depth1" in log), None)
    kept_out = None
    if last is not None:
        names = ("eval_accuracy_depth", "eval_tau_depth")
        found = [[last[f"{name}{d}"] for d in range(1, depths + 1) if f"{name}{d}" in last] for name in names]
        kept_out = dict(zip(("accuracy_by_depth", "chain_tau_by_depth"), found, strict=True))
    return {
        "run": run.name,
        "kind": record["settings"]["drafter.kind"],
        "steps": steps,
        "tokens": record["tokens"],
        "learning_rate": record["settings"].get("train.learning_rate"),
        "curve": points,
        "kept_out": kept_out,
    }


def draw(curves: list[dict[str, Any]], file: Path) -> None:
    """A panel for depth 1, one for 2 and one for the last that all have."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    most = min(len(one["curve"][0]["accuracy_by_depth"]) for one in curves)
    shown = sorted({1, min(2, most), most})
    figure, panels = pyplot.subplots(
        1, len(shown), figsize=(3.6 * len(shown), 3.7), layout="constrained", squeeze=False
    )
    for axes, depth in zip(panels[0], shown, strict=True):
        for one in curves:
            steps = [point["step"] for point in one["curve"]]
            accuracies = [100 * point["accuracy_by_depth"][depth - 1] for point in one["curve"]]
            axes.plot(steps, accuracies, marker=".", label=one["run"])
        axes.set(title=f"depth {depth}", xlabel="step", ylim=(0, None))
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("accuracy, %")
    lines, names = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=min(4, len(names)), fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


@exit_with_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--json", type=Path, help="write the curves there")
    parser.add_argument("--picture", type=Path, help="draw them there")
    options = parser.parse_args()
    curves = [curve(run) for run in options.runs]
    for one in curves:
        ends = [f"{100 * value:.0f} %" for value in one["curve"][-1]["accuracy_by_depth"]]
        print(f"{one['run']}: {one['steps']:,} steps, at the end {', '.join(ends)}")
    if options.picture:
        draw(curves, options.picture)
    if options.json:
        write_result(options.json, {"curves": curves})


if __name__ == "__main__":
    main()
