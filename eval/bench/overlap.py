"""alpha as E[sum min(p, q)] (corollary 3.6 of arXiv 2211.17192), measured at the positions that verification comes to.

An untimed pass over some questions, so that the timed loop computes nothing of it; the loop hands every round over. p
and q are standardised alike. At a node with children

    overlap   sum min(p, q) with the q of the draw that verification tries first: its chance of acceptance. Those after
              it meet what is left of p, from the same q without its token or from another model's; they are not
              counted. For a deterministic draft, whose q is the point mass on its first child x, the sum is p(x)
    drafter   sum min(p, q) with the drafter's whole distribution there, however the tree used it: what a chain sampled
              from it would be accepted with

At T = 0 both are the share of matches. The same pass counts operations (`operations.py`), from each answer's second
round on: in the first the drafter also reads the prompt, which theory leaves out on both sides.

Shapes: N tree nodes, W nodes of one level, G drafted depths, V vocabulary.
"""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.bench.arms import Arm
from draftsmith.eval.bench.operations import LinearOperations
from draftsmith.eval.bench.spec_bench import SpecBench
from draftsmith.eval.decoding.loop import Round
from draftsmith.eval.decoding.method import AUTOREGRESSIVE, Method, ReadsLogits
from draftsmith.eval.methods.drafter import DrafterMethod
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.eval.trees.tree import DraftTree, root_only
from draftsmith.eval.trees.verify import drawn_below

Path = tuple[int, ...]  # drafted tokens from the root down


class _RecordedDecoder:
    """A drafter's decoder, of either kind, and the logits of its last draft."""

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

    def expand(self, tokens: list[int], parents: list[int]) -> Tensor:
        logits = self._decoder.expand(tokens, parents)
        for token, parent, row in zip(tokens, parents, logits, strict=True):
            self._paths.append((*self._paths[parent], token))
            self._by_path[self._paths[-1]] = row
        return logits

    def logits_after(self, path: Path) -> Tensor | None:
        """Of `columns`, of the children of the node at the end of a path, if the drafter was asked for them."""
        if self._by_depth is None:
            return self._by_path.get(path)
        return self._by_depth[len(path)] if len(path) < len(self._by_depth) else None


class OverlapMeter:
    """A method that measures what its drafts have in common with the target: `on_round` goes to the loop with it.

    Args:
        method: What drafts.
        sampling: Of the target, applied to the drafter's logits too.
    """

    def __init__(self, method: Method, sampling: Sampling) -> None:
        self.name, self.sequential = method.name, method.sequential
        self.overlap: list[float] = []
        self.drafter: list[float] = []
        # Of the rounds whose operations are counted: depths and nodes of the trees, root included; tokens committed.
        self.operations = LinearOperations()
        self.depths: list[int] = []
        self.nodes: list[int] = []
        self.kept_tokens = 0
        self._counting = False
        self._sampling = sampling
        self._recorded: _RecordedDecoder | None = None
        if isinstance(method, DrafterMethod):
            self._recorded = _RecordedDecoder(method.decoder)
            method = method.with_decoder(self._recorded)
        self._method = method
        self.observe = method.observe
        if isinstance(method, ReadsLogits):
            self.read_logits = method.read_logits

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        self._counting = False
        self._method.start(prompt_ids, features)

    def propose(self) -> DraftTree:
        with self.operations if self._counting else contextlib.nullcontext():
            return self._method.propose()

    def on_round(self, round_: Round) -> None:
        """Measure at every node that decided a token of the answer."""
        tree, path = round_.tree, round_.verdict.path
        if self._counting:
            self.depths.append(tree.shape.draft_depth)
            self.nodes.append(len(tree))
            self.kept_tokens += round_.kept
        self._counting = True
        for depth, node in enumerate(path[: round_.kept]):
            if not tree.children(node):
                continue
            p = self._sampling.probabilities(round_.logits[node])
            first, q = next(drawn_below(tree, node, p.dtype))
            self.overlap.append(float(p[tree.tokens[first]]) if q is None else _overlap(p, q))
            drafted = tuple(tree.tokens[above] for above in path[1 : depth + 1])
            logits = None if self._recorded is None else self._recorded.logits_after(drafted)
            if self._recorded is not None and logits is not None:
                q = self._recorded.columns.widened(self._sampling.probabilities(logits), 0.0)
                self.drafter.append(_overlap(p, q))

    def figures(self, target_operations: int) -> dict[str, Any]:
        """Means; ratios to the target's operations for one token. None where nothing was drafted."""
        drafted = sum(self.depths)
        return {
            "positions": len(self.overlap),
            "alpha_overlap": _mean(self.overlap),
            "alpha_drafter": _mean(self.drafter),
            "operations_ratio": self.operations.total / target_operations / drafted if drafted else None,
            "operations_per_token": (self.operations.total / target_operations + sum(self.nodes)) / self.kept_tokens
            if self.kept_tokens
            else None,
        }


def measure_untimed(bench: SpecBench, arms: list[Arm], questions: int) -> dict[str, dict[str, Any]]:
    """`OverlapMeter.figures` of every arm but the baseline, by the arm's key.

    Args:
        questions: Asked in full, spread over the bench's.
    """
    asked = bench.questions[:: max(1, len(bench.questions) // questions)][:questions]
    found = {}
    for arm in arms:
        if arm.method.name == AUTOREGRESSIVE:
            continue
        meter = OverlapMeter(arm.method, arm.sampling)
        for question in asked:
            bench.answer(replace(arm, method=meter), question, on_round=meter.on_round)
        target_step = LinearOperations()
        with torch.inference_mode(), target_step:
            bench.session.forward_tree(root_only(0))
        found[arm.key] = meter.figures(target_step.total)
    return found


def _overlap(p: Tensor, q: Tensor) -> float:
    return float(torch.minimum(p, q.to(p)).sum())


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
