"""Compare the closed-form estimate of `draftsmith plan` with training steps that were counted operation by operation.

    python benchmarks/plan_estimate.py --json docs/results/machinery/plan_estimate.json

The counted bytes were taken once, on tensors without values, and stay in that file, with the configs of the targets.
This estimates every recipe again and writes the differences next to them.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from draftsmith.recipes.loading import load_recipe
from draftsmith.results import write_result
from draftsmith.train.plan.estimate import StepCost, step_cost
from draftsmith.train.plan.plan import get_arguments, training_batch


def estimated(name: str, targets: dict[str, Any], folder: Path) -> StepCost:
    """Estimate a step of a shipped recipe on rows of full length, all labelled, as the counted steps were."""
    overrides = [f"runs_dir={folder / 'runs'}"]
    model = load_recipe(name).target.model
    if model in targets:
        place = folder / Path(model).name
        AutoConfig.for_model(**targets[model]).save_pretrained(place)
        overrides.append(f"target.model={place}")
    recipe = load_recipe(name, overrides)
    args = get_arguments(recipe)
    return step_cost(recipe, args, training_batch(recipe, args.per_device_train_batch_size)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    file = parser.parse_args().json
    figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
    with tempfile.TemporaryDirectory() as folder:
        for row in figures["rows"]:
            cost = estimated(row["recipe"], figures["targets"], Path(folder))
            row["estimated"], row["estimated_peak_bytes"] = cost.bytes, cost.peak_bytes
            row["difference"] = round(cost.peak_bytes / row["counted_peak_bytes"] - 1, 4)
            print(f"{row['recipe']:32} {cost.peak_bytes / 2**30:8.2f} GiB {row['difference']:+.1%}")
    write_result(file, figures)


if __name__ == "__main__":
    main()
