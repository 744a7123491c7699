"""Drafters at work on several sequences that draft together: one forward for all rows of a batch.

Every row is a `DrafterDecoder` of its own, so that methods and trees know nothing of the batch: the first row that is
asked for its draft has the others drafted too, as far as they have observed something since their last draft.

Shapes: B rows, A of them in a call, G depths, K masks, n newly committed tokens, R rows of a forward, E input width of
a layer, F features, D hidden, V columns of the logits.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from draftsmith.models.decoding.cached import SMALL_STEP_TOKENS, first_rows
from draftsmith.models.decoding.kv_cache import STATIC_ROPE_TYPES, BatchAttention
from draftsmith.models.decoding.token_columns import TokenColumns


class BatchDecoder(ABC):
    """What all kinds share: who has something new, and whose draft is waiting. `rows`: a `DrafterDecoder` each."""

    def __init__(self, batch_size: int, columns: TokenColumns) -> None:
        self.rows = [BatchRow(self, row, columns) for row in range(batch_size)]
        self._due: set[int] = set()
        self._drafted: dict[int, Tensor] = {}

    def start(self, row: int, prompt_ids: Tensor, features: Tensor, position_offset: int) -> None:
        """Begin a sequence in this row; see `SequenceDecoder`."""
        self._drafted.pop(row, None)
        self._due.add(row)

    def observe(self, row: int, committed_ids: Tensor, features: Tensor) -> None:
        """Final tokens of this row; see `SequenceDecoder`."""
        if len(committed_ids):
            self._drafted.pop(row, None)
            self._due.add(row)

    @torch.inference_mode()
    def draft(self, row: int) -> Tensor:
        """fp32 logits [G, V] of this row."""
        if row not in self._drafted:
            if row not in self._due:
                raise ValueError("drafting needs a new token: call start() or observe() first")
            due = sorted(self._due)
            self._due.clear()
            self._drafted |= self._draft(due)
        return self._drafted.pop(row)

    @abstractmethod
    def _draft(self, due: list[int]) -> dict[int, Tensor]:
        """fp32 logits [G, V] of each of these rows."""


class BatchRow:
    """One row, as `protocols.DrafterDecoder`."""

    def __init__(self, batch: BatchDecoder, row: int, columns: TokenColumns) -> None:
        self._batch, self._row, self.columns = batch, row, columns

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        self._batch.start(self._row, prompt_ids, features, position_offset)

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        self._batch.observe(self._row, committed_ids, features)

    def draft(self) -> Tensor:
        return self._batch.draft(self._row)


class BatchParallelDecoder(BatchDecoder):
    """For group-wise drafters: `ParallelDecoder` for several rows.

    A row's real tokens are followed by its masks, then by padding that it overwrites in the next round. Rows that read
    a prompt do so by themselves: the others would be padded to its length.
    """

    def __init__(self, drafter: Any, max_length_tokens: int, batch_size: int) -> None:
        super().__init__(batch_size, drafter.columns)
        self._drafter, self._max_length_tokens, self._device = drafter, max_length_tokens, drafter.device
        self._num_masks, self._mask_residual = drafter.config.num_masks, drafter.mask_residual
        self._masks_ke = drafter.mask_inputs().detach()
        capacity = max_length_tokens + self._num_masks + SMALL_STEP_TOKENS
        self._cache = BatchAttention(drafter.layers_config, batch_size, capacity, self._device, drafter.dtype)
        self._pending: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(batch_size)]
        self._offsets = [0] * batch_size

    def start(self, row: int, prompt_ids: Tensor, features: Tensor, position_offset: int) -> None:
        super().start(row, prompt_ids, features, position_offset)
        self._cache.lengths[row] = 0
        self._pending[row], skipped = first_rows(self._drafter, prompt_ids, features)
        self._offsets[row] = position_offset + skipped

    def observe(self, row: int, committed_ids: Tensor, features: Tensor) -> None:
        super().observe(row, committed_ids, features)
        if len(committed_ids):
            self._pending[row].append((committed_ids, features))

    def _draft(self, due: list[int]) -> dict[int, Tensor]:
        ids, features = zip(*(map(torch.cat, zip(*self._pending[row], strict=True)) for row in due), strict=True)
        for row, of_row in zip(due, ids, strict=True):
            length = self._cache.lengths[row] + len(of_row)
            if length > self._max_length_tokens:
                raise ValueError(
                    f"{length} tokens, but batch_decoders(max_length_tokens={self._max_length_tokens}): make it larger"
                )
            self._pending[row] = []
        drafted: dict[int, Tensor] = {}
        for step in forwards_of(self._drafter.layers_config, list(map(len, ids))):
            logits_agv = self._forward([due[i] for i in step], [ids[i] for i in step], [features[i] for i in step])
            drafted |= {due[i]: logits_gv for i, logits_gv in zip(step, logits_agv, strict=True)}
        return drafted

    def _forward(self, rows: list[int], ids: list[Tensor], features: list[Tensor]) -> Tensor:
        """[A, G, V] from one forward over the new tokens and masks of these rows."""
        counts = [len(of_row) for of_row in ids]
        most, masks = max(counts), self._num_masks
        # Where a forward's row r comes from: the real tokens, the masks, and whatever for padding.
        sources = [[*range(count), *range(most, most + masks), *[0] * (most - count)] for count in counts]
        source_ar = torch.tensor(sources, device=self._device)
        count_a1 = torch.tensor(counts, device=self._device)[:, None]
        each = torch.arange(len(rows), device=self._device)[:, None]
        real_ane = self._drafter.real_inputs(pad_sequence(ids, True), pad_sequence(features, True))
        masks_ake = self._masks_ke.expand(len(rows), -1, -1)
        if self._mask_residual:
            masks_ake = masks_ake + real_ane[each, count_a1 - 1]
        hidden = torch.cat([real_ane, masks_ake], dim=1)[each, source_ar]
        places_ar = self._cache.begin_step(rows, most + masks)
        offset_a1 = torch.tensor([self._offsets[row] for row in rows], device=self._device)[:, None]
        rotary = self._drafter.rotary_of(hidden, places_ar + offset_a1)
        hidden_ard = self._drafter.run_layers(hidden, rotary, cached_attention=self._cache)
        for row, count in zip(rows, counts, strict=True):
            self._cache.lengths[row] += count
        drafting = torch.arange(masks + 1, device=self._device) + (count_a1 - 1)
        return self._drafter.logits_of(hidden_ard[each, drafting]).float()


def forwards_of(layers_config: PreTrainedConfig, counts: list[int]) -> list[list[int]]:
    """Which rows, by their place, have a forward together, given how many new tokens each has."""
    rope = getattr(layers_config, "rope_parameters", None) or {}
    # Where a rotation depends on the longest position, every row drafts by itself, as it would alone.
    rotates_alike = rope.get("rope_type", "default") in STATIC_ROPE_TYPES
    small = [i for i, count in enumerate(counts) if rotates_alike and count <= SMALL_STEP_TOKENS]
    return [[i] for i in range(len(counts)) if i not in small] + ([small] if small else [])
