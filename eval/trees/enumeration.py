"""The exact distribution of verification's result, by enumerating all random outcomes.

`Outcomes` replays every combination of random choices in `verify.walk`, the code that decodes, with its probability.
All trees that a drafter can draw are enumerated. Nothing is estimated: any difference from the target's distribution is
a bug.

Shapes: V tokens in the vocabulary (4).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.eval.trees.verify import DraftTree, TreeShape, Verification, walk
from draftsmith.models.sampling import Sampling

V = 4
# Shapes of sampled trees, and (shape, tokens) of deterministic ones.
SAMPLED_TREES = {
    "chain of 1": (-1, 0),
    "chain of 2": (-1, 0, 1),
    "two siblings": (-1, 0, 0),
    "all siblings": (-1, 0, 0, 0, 0),
    "two levels": (-1, 0, 0, 1, 1, 2),
    "three and two": (-1, 0, 0, 0, 2, 2),
}
DETERMINISTIC_TREES = [
    ((-1, 0), [0, 2]),
    ((-1, 0, 0, 0), [0, 2, 0, 3]),
    ((-1, 0, 0, 1, 1, 2), [0, 3, 1, 0, 2, 2]),
    ((-1, 0, 0, 0, 0), [0, 0, 1, 2, 3]),
]
# For trees merged from several drafters: the drafters (of two) that draw, in this order.
MERGED_DRAWS = [(0, 1), (0, 0), (0, 1, 0)]

Trees = Iterator[tuple[float, DraftTree]]  # each with the probability that it is drawn


class Outcomes:
    """`Chooser` that replays a script (a list of choices), and collects the scripts of all other outcomes."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.position, self.probability = script, 0, 1.0
        self.branches: list[list[int]] = []

    def _choose(self, probabilities: list[float]) -> int:
        if self.position == len(self.script):
            options = [option for option, probability in enumerate(probabilities) if probability > 0]
            self.branches += [[*self.script, option] for option in options[1:]]
            self.script = [*self.script, options[0]]
        option = self.script[self.position]
        self.position += 1
        self.probability *= probabilities[option]
        return option

    def accept(self, probabilities: Tensor) -> Tensor:
        accepted = [self._choose([1 - each, each]) == 1 for each in probabilities.view(-1).tolist()]
        return torch.tensor(accepted, dtype=torch.bool).view(probabilities.shape)

    def draw(self, probabilities: Tensor) -> Tensor:
        return torch.tensor(self._choose(probabilities.tolist()))


def every_verification(
    tree: DraftTree, logits: Tensor, sampling: Sampling, lenience: float = 1.0
) -> Iterator[tuple[float, Verification]]:
    """Yield (probability, verification) for every possible outcome of `verify.walk` on this draft tree."""
    scripts: list[list[int]] = [[]]
    while scripts:
        chooser = Outcomes(scripts.pop())
        verification = walk(replace(tree), logits, sampling, chooser, lenience)
        scripts += chooser.branches
        yield chooser.probability, verification


def draws(q: Tensor, count: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield (probability, tokens) for every ordered draw of `count` tokens from q [V] without replacement."""
    for tokens in itertools.permutations(range(len(q)), count):
        probability, left = 1.0, 1.0
        for token in tokens:
            probability *= float(q[token]) / left if left > 1e-15 else 0.0
            left -= float(q[token])
        if probability > 0:
            yield probability, tokens


def sampled_trees(parents: tuple[int, ...], q_of_depth: list[Tensor], on_device: bool = False) -> Trees:
    """Yield (probability, tree) for every tree with these parents whose siblings are drawn without replacement.

    Args:
        q_of_depth: Distributions [V] of the children of nodes at depth 0, 1, ...
        on_device: For chains: leave the draft tokens in `DraftTree.drafted`, as if they were on a GPU.
    """
    shape = TreeShape.of(parents)
    families = [node for node in range(len(shape)) if shape.children[node]]
    q_rows = torch.stack([q_of_depth[min(depth, len(q_of_depth) - 1)] for depth in shape.depths])
    for combination in itertools.product(*(draws(q_rows[node], len(shape.children[node])) for node in families)):
        tokens, weight = [0] * len(shape), 1.0
        for node, (probability, values) in zip(families, combination, strict=True):
            weight *= probability
            for child, value in zip(shape.children[node], values, strict=True):
                tokens[child] = value
        if on_device:
            yield weight, DraftTree(tokens[:1], shape, q_rows, drafted=torch.tensor(tokens[1:]))
        else:
            yield weight, DraftTree(tokens, shape, q_rows)


def merged_trees(q_of_model: list[Tensor], models: tuple[int, ...]) -> Trees:
    """Yield (probability, tree) for every tree in which several models draw a first token, with equal tokens merged.

    `models` are indices into `q_of_model`; a model may draw twice. The last one also draws a token below the first.
    """
    for *firsts, second in itertools.product(range(V), repeat=len(models) + 1):
        weight = float(q_of_model[models[-1]][second])
        for model, token in zip(models, firsts, strict=True):
            weight *= float(q_of_model[model][token])
        if weight == 0:
            continue
        children = list(dict.fromkeys(firsts))
        draws_below = [[(1 + children.index(token), model) for model, token in zip(models, firsts, strict=True)]]
        draws_below += [[(len(children) + 1, models[-1])], *([] for _ in children)]
        shape = TreeShape.of((-1, *[0] * len(children), 1))
        yield weight, DraftTree([0, *children, second], shape, torch.stack(q_of_model), draws=draws_below)


def joint_distribution(trees: Trees, target_logits: dict[tuple[int, ...], Tensor], sampling: Sampling) -> Tensor:
    """Return the exact distribution [V, V] of the first two tokens that decoding commits with these draft trees.

    If a round commits only one token, the second is sampled from the target. Logits [V] are given by context.
    """
    joint = torch.zeros(V, V, dtype=torch.float64)
    for weight, tree in trees:
        known = replace(tree)
        known.read(torch.empty(0, dtype=torch.int64))
        contexts = [tuple(known.tokens[step] for step in tree.shape.path_to(node)[1:]) for node in range(len(tree))]
        logits = torch.stack([target_logits.get(context, torch.zeros(V).double()) for context in contexts])
        for probability, verification in every_verification(tree, logits, sampling):
            committed = verification.committed(known)
            if len(committed) == 1:
                joint[committed[0]] += weight * probability * sampling.probabilities(target_logits[committed[0],])
            else:
                joint[committed[0], committed[1]] += weight * probability
    return joint


def target_and_draft(seed: int) -> tuple[dict[tuple[int, ...], Tensor], list[Tensor]]:
    """Draw random logits [V]: the target's by context (none or one token), and the drafter's at two depths."""
    generator = torch.Generator().manual_seed(seed)
    target_logits: dict[tuple[int, ...], Tensor] = {(): torch.randn(V, generator=generator, dtype=torch.float64) * 1.5}
    for token in range(V):
        target_logits[token,] = torch.randn(V, generator=generator, dtype=torch.float64) * 1.5
    return target_logits, list(torch.randn(2, V, generator=generator, dtype=torch.float64) * 1.5)


def largest_error(samplings: list[Sampling], seed: int = 0) -> float:
    """Return the largest error of a probability of the first two tokens against the target's, over all draft trees."""
    target_logits, draft_logits = target_and_draft(seed)
    error = 0.0
    for sampling in samplings:
        second = torch.stack([sampling.probabilities(target_logits[token,]) for token in range(V)])
        exact = sampling.probabilities(target_logits[()])[:, None] * second
        q_of_depth = [sampling.probabilities(logits) for logits in draft_logits]
        # Builders never draw more siblings than q has tokens.
        support = min(int((q > 0).sum()) for q in q_of_depth)
        cases: list[Trees] = [
            sampled_trees(parents, q_of_depth)
            for parents in SAMPLED_TREES.values()
            if max(map(len, TreeShape.of(parents).children)) <= support
        ]
        cases += [sampled_trees(SAMPLED_TREES[f"chain of {depth}"], q_of_depth, on_device=True) for depth in (1, 2)]
        cases += [iter([(1.0, DraftTree(tokens, TreeShape.of(parents)))]) for parents, tokens in DETERMINISTIC_TREES]
        cases += [merged_trees(q_of_depth, models) for models in MERGED_DRAWS]
        for trees in cases:
            error = max(error, float((joint_distribution(trees, target_logits, sampling) - exact).abs().max()))
    return error
