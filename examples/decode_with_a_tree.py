"""Decode with a draft tree, and print every round's tree with the accepted path marked.

Without `--drafter` one is trained for some steps first, once:

    python examples/decode_with_a_tree.py
    python examples/decode_with_a_tree.py --drafter FOLDER --question "What does os.path.join do?"
"""

import argparse
from pathlib import Path

from draftsmith import SpeculativeDecoder, load_drafter, load_recipe, load_target
from draftsmith.cli.stages import make_drafter
from draftsmith.eval.decoding.generate import Round
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import MethodConfig

BRIEFLY = ["name=example", "data.conversations.limit=400", "data.distill.engine=none", "train.max_steps=120"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--drafter", type=Path, help="folder of a drafter for the embedded target")
parser.add_argument("--question", default="What does os.path.join do?")
parser.add_argument("--new-tokens", type=int, default=24)
args = parser.parse_args()

recipe = load_recipe("quickstart", BRIEFLY)
if args.drafter is None:
    make_drafter(recipe)  # resumes where it stopped; finished stages are skipped
target, tokenizer = load_target(recipe.target)
drafter = load_drafter(args.drafter or RunFolder(recipe).drafter, target)


def show(round_: Round) -> None:
    """Print the tree below its root, the last committed token: `*` was accepted, `+` is what the target adds."""
    tree, accepted = round_.tree, set(round_.verification.path)

    def below(node: int) -> None:
        mark = "*" if node in accepted else " "
        print(f"  {mark} {'    ' * tree.depths[node]}{tokenizer.decode([tree.tokens[node]])!r}")
        for child in tree.children(node):
            below(child)

    print(f"round: {len(tree) - 1} drafted, {len(accepted) - 1} accepted")
    below(0)
    print(f"  + {'    ' * len(accepted)}{tokenizer.decode([round_.verification.next_token])!r}")


best_first = MethodConfig(name="tree", tree="best_first", nodes=8, branch=3)
with SpeculativeDecoder(target, tokenizer, drafter, best_first) as decoder:
    answer = decoder.ask(args.question, args.new_tokens, on_round=show)
with SpeculativeDecoder(target, tokenizer) as plain:
    expected = plain.ask(args.question, args.new_tokens)
print(f"\n{answer.text}\n\n{len(answer.ids)} tokens in {answer.rounds} rounds after the first token")
print("identical to the target's own answer:", answer.ids == expected.ids)
