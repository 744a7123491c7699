"""SpecInfer: one token tree from several draft models, or from several samples of one (arXiv 2305.09781).

Every model grows a separate tree, level by level: below a node at depth d-1 come k_d tokens, `<k_1, k_2, ...>` being
the expansion configuration (section 3, expansion-based). At T = 0 these are the most likely ones, at T > 0 independent
draws from that model's q. The trees are merged: equal paths share their nodes, and a token drawn twice is one node with
two draws, each verified against the q that it came from (section 4.3, multi-step speculative sampling): lossless.

Shapes: M models, R rows of q, W nodes of a level, V vocabulary, P prompt, n newly committed tokens, F features.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from operator import mul
from pathlib import Path

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.decoding.method import Method
from draftsmith.eval.methods.draft_model import draft_model_decoder
from draftsmith.eval.methods.drafter import draw_independently
from draftsmith.eval.methods.registry import DecodingSetting
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.base.config import MODEL_TYPE_PREFIX
from draftsmith.models.base.registry import drafter_config, load_drafter
from draftsmith.models.decoding.decoders import LONGEST_TREE_NODES, StepwiseDecoder
from draftsmith.models.decoding.kv_cache import to_device
from draftsmith.models.drafters.draft_model import DraftModelConfig
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import Section


class SpecInfer(Method):
    """Method `specinfer` of a recipe: a draft tree merged from the trees of several draft models (arXiv 2305.09781).

    Args:
        decoders: The M draft models' decoders; each drafts paths of at most its `num_depths` tokens.
        expansion: k_1, k_2, ...: number of children that a model adds below each node, by the children's depth.
        samples: Number of trees that each model grows at T > 0; at T = 0 they would all be equal.
        sampling: Temperature, top-k and top-p of the target; each model's q is computed with the same ones.
    """

    drafts_trees = True

    class Options(Section):
        """Options of method `specinfer`; the default tree is the paper's `<1, 1, 3, 1, 1, 1, 1, 1>`."""

        models: list[str] = Field(
            min_length=1,
            description="draft models: Hub ids, local folders, or folders of trained `draft_model` drafters",
        )
        num_tokens: int = Field(8, ge=1, description="most draft tokens along one path")
        expansion: list[PositiveInt] = Field(
            [1, 1, 3],
            description="k_1, k_2, ...: number of children of a node at each depth; 1 at depths after the last one "
            "given",
        )
        samples: int = Field(1, ge=1, description="number of trees that each model samples at temperatures above 0")

        @model_validator(mode="after")
        def _fits_a_tree(self) -> SpecInfer.Options:
            if len(self.expansion) > self.num_tokens:
                raise ValueError(f"`expansion` has {len(self.expansion)} depths, but `num_tokens` is {self.num_tokens}")
            nodes = len(self.models) * self.samples * sum(accumulate(self.widths(), mul))
            if nodes >= LONGEST_TREE_NODES:
                raise ValueError(f"a tree of up to {nodes} tokens is too large: stay below {LONGEST_TREE_NODES}")
            return self

        def widths(self) -> list[int]:
            """Return the number of children below each node, for depths 1 to `num_tokens`."""
            return [*self.expansion, *[1] * (self.num_tokens - len(self.expansion))]

    def __init__(
        self,
        name: str,
        decoders: list[StepwiseDecoder],
        expansion: list[int],
        samples: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
    ) -> None:
        self.name = name
        self._decoders, self._expansion, self._sampling, self._generator = decoders, expansion, sampling, generator
        self._samples = 1 if sampling.greedy else samples

    @classmethod
    def make(cls, options: Options, setting: DecodingSetting) -> SpecInfer:
        decoders = [_decoder(location, options.num_tokens, setting) for location in options.models]
        name = setting.recipe.name
        return cls(name, decoders, options.widths(), options.samples, setting.sampling, setting.generator)

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        for decoder in self._decoders:
            decoder.start(to_device(prompt_ids, features.device), features)

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        super().observe(committed_ids, features)
        for decoder in self._decoders:
            decoder.observe(to_device(committed_ids, features.device), features)

    def propose(self) -> DraftTree:
        tree = _MergedTree(self._newest)
        growers = [_Grower(decoder, self._samples) for decoder in self._decoders]
        for width in self._expansion:
            for grower in growers:
                grower.grow_level(tree, width, self._sampling, self._generator)
        return tree.finished()


class _MergedTree:
    """Merged tree: equal paths share their nodes, and a node's draws are stored with their rows of q."""

    def __init__(self, root_token: int) -> None:
        self.tokens, self.parents = [root_token], [-1]
        self.draws: list[list[tuple[int, int]]] = [[]]
        self.q_rows: list[Tensor] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        node = self._nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.draws.append([])
        return node

    def finished(self) -> DraftTree:
        shape = TreeShape.of(tuple(self.parents))
        if not self.q_rows:
            return DraftTree(self.tokens, shape)
        return DraftTree(self.tokens, shape, torch.stack(self.q_rows), draws=self.draws)


class _Grower:
    """Trees of one model in one round: one per sample, inside the merged tree."""

    def __init__(self, decoder: StepwiseDecoder, samples: int) -> None:
        self._decoder = decoder
        self._depth = 0
        # The nodes of the last level, with the samples whose trees hold them.
        self._level: dict[int, set[int]] = {0: set(range(samples))}
        self._decoder_index: dict[int, int] = {}  # the decoder's number of a node

    def grow_level(self, tree: _MergedTree, width: int, sampling: Sampling, generator: torch.Generator | None) -> None:
        """Add `width` tokens below every node of the last level, for each sample whose tree contains it."""
        if not self._level or self._depth == self._decoder.num_depths:
            return
        nodes, holders = list(self._level), list(self._level.values())
        if self._depth == 0:
            logits_wv = self._decoder.begin()
        else:
            above = [self._decoder_index[tree.parents[node]] for node in nodes]
            logits_wv = self._decoder.expand([tree.tokens[node] for node in nodes], above)
        for node in nodes:
            self._decoder_index[node] = len(self._decoder_index)
        self._depth += 1
        self._level = {}
        columns = self._decoder.columns
        if sampling.greedy:
            top = logits_wv.topk(min(width, logits_wv.shape[-1]), dim=-1)
            for node, row, values in zip(nodes, top.indices.tolist(), top.values.tolist(), strict=True):
                for token, value in zip(columns.tokens(row), values, strict=True):
                    # A draft model may lack some of the target's tokens.
                    if value > -math.inf:
                        self._level[tree.add(node, token)] = {0}
            return
        q_wv = sampling.probabilities(logits_wv)
        drawn = draw_independently(q_wv, width * max(map(len, holders)), generator, columns)
        for node, samples, q, row in zip(nodes, holders, columns.widened(q_wv, 0.0), drawn, strict=True):
            tree.q_rows.append(q)
            draws = iter(row)
            for sample in sorted(samples):
                for _ in range(width):
                    child = tree.add(node, next(draws))
                    tree.draws[node].append((child, len(tree.q_rows) - 1))
                    self._level.setdefault(child, set()).add(sample)


_load_drafter = lru_cache(maxsize=8)(load_drafter)


def _decoder(location: str, num_tokens: int, setting: DecodingSetting) -> StepwiseDecoder:
    """Make the decoder of a language model, or of a `draft_model` drafter that was trained here."""
    folder = Path(location)
    model_type = str(drafter_config(folder).get("model_type", "")) if folder.is_dir() else ""
    if not model_type.startswith(MODEL_TYPE_PREFIX):
        return draft_model_decoder(location, num_tokens, setting)
    if model_type != DraftModelConfig.model_type:
        raise UserError(
            f"method {setting.recipe.name}: {location} holds a {model_type.removeprefix(MODEL_TYPE_PREFIX)} drafter, "
            "but specinfer takes language models and trained `draft_model` drafters: name one"
        )
    decoder = _load_drafter(folder, setting.target).decoder(setting.max_length_tokens)
    decoder.num_depths = num_tokens  # type: ignore[union-attr]
    return decoder  # type: ignore[return-value]


METHOD = SpecInfer
