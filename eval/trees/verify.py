"""Verification: which path of a draft tree the target accepts, and the token that it adds itself.

Lossless, unless lenience below 1 is asked for (Leviathan et al., appendix A.5): q is multiplied by it in the comparison
with p, the residual staying what it is. Then no token is more likely than p / lenience; nothing else is promised.

ParallelSpec (arXiv 2410.05589) Algorithm 1; Leviathan et al. (2211.17192) for one child; SpecInfer (2305.09781)
Algorithm 2 for several, whose children are drawn independently, from one drafter or several; or *without* replacement
from one.

Temperature, top-k and top-p first turn logits into the distribution that tokens are drawn from: the same way for p and
for q, before they are compared (Leviathan et al., 2.2).

Pure: no model and no cache. All randomness goes through a `Chooser`, so that `enumeration.py` can walk through every
outcome of this very code. On a GPU the host waits once for a greedy verdict; for a sampled one, which looks only at the
nodes on its path, once for each draw that is tried and once for the last token, 10 to 20 us each. To decide all nodes
in one pass would save most of these waits, but draw, or sort for top-p, at every node: on a CPU many times the work.

Shapes: N tree nodes, V vocabulary. p = target, q = drafter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.eval.trees.tree import DraftTree


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature=0` is greedy; `top_k=0` and `top_p=1` filter nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 keeps all tokens), not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """[..., V] logits to probabilities, in fp32 (fp64 stays fp64). Greedy: all mass on the first largest logit."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.greedy:
            return torch.zeros_like(logits).scatter_(-1, largest(logits)[..., None], 1.0)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            smallest_kept = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(dim=-1, descending=True)
            mass = ordered.softmax(-1)
            # A token is dropped when the tokens before it already hold top_p of the mass; the first never is.
            dropped = mass.cumsum(-1) - mass >= self.top_p
            logits = logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
        return logits.softmax(-1)


def largest(logits: Tensor) -> Tensor:
    """[..., V] to [...] the first largest. On a CPU `max` finds it in a half of `argmax`'s time, in bf16 in a fifth."""
    return logits.max(-1).indices


def race(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """[..., V] p / Exp(1): the largest is a draw from p, the order that of draws without replacement (Gumbel-max)."""
    return probabilities / torch.empty_like(probabilities).exponential_(generator=generator)


def drawn(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """[...] one token from each distribution [..., V], by one uniform number in its cumulative sum; no host waits.

    torch's `multinomial` draws a number for each token: ten times as long on a CPU, 2 ms for a vocabulary of 49,152.
    In fp64, where the sums of probabilities of 1e-8 do not vanish beside 1.
    """
    cumulated = probabilities.cumsum(-1, dtype=torch.float64)
    mass = cumulated[..., -1:]
    place = torch.rand(mass.shape, dtype=torch.float64, device=mass.device, generator=generator) * mass
    # Below the mass whatever is rounded, so that a token that has a probability is found; without mass it is the last.
    place = torch.minimum(place, torch.nextafter(mass, torch.zeros_like(mass)))
    return torch.searchsorted(cumulated, place, right=True)[..., 0].clamp_max(probabilities.shape[-1] - 1)


def draw(probabilities: Tensor, generator: torch.Generator | None) -> int:
    """One token from a distribution [V]."""
    return int(drawn(probabilities, generator))


def first_token(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """The token that follows, from the target's logits [V] alone."""
    return int(largest(logits)) if sampling.greedy else draw(sampling.probabilities(logits), generator)


@dataclass(slots=True)
class Verdict:
    """path: [a+1] the accepted nodes, root first; next_token: the token that the target contributes after them."""

    path: list[int]
    next_token: int


class Chooser(Protocol):
    """Where the randomness comes from. Probabilities are on the device of the logits: one, and [V]."""

    def accept(self, probability: Tensor) -> bool: ...

    def draw(self, probabilities: Tensor) -> int: ...


class RandomChooser:
    """Chance itself."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator

    def accept(self, probability: Tensor) -> bool:
        return bool(torch.rand((), generator=self._generator, device=probability.device) < probability)

    def draw(self, probabilities: Tensor) -> int:
        return draw(probabilities, self._generator)


def verify(
    tree: DraftTree,
    logits: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    lenience: float = 1.0,
) -> Verdict:
    """Accept a path of the tree.

    Args:
        logits: [N, V] of the target at every node.
        sampling: Applied to the target's logits; `tree.q` must have been standardised with the same one.
        generator: For temperatures > 0.
        lenience: In (0, 1]; 1 is lossless.
    """
    if not sampling.greedy:
        return walk(tree, logits, sampling, RandomChooser(generator), lenience)
    if lenience < 1:
        return _verify_greedy_leniently(tree, logits, lenience)
    return verify_greedy(tree, largest(logits).tolist())


def verify_greedy(tree: DraftTree, argmax_ids: list[int]) -> Verdict:
    """Follow the child that equals the target's most likely token. `argmax_ids`: [N]."""
    tokens, children = tree.tokens, tree.shape.children
    path = [0]
    while True:
        wanted = argmax_ids[path[-1]]
        for child in children[path[-1]]:
            if tokens[child] == wanted:
                path.append(child)
                break
        else:
            return Verdict(path, wanted)


def _verify_greedy_leniently(tree: DraftTree, logits: Tensor, lenience: float) -> Verdict:
    """Follow the most likely child x with p(x) >= lenience max p, where p is not standardised to its argmax (A.5)."""
    path = [0]
    while True:
        node_logits = logits[path[-1]].float()
        best = int(node_logits.argmax())
        # p(x) / max p = exp(logit(x) - largest logit)
        least = float(node_logits[best]) + math.log(lenience)
        good = [child for child in tree.children(path[-1]) if float(node_logits[tree.tokens[child]]) >= least]
        if not good:
            return Verdict(path, best)
        path.append(max(good, key=lambda child: float(node_logits[tree.tokens[child]])))


def walk(tree: DraftTree, logits: Tensor, sampling: Sampling, chooser: Chooser, lenience: float = 1.0) -> Verdict:
    """Stochastic verification of the tree, from the root down. Arguments as in `verify`."""
    path = [0]
    while True:
        node = path[-1]
        p = sampling.probabilities(logits[node])
        for child, q in drawn_below(tree, node, p.dtype):
            token = tree.tokens[child]
            # 1. Accept x with probability min(1, p(x) / (l q(x))), l being the lenience; a deterministic child has q =
            # the point mass on it.
            p_token = p[token].double()
            q_token = 1.0 if q is None else q[token].double()
            if chooser.accept((p_token / (lenience * q_token)).clamp_max(1.0)):
                path.append(child)
                break
            # 2. Rejected: what is left to sample from is p minus what q has covered already.
            p = _residual(p, q, token)
        else:
            # 3. No child left: the target contributes a token from what is left of p.
            return Verdict(path, chooser.draw(p))


def drawn_below(tree: DraftTree, node: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor | None]]:
    """The draws below a node in the order in which they are tried, each with its q [V], or None: deterministic."""
    if tree.q is None:
        for child in tree.children(node):
            yield child, None
    elif tree.draws is not None:
        for child, row in tree.draws[node]:
            yield child, tree.q[row].to(dtype)
    elif children := tree.children(node):
        q = tree.q[node].to(dtype)
        for child in children:
            yield child, q
            # The next sibling was drawn from q without x.
            q = _without(q, tree.tokens[child])


def _residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """norm(max(p - q, 0)) of [V] distributions."""
    if q is None:
        return _without(p, token)
    left = (p - q).clamp_min(0)
    mass = left.sum()
    # p = q up to rounding: such a rejection has no probability, and any answer keeps the distribution.
    return torch.where(mass > 0, left / mass, p)


def _without(distribution: Tensor, token: int) -> Tensor:
    """The distribution [V] without one token, renormalised."""
    left = distribution.clone()
    left[token : token + 1].zero_()
    mass = left.sum()
    return torch.where(mass > 0, left / mass, distribution)
