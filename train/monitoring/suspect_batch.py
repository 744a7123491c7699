"""The rows of a step whose loss is not what it should be, as JSON for whoever looks into it.

Shapes: B batch, S sequence.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.groups.alignment import document_starts
from draftsmith.recipes.run_folder import write_atomically
from draftsmith.train.batches.collate import ROWS_COLUMN
from draftsmith.train.batches.packing import PackedRows


@dataclass(frozen=True)
class SuspectBatch:
    """A step of one process: its micro-batches as collated, and the loss of each."""

    step: int
    rank: int
    losses: list[float]
    micro_batches: Sequence[dict[str, Tensor]]

    def write(self, folder: Path, dataset: Any) -> Path:
        """Write `step-N-rank-R.json` there: token ids and masks, and which rows of `data/tokens` they are."""
        documents = [list(_documents(batch)) for batch in self.micro_batches]
        rows = _row_numbers({tuple(ids) for batch in documents for ids, _ in batch}, dataset)
        micro_batches = [
            {
                "loss": loss,
                "rows": [
                    {"row": rows.get(tuple(ids)), "input_ids": ids, "loss_mask": mask} for ids, mask in documents_here
                ],
            }
            for loss, documents_here in zip(self.losses, documents, strict=True)
        ]
        file = folder / f"step-{self.step}-rank-{self.rank}.json"
        content = {"step": self.step, "rank": self.rank, "micro_batches": micro_batches}
        write_atomically(file, json.dumps(content) + "\n")
        return file


def _documents(batch: dict[str, Tensor]) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids and loss mask of each, without padding; packed rows are taken apart."""
    ids_bs, mask_bs, present_bs = (batch[name].cpu() for name in ("input_ids", "loss_mask", "attention_mask"))
    positions = batch.get("position_ids")
    for row, present_s in enumerate(present_bs.bool()):
        ids_s, mask_s = ids_bs[row][present_s], mask_bs[row][present_s]
        begins = [0]
        if positions is not None and len(ids_s):
            begins = document_starts(positions[row].cpu()[present_s][None])[0].nonzero().flatten().tolist()
        for begin, end in zip(begins, [*begins[1:], len(ids_s)], strict=True):
            if end > begin:
                yield ids_s[begin:end].tolist(), mask_s[begin:end].tolist()


def _row_numbers(wanted: set[tuple[int, ...]], dataset: Any) -> dict[tuple[int, ...], int]:
    """Where these tokens stand; the whole dataset is read, which only a failure is worth."""
    tokens = dataset.tokens if isinstance(dataset, PackedRows) else dataset
    found = {}
    for place, row in enumerate(tokens):
        ids = tuple(torch.as_tensor(row["input_ids"]).tolist())
        if ids in wanted:
            found[ids] = row[ROWS_COLUMN][0] if ROWS_COLUMN in row else place
    return found
