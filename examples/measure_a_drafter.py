"""Measure a published drafter on your machine: tau, speedup, and whether every answer stayed the same.

One of the Hub, one in a folder, or, if none is named, one that is trained for some steps first, once:

    python examples/measure_a_drafter.py user/repo --target user/the-target
    python examples/measure_a_drafter.py runs/quickstart/drafter
    python examples/measure_a_drafter.py
"""

import argparse

from draftsmith.cli.evaluate import evaluate
from draftsmith.cli.stages import make_drafter
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import RunFolder

BRIEFLY = ["name=example", "data.conversations.limit=400", "data.distill.engine=none", "train.max_steps=120"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("drafter", nargs="?", help="a folder, or the Hub's user/repo or user/repo@revision")
parser.add_argument("--target", default="embedded", help="the target that the drafter was made for")
parser.add_argument("--questions", default="embedded", help="name or file of a set of questions")
parser.add_argument("--per-category", type=int, default=1, help="questions of each category")
parser.add_argument("--new-tokens", type=int, default=64)
args = parser.parse_args()

if args.drafter is None:
    made = load_recipe("quickstart", BRIEFLY)
    make_drafter(made)
    args.drafter = str(RunFolder(made).drafter)

methods = [
    {"name": "chain", "tree": "chain", "drafter": args.drafter},
    {"name": "tree", "tree": "best_first", "nodes": 12, "branch": 4, "drafter": args.drafter},
]
overrides = {
    "name": "example-measured", "target.model": args.target, "eval.questions": args.questions, "eval.runs": 2,
    "eval.limit_per_category": args.per_category, "eval.max_new_tokens": args.new_tokens,
    "eval.methods": methods,
}  # fmt: skip
measured = load_recipe("quickstart", [f"{key}={value}" for key, value in overrides.items()])
for row in evaluate(measured):  # prints the whole table, and writes it with the report
    if row["category"] == "overall" and row["method"] != "autoregressive":
        low, high = row["speedup_interval"]
        same = "identical" if row["greedy_identical"] else "NOT identical"
        print(f"{row['method']}: tau {row['tau']:.2f}, {row['speedup_mean']:.2f}x [{low:.2f}, {high:.2f}], {same}")
print("report:", RunFolder(measured).root / "report.html")
