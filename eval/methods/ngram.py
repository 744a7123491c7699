"""N-gram models as drafters: drafting at no cost (Leviathan et al., arXiv 2211.17192, sections 3.6 and 4.1).

Fitted on the target's answers that the run has distilled: counts of the tokens that followed the last `order - 1`
tokens or, if these were never seen, the last `order - 2`, and so on. Any tree, any temperature.

Shapes: W tree nodes of a call, V vocabulary, P prompt, n newly committed tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import datasets
import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.methods.drafter import TreeDrafter, build_tree_drafter
from draftsmith.eval.methods.registry import DecodingSetting
from draftsmith.models.decoding.decoders import ALL_TOKENS
from draftsmith.recipes.schema import Section


class NgramModel:
    """Counts of which token follows which context, for contexts of 0 to order-1 tokens.

    Args:
        rows: (token ids, loss mask) of each conversation; only tokens with a mask of 1 are counted as followers.
        order: 1 = unigram, 2 = bigram, 3 = trigram.
        vocab_size: V; V**order must fit into 63 bits.

    Raises:
        ValueError: V**order is too large, or no token is counted.
    """

    def __init__(self, rows: Iterable[tuple[np.ndarray, np.ndarray]], order: int, vocab_size: int) -> None:
        if vocab_size**order >= 2**63:
            raise ValueError(f"{order}-grams over {vocab_size} tokens are too many to number; lower options.order")
        self.order, self.vocab_size = order, vocab_size
        keys: list[list[np.ndarray]] = [[] for _ in range(order)]
        for ids, mask in rows:
            ids = ids.astype(np.int64)
            for size in range(order):  # tokens of context
                key = np.zeros(max(len(ids) - size, 0), dtype=np.int64)
                for offset in range(size + 1):
                    key = key * vocab_size + ids[offset : len(ids) - size + offset]
                keys[size].append(key[mask[size:].astype(bool)])
        self._tables = [self._table(np.concatenate(numbers) if numbers else np.zeros(0, np.int64)) for numbers in keys]
        if not len(self._tables[0]):
            raise ValueError("no token has a loss mask of 1; run `draftsmith distill RECIPE` with more conversations")

    def _table(self, keys: np.ndarray) -> dict[int, tuple[Tensor, Tensor]]:
        """Map a context's number to its followers' ids and log counts."""
        pairs, counts = np.unique(keys, return_counts=True)
        contexts, followers = pairs // self.vocab_size, torch.from_numpy(pairs % self.vocab_size)
        log_counts = torch.from_numpy(np.log(counts)).float()
        known_contexts, first = np.unique(contexts, return_index=True)
        bounds = [*first.tolist(), len(pairs)]
        return {
            context: (followers[begin:end], log_counts[begin:end])
            for context, begin, end in zip(known_contexts.tolist(), bounds, bounds[1:], strict=False)
        }

    def logits(self, context: list[int]) -> Tensor:
        """Return log counts, fp32 [V], after the longest known suffix of `context`; -inf for tokens without a count."""
        logits = torch.full((self.vocab_size,), -torch.inf)
        for size in range(min(self.order - 1, len(context)), -1, -1):
            number = 0
            for token in context[len(context) - size :]:
                number = number * self.vocab_size + token
            if number in self._tables[size]:
                followers, log_counts = self._tables[size][number]
                logits[followers] = log_counts
                break
        return logits


class NgramDecoder:
    """`draftsmith.models.decoding.decoders.StepwiseDecoder` that drafts with an n-gram model."""

    def __init__(self, model: NgramModel, num_depths: int, device: torch.device) -> None:
        self.num_depths, self.columns = num_depths, ALL_TOKENS
        self._model, self._device = model, device
        self._newest: list[int] = []
        self._contexts: list[list[int]] = []  # of every node

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
        self._newest = self._context(prompt_ids.tolist())

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        self._newest = self._context([*self._newest, *committed_ids.tolist()])

    def begin(self) -> Tensor:
        """Return fp32 logits [1, V] of the token after the newest committed one."""
        self._contexts = [self._newest]
        return self._model.logits(self._newest)[None].to(self._device)

    def expand(self, tokens: list[int] | Tensor, parents: list[int]) -> Tensor:
        """Add W nodes with these tokens below `parents` to the tree; return fp32 logits [W, V] for their children."""
        tokens = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        new = [self._context([*self._contexts[p], token]) for token, p in zip(tokens, parents, strict=True)]
        self._contexts += new
        return torch.stack([self._model.logits(context) for context in new]).to(self._device)

    def _context(self, ids: list[int]) -> list[int]:
        return ids[max(len(ids) - self._model.order + 1, 0) :]


class Ngram:
    """Method `ngram` of a recipe: drafts with an n-gram model that is fitted on the run's distilled answers."""

    class Options(Section):
        """Options of method `ngram`."""

        order: int = Field(
            3,
            ge=1,
            le=4,
            description="n of the n-grams: 1 counts single tokens, 3 the tokens that followed each pair of tokens",
        )
        num_tokens: int = Field(4, ge=1, description="most draft tokens along one path")

    @classmethod
    def make(cls, options: Options, setting: DecodingSetting) -> TreeDrafter:
        vocab_size = setting.target.config.get_text_config().vocab_size
        model = _fitted(setting.tokens_folder, options.order, vocab_size)
        decoder = NgramDecoder(model, options.num_tokens, setting.target.device)
        return build_tree_drafter(setting.recipe, decoder, setting.sampling, setting.generator)


@lru_cache(maxsize=4)
def _fitted(tokens_folder: Path, order: int, vocab_size: int) -> NgramModel:
    if not tokens_folder.is_dir():
        raise UserError(f"{tokens_folder} holds no tokens to count n-grams in: run `draftsmith distill RECIPE` first")
    dataset = datasets.load_from_disk(str(tokens_folder)).with_format("numpy")
    try:
        return NgramModel(((row["input_ids"], row["loss_mask"]) for row in dataset), order, vocab_size)
    except ValueError as error:
        raise UserError(f"an n-gram drafter on {tokens_folder}: {error}") from None


METHOD = Ngram
