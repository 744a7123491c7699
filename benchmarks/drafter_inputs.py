"""What should the parallel drafter see: embeddings, the target's features, or both? The paper is silent; this measures.

    python benchmarks/drafter_inputs.py recipes/quickstart.yaml --json inputs.json [section.key=value ...]

The three drafters differ in `drafter.options.inputs` alone: same distilled conversations, seed, steps and questions.
The distilled data of `runs/<name>/` is made once and copied.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from draftsmith.eval.pipeline import run_distill, run_eval, run_train
from draftsmith.recipes.errors import exit_with_one_sentence
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import RunFolder, write_atomically

INPUTS = ("embedding", "hidden", "both")


def measure(recipe_path: str, overrides: list[str]) -> list[dict[str, Any]]:
    """One row per (inputs, method): tau, speedup, and the last training accuracy per depth."""
    base = load_recipe(recipe_path, overrides)
    run_distill(base)
    rows: list[dict[str, Any]] = []
    for inputs in INPUTS:
        name = f"{base.name}-inputs-{inputs}"
        recipe = load_recipe(recipe_path, [*overrides, f"name={name}", f"drafter.options.inputs={inputs}"])
        folder = RunFolder(recipe)
        if not folder.data.exists():
            shutil.copytree(RunFolder(base).data, folder.data)
        run_train(recipe)
        run_eval(recipe)
        summary = json.loads((folder.eval / "summary.json").read_text(encoding="utf-8"))
        rows += [{"inputs": inputs, **row} for row in summary if row["category"] == "overall"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the parallel drafter's inputs.")
    parser.add_argument("recipe", help="the recipe that the three runs share")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    arguments = parser.parse_args()
    with exit_with_one_sentence():
        rows = measure(arguments.recipe, arguments.overrides)
    print("| inputs | method | tau | speedup |\n|---|---|---|---|")
    for row in rows:
        spread = f"{row['speedup_mean']:.2f}"
        if row["speedup_std"] is not None:  # one run has no spread
            spread += f" ± {row['speedup_std']:.2f}"
        print(f"| {row['inputs']} | {row['method']} | {row['tau']:.2f} | {spread} |")
    if arguments.json:
        write_atomically(arguments.json, json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
