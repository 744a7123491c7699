"""Several conversations in one row, so that next to nothing of a batch is padding.

Which conversations share a row is decided once, from their lengths alone (best-fit decreasing: the longest first, each
into the fullest row that still holds it). In a row position ids start anew with each document. By them the target's own
attention masks (transformers finds packed documents by that sign) and the drafters' (`models/groups/rows.py`) end at
the borders, and so do the features that a group reads, so the loss is that of the documents in rows of their own.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from draftsmith.data.distill.token_dataset import row_lengths
from draftsmith.models.target.features import target_features
from draftsmith.recipes.errors import UserError
from draftsmith.train.batches.collate import ROWS_COLUMN

PROBE_LENGTHS = (5, 9, 3)
# Of the features' size. Half precision rounds, by some multiple of its own unit.
PROBE_TOLERANCE_FRAC, PROBE_TOLERANCE_UNITS = 1e-3, 8.0


def pack_by_length(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Rows of indices whose lengths add up to at most `row_tokens`; one that is longer is alone in its row.

    Of rows equally full the one begun last is taken. Rows stand in the order of their longest document.
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
    """One row of token rows: `input_ids`, `loss_mask` and `position_ids`.

    No document's first token is ever predicted: nothing of it comes before. So it carries no loss here either.
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
    """Whether the target keeps packed documents apart, by one short forward.

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
