"""Draw the acceptance per depth: how far drafts are right, and given that the ones before them were.

Without `--drafter` one is trained for some steps first, once:

    python examples/draw_acceptance.py
    python examples/draw_acceptance.py --drafter FOLDER --questions 14 --out acceptance.png
"""

import argparse
from itertools import accumulate
from operator import mul
from pathlib import Path

import matplotlib.pyplot as plt

from draftsmith import SpeculativeDecoder, load_drafter, load_recipe, load_target
from draftsmith.cli.stages import make_drafter
from draftsmith.data.sources.questions import load_questions
from draftsmith.eval.report.summary import acceptance_by_depth
from draftsmith.recipes.run_folder import RunFolder

BRIEFLY = ["name=example", "data.conversations.limit=400", "data.distill.engine=none", "train.max_steps=120"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--drafter", type=Path, help="folder of a drafter for the embedded target")
parser.add_argument("--questions", type=int, default=1, help="of each category")
parser.add_argument("--new-tokens", type=int, default=64)
parser.add_argument("--out", type=Path, default=Path("acceptance.png"))
args = parser.parse_args()

recipe = load_recipe("quickstart", BRIEFLY)
if args.drafter is None:
    make_drafter(recipe)
target, tokenizer = load_target(recipe.target)
drafter = load_drafter(args.drafter or RunFolder(recipe).drafter, target)
with SpeculativeDecoder(target, tokenizer, drafter) as decoder:  # a chain: one token a depth
    questions = load_questions("embedded", limit_per_category=args.questions)
    answers = [decoder.ask(question.turns[0], args.new_tokens) for question in questions]

conditional = acceptance_by_depth([length for answer in answers for length in answer.draft_lengths])
marginal = list(accumulate(conditional, mul))
depths = range(1, len(conditional) + 1)
for depth, share, given in zip(depths, marginal, conditional, strict=True):
    print(f"depth {depth}: {share:.3f} of rounds, {given:.3f} where the depth before was accepted")
rounds = sum(answer.rounds for answer in answers)
print(f"tau {sum(sum(answer.accept_lengths) for answer in answers) / rounds:.3f} over {rounds} rounds")

figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
axes.plot(depths, marginal, "o-", label="accepted, of all rounds")
axes.plot(depths, conditional, "s--", label="accepted, given the depth before")
axes.set(xlabel="depth of the drafted token", ylabel="share", xticks=list(depths), ylim=(0, 1))
axes.legend()
figure.savefig(args.out, dpi=150)
print("picture:", args.out)
