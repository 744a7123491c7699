"""Show that speculative sampling draws from the target's own distribution: exact on a target with five tokens.

A random target and a drafter that nobody trained, so that drafts are rejected too. The probability of every answer is
computed, thousands of answers are drawn, and a chi-square test compares.

    python examples/verify_a_distribution.py
    python examples/verify_a_distribution.py --lenience 0.3      # not lossless, and the test finds it out
"""

import argparse
from collections import Counter
from itertools import product

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith import SpeculativeDecoder
from draftsmith.models.drafters.parallel import ParallelDrafter
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import MethodConfig

VOCABULARY, ANSWER, PROMPT = 5, 3, [1, 2, 3, 1]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--samples", type=int, default=2000)
parser.add_argument("--lenience", type=float, default=1.0)
parser.add_argument("--tree", default="static", choices=["chain", "static", "best_first"])
args = parser.parse_args()

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, initializer_range=0.3, **sizes)
target = LlamaForCausalLM(config).double().eval().requires_grad_(False)
drafter = ParallelDrafter.from_target(target, {"num_masks": 2, "init": "random"}).freeze()

# p of every answer: the product of the target's probabilities along it.
answers = list(product(range(VOCABULARY), repeat=ANSWER))
logits = target(torch.tensor([[*PROMPT, *answer] for answer in answers])).logits[:, len(PROMPT) - 1 : -1]
p = logits.softmax(-1).gather(-1, torch.tensor(answers)[..., None]).prod(1)[:, 0]

paths = [[0], [1], [0, 0], [0, 1]] if args.tree == "static" else None
tree = MethodConfig(name="tree", tree=args.tree, paths=paths, nodes=4, branch=2, lenience=args.lenience)
with SpeculativeDecoder(target, None, drafter, tree, Sampling(1.0), max_length_tokens=16, seed=1) as decoder:
    records = [decoder.answer(PROMPT, ANSWER) for _ in range(args.samples)]
counts = Counter(tuple(record.ids) for record in records)

expected, observed = p * args.samples, torch.tensor([counts[answer] for answer in answers]).double()
rare = expected < 5  # for which chi-square is no good approximation: together they are one more cell
expected, observed = (torch.cat([cell[~rare], cell[rare].sum()[None]]) for cell in (expected, observed))
chi_square, degrees = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
p_value = torch.special.gammaincc(torch.tensor(degrees / 2).double(), chi_square / 2)
accepted = sum(record.accepted_drafts for record in records) / sum(record.tried for record in records)
print(f"{len(answers)} possible answers, {args.samples} drawn, {accepted:.0%} of the tried drafts accepted")
print(f"total probability {p.sum():.12f}; {int(rare.sum())} rare answers in one cell of {expected[-1]:.1f} expected")
print(f"chi-square {chi_square:.1f} of {degrees} degrees of freedom: p-value {p_value:.4f}")
