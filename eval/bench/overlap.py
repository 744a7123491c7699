"""alpha as E[sum min(p, q)] (corollary 3.6 of arXiv 2211.17192), measured at the positions that verification comes to.

An untimed pass over some questions, so that the timed loop computes nothing of it. The loop needs no seam for it: a
method that reads logits is handed the tree and the target's logits, and learns from what is committed which path was
accepted. p and q are standardised alike. At a node with children

    overlap   sum min(p, q) with the q that the children were drawn from; for a deterministic draft, whose q is the
              point mass on its first child x, that sum is p(x)
    drafter   sum min(p, q) with the drafter's whole distribution there, however the tree used it: what a chain sampled
              from it would be accepted with

At T = 0 both are the share of matches. The same pass counts operations (`operations.py`), from each answer's second
round on: in the first the drafter also reads the prompt, which theory leaves out on both sides.

Shapes: N tree nodes, W nodes of one level, G drafted depths, V vocabulary.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.bench.arms import Arm
from draftsmith.eval.bench.operations import LinearOperations
from draftsmith.eval.bench.spec_bench import SpecBench
from draftsmith.eval.decoding.method import AUTOREGRESSIVE, Method, ReadsLogits
from draftsmith.eval.methods.drafter import DrafterMethod, is_sequential
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.eval.trees.tree import DraftTree, root_only
from draftsmith.models.decoding.protocols import DrafterDecoder, StepwiseDecoder

Path = tuple[int, ...]  # drafted tokens from the root down


class _HeardAtOnce:
    """A `DrafterDecoder`, and what it last said."""

    def __init__(self, decoder: DrafterDecoder) -> None:
        self.start, self.observe = decoder.start, decoder.observe
        self._decoder = decoder
        self._logits: Tensor | None = None

    def draft(self) -> Tensor:
        self._logits = self._decoder.draft()
        return self._logits

    def logits_after(self, path: Path) -> Tensor | None:
        """[V] of the children of the node at the end of a path, if the drafter was asked for them."""
        return None if self._logits is None or len(path) >= len(self._logits) else self._logits[len(path)]


class _HeardStepwise:
    """A `StepwiseDecoder`, and what it last said."""

    def __init__(self, decoder: StepwiseDecoder) -> None:
        self.start, self.observe, self.num_depths = decoder.start, decoder.observe, decoder.num_depths
        self._decoder = decoder
        self._path_of: list[Path] = []  # of every node
        self._logits_of: dict[Path, Tensor] = {}

    def begin(self) -> Tensor:
        logits = self._decoder.begin()
        self._path_of, self._logits_of = [()], {(): logits[0]}
        return logits

    def expand(self, tokens: list[int], parents: list[int]) -> Tensor:
        logits = self._decoder.expand(tokens, parents)
        for token, parent, row in zip(tokens, parents, logits, strict=True):
            self._path_of.append((*self._path_of[parent], token))
            self._logits_of[self._path_of[-1]] = row
        return logits

    def logits_after(self, path: Path) -> Tensor | None:
        return self._logits_of.get(path)


class OverlapMeter:
    """A method that measures what its drafts have in common with the target.

    Args:
        method: What drafts.
        sampling: Of the target, applied to the drafter's logits too.
        end_ids: An answer ends there; what was drafted behind counts nowhere.
    """

    def __init__(self, method: Method, sampling: Sampling, end_ids: Collection[int] = ()) -> None:
        self.name = method.name
        self.overlap: list[float] = []
        self.drafter: list[float] = []
        # Of the rounds whose operations are counted: depths and nodes of the trees, root included; tokens committed.
        self.operations = LinearOperations()
        self.depths: list[int] = []
        self.nodes: list[int] = []
        self.kept_tokens = 0
        self._counting = False
        self._sampling, self._end_ids = sampling, end_ids
        self._heard: _HeardAtOnce | _HeardStepwise | None = None
        if isinstance(method, DrafterMethod):
            decoder: Any = method.decoder
            self._heard = _HeardStepwise(decoder) if is_sequential(method) else _HeardAtOnce(decoder)
            method = method.with_decoder(self._heard)
        self._method = method
        self._verified: tuple[DraftTree, Tensor] | None = None

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        self._verified, self._counting = None, False
        self._method.start(prompt_ids, features)

    def propose(self) -> DraftTree:
        with self.operations if self._counting else contextlib.nullcontext():
            return self._method.propose()

    def read_logits(self, tree: DraftTree, logits: Tensor) -> None:
        self._verified = (tree, logits)
        if self._counting:
            self.depths.append(tree.shape.max_depth)
            self.nodes.append(len(tree))
        if isinstance(self._method, ReadsLogits):
            self._method.read_logits(tree, logits)

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        if self._verified is not None:
            self._note(*self._verified, committed_ids)
            self._verified, self._counting = None, True
        self._method.observe(committed_ids, features)

    def _note(self, tree: DraftTree, logits: Tensor, committed_ids: list[int]) -> None:
        """Walk the accepted path: all committed tokens but the target's own."""
        node: int | None = 0
        path: Path = ()
        for token in committed_ids:
            self.kept_tokens += self._counting
            if node is not None and tree.children(node):
                self._measure(tree, node, path, self._sampling.probabilities(logits[node]))
            if token in self._end_ids:
                break
            children = () if node is None else tree.children(node)
            node = next((child for child in children if tree.tokens[child] == token), None)
            path = (*path, token)

    def _measure(self, tree: DraftTree, node: int, path: Path, p: Tensor) -> None:
        if tree.q is None:
            self.overlap.append(float(p[tree.tokens[tree.children(node)[0]]]))
        else:
            self.overlap.append(_overlap(p, tree.q[node]))
        logits = None if self._heard is None else self._heard.logits_after(path)
        if logits is not None:
            self.drafter.append(_overlap(p, self._sampling.probabilities(logits)))

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
        meter = OverlapMeter(arm.method, arm.sampling, bench.end_ids)
        for question in asked:
            bench.answer(replace(arm, method=meter), question)
        target_step = LinearOperations()
        with torch.inference_mode(), target_step:
            bench.session.forward_tree(root_only(0))
        found[arm.key] = meter.figures(target_step.total)
    return found


def _overlap(p: Tensor, q: Tensor) -> float:
    return float(torch.minimum(p, q.to(p)).sum())


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
