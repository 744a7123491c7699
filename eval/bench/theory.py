"""Predictions of theory for a drafter, and its alpha and arithmetic, measured in an untimed pass.

Leviathan et al. (arXiv 2211.17192, section 3) predict the gain of speculative sampling from three numbers: alpha =
acceptance rate, gamma = drafted tokens along a path, c = drafting time over the time of one target step. Their c is
that of one drafted token, so that a round costs gamma * c + 1; a parallel drafter (ParallelSpec, 2410.05589) drafts all
gamma in one forward, so that a round costs c + 1. Both assume that acceptances are independent of one another and that
verification takes no longer than a single step. `theory_row` computes for the report

gamma                the longest path that was drafted
alpha                accepted / tried draft tokens: a position is tried if verification reaches it
alpha (overlap)      E[sum min(p, q)] at the same positions, corollary 3.6
c                    drafting time over the time of a target step: of one draft token for a sequential drafter, of the
                     round for a parallel one
c (operations)       the same ratio in arithmetic, of one draft token
tau (equation 1)     expected tokens with this alpha at each round's own depth. A larger measured tau means that
                     acceptances are correlated, as easy text comes in stretches
theorem 3.8          that tau over (gamma c + 1), or over (c + 1)
theorem 3.11         arithmetic per token over the target's own; also as counted in the untimed pass
best gamma           section 3.5; for a parallel drafter, whose c does not grow, `sufficient_gamma`

The theory is about chains. In a tree, a position is tried once, whatever its number of children, and gamma is the
depth.

`measure_untimed` answers some questions again, so that the timed loop computes none of this. Temperature, top-k and
top-p are applied to p and to q. At a node with children

    overlap   sum min(p, q) with the q of the draw that verification tries first: its probability of acceptance. Later
              draws are compared with the residual of p, from the same q without the first token or from another
              model's; they are not counted. For a deterministic draft, whose q is the point mass on its first child x,
              the sum is p(x)
    drafter   sum min(p, q) with the drafter's whole distribution there, whatever the tree used of it: the acceptance
              probability of a token sampled from the drafter

At T = 0 both are the share of matches. Operations are counted from each answer's second round on: in the first one the
drafter also reads the prompt, which the theory ignores on both sides.

Shapes: N tree nodes, W nodes of one level, G drafted depths, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from draftsmith.eval.bench.measured_methods import Arm
from draftsmith.eval.bench.spec_bench import SpecBench
from draftsmith.eval.decoding.generate import AnswerRecord, Round
from draftsmith.eval.decoding.method import AUTOREGRESSIVE, Method, ReadsLogits
from draftsmith.eval.methods.drafter import TreeDrafter
from draftsmith.eval.trees.verify import DraftTree, draws_below, root_only
from draftsmith.models.cpu_layers import CpuLayers
from draftsmith.models.sampling import Sampling

MOST_TOKENS = 32  # largest gamma considered
Path = tuple[int, ...]  # draft tokens from the root down
aten = torch.ops.aten


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return E[tokens of a round] = (1 - alpha^(gamma+1)) / (1 - alpha), the target's token included (equation 1)."""
    if not 0 <= alpha <= 1 or gamma < 0:
        raise ValueError(f"alpha={alpha} must be in [0, 1] and gamma={gamma} at least 0")
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def walltime_factor(alpha: float, gamma: int, c: float) -> float:
    """Return the expected speedup, E[tokens] / (gamma c + 1) (theorem 3.8)."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations_factor(alpha: float, gamma: int, c_operations: float) -> float:
    """Return the arithmetic per token over the target's own, (1-a)(g c' + g + 1) / (1 - a^(g+1)) (theorem 3.11).

    Args:
        c_operations: The drafter's operations for one token over the target's.
    """
    return (gamma * c_operations + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float, at_most: int = MOST_TOKENS) -> int:
    """Return the gamma with the largest expected speedup (section 3.5); 0 if drafting does not pay."""
    return max(range(at_most + 1), key=lambda gamma: walltime_factor(alpha, gamma, c))


def sufficient_gamma(alpha: float) -> int:
    """Return the smallest gamma with 99 % of the tokens of infinitely long drafts, for drafters of constant cost.

    Infinite drafts give 1 / (1 - alpha) tokens per round, and gamma draft tokens a share of 1 - alpha^(gamma+1).
    """
    return next((gamma for gamma in range(MOST_TOKENS) if 1 - alpha ** (gamma + 1) >= 0.99), MOST_TOKENS)


def theory_row(
    turns: list[AnswerRecord], sequential: bool, cost_ratio: float, untimed: dict[str, Any] | None
) -> dict[str, Any]:
    """Compute the figures of the module's table, for one method at one temperature.

    Args:
        turns: All answers of the method.
        sequential: See `draftsmith.eval.decoding.method.Method`.
        cost_ratio: Drafting time of a round over the time of a target step.
        untimed: The method's figures of `measure_untimed`; None if there are none.
    """
    depths = [depth for turn in turns for depth in turn.draft_depths]
    tried = sum(turn.tried for turn in turns)
    alpha = sum(turn.accepted_drafts for turn in turns) / tried if tried else 0.0
    gamma, mean_depth = max(depths), statistics.fmean(depths)
    tau = sum(count * expected_tokens(alpha, depth) for depth, count in Counter(depths).items()) / len(depths)
    c = cost_ratio / mean_depth if sequential and mean_depth else cost_ratio
    untimed = untimed or {}
    c_operations = untimed.get("operations_ratio")
    return {
        "sequential": sequential,
        "gamma": gamma,
        "alpha": alpha,
        "alpha_overlap": untimed.get("alpha_overlap"),
        "alpha_drafter": untimed.get("alpha_drafter"),
        "c": c,
        "c_operations": c_operations,
        "tau_predicted_iid": tau,
        "speedup_predicted_iid": tau / (cost_ratio + 1),
        "operations_factor": None if c_operations is None else operations_factor(alpha, gamma, c_operations),
        "operations_measured": untimed.get("operations_per_token"),
        "best_gamma": best_gamma(alpha, c) if sequential else sufficient_gamma(alpha),
    }


class _RecordedDecoder:
    """Wrapper of a drafter's decoder, of either kind, that keeps the logits of its last draft."""

    def __init__(self, decoder: Any) -> None:
        self.start, self.observe = decoder.start, decoder.observe
        self.num_depths, self.columns = getattr(decoder, "num_depths", None), decoder.columns
        self._decoder = decoder
        self._by_depth: Tensor | None = None
        self._by_path: dict[Path, Tensor] = {}
        self._paths: list[Path] = []  # of every node

    def draft(self) -> Tensor:
        self._by_depth = self._decoder.draft()
        return self._by_depth

    def begin(self) -> Tensor:
        logits = self._decoder.begin()
        self._paths, self._by_path = [()], {(): logits[0]}
        return logits

    def expand(self, tokens: list[int] | Tensor, parents: list[int]) -> Tensor:
        logits = self._decoder.expand(tokens, parents)
        known = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        for token, parent, row in zip(known, parents, logits, strict=True):
            self._paths.append((*self._paths[parent], token))
            self._by_path[self._paths[-1]] = row
        return logits

    def logits_after(self, path: Path) -> Tensor | None:
        """Return the drafter's logits after a path, over `columns`; None if it did not compute them."""
        if self._by_depth is None:
            return self._by_path.get(path)
        return self._by_depth[len(path)] if len(path) < len(self._by_depth) else None


class OverlapMeter:
    """Wrapper of a method that measures its overlap with the target; pass its `on_round` to the decoding loop.

    Args:
        method: The method that drafts.
        sampling: The target's sampling, applied to the drafter's logits too.
    """

    def __init__(self, method: Method, sampling: Sampling) -> None:
        self.name, self.sequential = method.name, method.sequential
        self.overlap: list[float] = []
        self.drafter: list[float] = []
        # For rounds whose operations are counted: depth and nodes (with the root) of each tree, and committed tokens.
        self.operations = LinearOperations()
        self.depths: list[int] = []
        self.nodes: list[int] = []
        self.committed_tokens = 0
        self._counting = False
        self._sampling = sampling
        self._recorded: _RecordedDecoder | None = None
        if isinstance(method, TreeDrafter):
            self._recorded = _RecordedDecoder(method.decoder)
            method = copy(method)
            method.decoder = self._recorded
        self._method = method
        self.observe = method.observe
        if isinstance(method, ReadsLogits):
            self.read_logits = method.read_logits

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        self._counting = False
        self._method.start(prompt_ids, features)

    def propose(self) -> DraftTree:
        with self.operations.counted() if self._counting else contextlib.nullcontext():
            return self._method.propose()

    def on_round(self, round_: Round) -> None:
        """Measure the overlap at every node that decided a token of the answer."""
        tree, path = round_.tree, round_.verification.path
        if self._counting:
            self.depths.append(tree.shape.draft_depth)
            self.nodes.append(len(tree))
            self.committed_tokens += round_.kept
        self._counting = True
        for depth, node in enumerate(path[: round_.kept]):
            if not tree.children(node):
                continue
            p = self._sampling.probabilities(round_.logits[node])
            first, q = next(draws_below(tree, node, p.dtype))
            self.overlap.append(float(p[tree.tokens[first]]) if q is None else _overlap(p, q))
            drafted = tuple(tree.tokens[above] for above in path[1 : depth + 1])
            logits = None if self._recorded is None else self._recorded.logits_after(drafted)
            if self._recorded is not None and logits is not None:
                q = self._recorded.columns.widened(self._sampling.probabilities(logits), 0.0)
                self.drafter.append(_overlap(p, q))

    def figures(self, target_operations: int) -> dict[str, Any]:
        """Return the mean overlaps, and operations over the target's for one token; None where nothing was drafted."""
        drafted, committed = sum(self.depths), self.committed_tokens
        in_steps = self.operations.total / target_operations
        return {
            "positions": len(self.overlap),
            "alpha_overlap": statistics.fmean(self.overlap) if self.overlap else None,
            "alpha_drafter": statistics.fmean(self.drafter) if self.drafter else None,
            "operations_ratio": in_steps / drafted if drafted else None,
            "operations_per_token": (in_steps + sum(self.nodes)) / committed if committed else None,
        }


def _overlap(p: Tensor, q: Tensor) -> float:
    return float(torch.minimum(p, q.to(p)).sum())


def measure_untimed(bench: SpecBench, methods: list[Arm], questions: int) -> dict[str, dict[str, Any]]:
    """Measure `OverlapMeter.figures` of every method except the baseline, by `method@temperature`.

    Args:
        questions: Number of questions, spread over the bench's; all their turns are answered.
    """
    chosen = bench.questions[:: max(1, len(bench.questions) // questions)][:questions]
    figures = {}
    for measured in methods:
        if measured.method.name == AUTOREGRESSIVE:
            continue
        meter = OverlapMeter(measured.method, measured.sampling)
        for question in chosen:
            bench.answer(replace(measured, method=meter), question, on_round=meter.on_round)
        target_step = LinearOperations()
        with torch.inference_mode(), target_step.counted():
            bench.session.forward_tree(root_only(0))
        figures[measured.key] = meter.figures(target_step.total)
    return figures


class LinearOperations:
    """Counter of the arithmetic of linear layers within `with self.counted()`: two operations per parameter and row.

    Attention's own products are left out, on every device: they depend on the context's length, and every kernel counts
    them differently. Leviathan's c-hat (definition 3.10) is a ratio of such counts.
    """

    def __init__(self) -> None:
        self.total = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        before = CpuLayers.linear_operations
        with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
            yield
        self.total += counter.get_total_flops() + CpuLayers.linear_operations - before


def _formulas() -> dict[Any, Any]:
    """Return counting formulas for operations that torch's counter lacks, and zeros for those it must not count."""
    formulas: dict[Any, Any] = {op: lambda *_, **__: 0 for op in flop_registry if "attention" in str(op)}
    formulas |= {op: lambda *_, **__: 0 for op in (aten.bmm, aten.baddbmm)}
    formulas[aten.mv] = lambda matrix, *_, **__: 2 * math.prod(matrix)
    formulas[aten.addmv] = lambda _bias, matrix, *_, **__: 2 * math.prod(matrix)
    if hasattr(torch.ops.draftsmith, "linear"):  # exists once a layer was packed
        # rows [..., D] to out [..., V]; the packed weight has another shape.
        formulas[torch.ops.draftsmith.linear] = lambda rows, *_, out_shape, **__: 2 * math.prod(out_shape) * rows[-1]
        formulas[torch.ops.draftsmith.fused] = lambda parts, *_, out_shape, **__: (
            2 * math.prod(out_shape) * sum(part[-1] for part in parts)
        )
    return formulas
