"""Batches of token rows: padded on the right, packed several to a row, and evenly shared among processes.

Packing puts several conversations into one row, so that next to nothing of a batch is padding. Which conversations
share a row is decided once, from their lengths alone (best-fit decreasing). Position ids start anew with each document:
from that the target's attention masks (transformers) and the drafters' (`models/groups/rows.py`) end at the borders,
and so do the features that a group reads. The loss is that of the documents in rows of their own.

Shapes: B batch, S sequence.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader
from transformers import PreTrainedModel

from draftsmith.data.distill.token_dataset import row_lengths
from draftsmith.models.target.features import target_features
from draftsmith.recipes.errors import UserError

# The column of a dataset that says which rows of the feature cache, in this order, its row is made of.
ROWS_COLUMN = "feature_rows"
# The batch of a process for which no row is left; two tokens, as the second has a token to its left.
NO_ROW: dict[str, Any] = {"input_ids": [0, 0], "loss_mask": [0, 0], ROWS_COLUMN: []}
PROBE_LENGTHS = (5, 9, 3)
# Relative to the features' size. Half precision rounds, by some multiple of its own unit.
PROBE_TOLERANCE_FRAC, PROBE_TOLERANCE_UNITS = 1e-3, 8.0


def collate_right_padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return `input_ids`, `loss_mask`, `attention_mask` and, if packed, `position_ids`: [B, S], S the longest row.

    Padding is on the right, where causal attention alone keeps it out of every real token, and carries no loss;
    so any id does for it, and none that the tokenizer might also use as an end token is needed.
    Of no rows it is a row of padding, whose `attention_mask` is 0 (see `EvenBatches`).
    """
    if not rows:
        batch = collate_right_padded([NO_ROW])
        return {**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}
    ids = [torch.as_tensor(row["input_ids"], dtype=torch.long) for row in rows]
    masks = [torch.as_tensor(row["loss_mask"], dtype=torch.long) for row in rows]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "loss_mask": pad_sequence(masks, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }
    if "position_ids" in rows[0]:
        length = batch["input_ids"].shape[1]
        # Padding counts from 0 as well: one more document, from which nothing is learned.
        parts = [[torch.as_tensor(row["position_ids"]), torch.arange(length - len(row["input_ids"]))] for row in rows]
        batch["position_ids"] = torch.stack([torch.cat(row_parts) for row_parts in parts])
    return batch


class EvenBatches(BatchSampler):
    """The batches of all processes together, followed by empty ones up to a multiple of the number of processes.

    accelerate fills the last batches of an epoch with rows from its beginning. Here no row is dropped and none is
    doubled: batches stay as short as they are, and a process for which there is none gets an empty one, which
    `collate_right_padded` turns into padding.
    """

    batch_size: Any = None  # batches differ in size

    def __init__(self, batches: BatchSampler, num_processes: int) -> None:
        self._batches, self._num_processes = batches, num_processes
        self.drop_last = batches.drop_last

    @property
    def sampler(self) -> Any:
        """The sampler of the rows, which accelerate tells the epoch."""
        return self._batches.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self._batches.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        num_batches = 0
        for batch in self._batches:
            num_batches += 1
            yield batch
        yield from ([] for _ in range(-num_batches % self._num_processes))

    def __len__(self) -> int:
        return -(-len(self._batches) // self._num_processes) * self._num_processes


def even_out(loader: DataLoader) -> DataLoader:
    """Give the loader, as accelerate prepared it, `EvenBatches`; one process needs none of it."""
    shard = getattr(loader, "batch_sampler", None)
    if isinstance(shard, BatchSamplerShard) and shard.num_processes > 1:
        shard.batch_sampler = EvenBatches(shard.batch_sampler, shard.num_processes)
        shard.batch_size, shard.even_batches = None, False
    return loader


def pack_by_length(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Return rows of indices whose lengths add up to at most `row_tokens`; one that is longer is alone in its row.

    The longest goes first, each into the fullest row that still holds it, of rows equally full into the one begun last.
    Rows stand in the order of their longest document.
    """
    rows: list[list[int]] = []
    of_room: dict[int, list[int]] = {}  # rows by the tokens that they still hold
    rooms: list[int] = []  # the keys, ascending
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[index])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), row_tokens
            rows.append([])
        else:
            room = rooms[place]
            row = of_room[room].pop()
            if not of_room[room]:
                del of_room[room], rooms[place]
        rows[row].append(index)
        left = room - length
        if left > 0:
            if left not in of_room:
                of_room[left] = []
                insort(rooms, left)
            of_room[left].append(row)
    return rows


def pack_documents(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make one row of token rows: `input_ids`, `loss_mask` and `position_ids`.

    A document's first token carries no loss: nothing comes before it, so it is never predicted.
    """
    return {
        "input_ids": np.concatenate([row["input_ids"] for row in rows]),
        "loss_mask": np.concatenate([[0, *row["loss_mask"][1:]] for row in rows]),
        "position_ids": np.concatenate([np.arange(len(row["input_ids"])) for row in rows]),
    }


class PackedRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Token rows, packed. Documents are read when a row is asked for; their numbers are in it, for cached features.

    Args:
        tokens: Rows with `input_ids`, `loss_mask` and `length`.
        row_tokens: The longest that a packed row may be.
    """

    def __init__(self, tokens: Dataset, row_tokens: int) -> None:
        numbers = [name for name in tokens.column_names if name == ROWS_COLUMN]  # of a part of the cached rows
        self.tokens = tokens.select_columns(["input_ids", "loss_mask", *numbers])
        self.rows = pack_by_length(row_lengths(tokens), row_tokens)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        documents = [self.tokens[document] | {"place": document} for document in self.rows[index]]
        numbers = [number for row in documents for number in row.get(ROWS_COLUMN, [row["place"]])]
        return {**pack_documents(documents), ROWS_COLUMN: numbers}


def check_packing(target: PreTrainedModel) -> None:
    """Check by one short forward that the target keeps packed documents apart.

    Raises:
        UserError: It does not: an architecture that makes its mask otherwise.
    """
    ids_s = torch.arange(sum(PROBE_LENGTHS), device=target.device) % target.get_input_embeddings().weight.shape[0]
    positions_s = torch.cat([torch.arange(length, device=target.device) for length in PROBE_LENGTHS])
    packed_sd = target_features(target, ids_s[None], None, positions_s[None])[0]
    alone_sd = torch.cat([target_features(target, part[None])[0] for part in ids_s.split(PROBE_LENGTHS)])
    tolerance_frac = max(PROBE_TOLERANCE_FRAC, PROBE_TOLERANCE_UNITS * torch.finfo(alone_sd.dtype).eps)
    if not (packed_sd - alone_sd).float().abs().mean() <= tolerance_frac * alone_sd.float().abs().mean():
        raise UserError(
            f"key `data.packing`: a target of the kind {target.config.model_type} does not keep packed documents "
            "apart; set data.packing=false"
        )
