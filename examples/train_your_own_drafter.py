"""Train a drafter class of your own, without touching the package: here Medusa's heads with a gate in each.

A drafter that is to stay goes into the house instead: one file in `models/drafters/` and a recipe (CONTRIBUTING.md).

    python examples/train_your_own_drafter.py
"""

import argparse

import torch
from torch import Tensor, nn

from draftsmith import SpeculativeDecoder, load_recipe, load_target
from draftsmith.cli.stages import run_distill
from draftsmith.data.distill.token_dataset import load_tokens
from draftsmith.models.drafters.medusa import MedusaConfig, MedusaDrafter
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.train.drafter.trainer import DrafterTrainer
from draftsmith.train.drafter.training_arguments import training_arguments


class GatedBlock(nn.Module):
    """x + sigmoid(G x) * A x of the target's last hidden state x; weights start at zero, so it starts as x."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.gate, self.linear = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.sigmoid(self.gate(hidden)) * self.linear(hidden)


class GatedDrafter(MedusaDrafter):
    """Only the blocks are new: labels, loss, decoding, saving and loading are inherited."""

    def build(self, config: MedusaConfig) -> None:
        super().build(config)
        self.blocks = nn.ModuleList(GatedBlock(config.hidden_size) for _ in range(config.num_heads))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=120)
recipe = load_recipe("quickstart", ["name=gated", "data.conversations.limit=400", "data.distill.engine=none"])
run, folder = RunFolder(recipe), RunFolder(recipe).drafter
run_distill(recipe)  # the conversations as token ids; without `engine=none` the target answers them itself
target, tokenizer = load_target(recipe.target)
drafter = GatedDrafter.from_target(target, {"num_heads": 3})
# The quickstart's rates, but AdamW for all weights: blocks that start at zero take their first steps faster by it.
values = {"max_steps": parser.parse_args().steps, "optimizer": "adamw", "muon_learning_rate": None}
arguments = training_arguments(recipe.train | values, folder / "checkpoints", recipe.seed)
DrafterTrainer(drafter, target, arguments, load_tokens(run)).train()
drafter.save_pretrained(folder)

loaded = GatedDrafter.from_pretrained(folder).attach(target).freeze()
with SpeculativeDecoder(target, tokenizer, loaded) as ours, SpeculativeDecoder(target, tokenizer) as plain:
    answer, expected = (each.ask("What does os.path.join do?") for each in (ours, plain))
print(f"tau {sum(answer.accept_lengths) / answer.rounds:.2f}; the target's answer: {answer.ids == expected.ids}")
