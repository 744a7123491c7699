"""Batches of token rows, padded on the right. Shapes: B batch, S sequence."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# The column of a dataset that says which rows of the cache, one behind the other, its row is made of.
ROWS_COLUMN = "feature_rows"
# The batch of a process for which no row is left; two tokens, as the second has a token to its left.
NO_ROW: dict[str, Any] = {"input_ids": [0, 0], "loss_mask": [0, 0], ROWS_COLUMN: []}


def collate_right_padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """`input_ids`, `loss_mask` and `attention_mask`, each [B, S] with S the longest row; of packed rows `position_ids`.

    Padding is on the right, where causal attention alone keeps it out of every real token, and carries no loss;
    so any id does for it, and none that the tokenizer might also use as an end token is needed.
    Of no rows it is a row of padding, whose `attention_mask` is 0 (see `even.py`).
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
        # Padding counts from 0 as well: one more document, which nothing is learned of.
        parts = [[torch.as_tensor(row["position_ids"]), torch.arange(length - len(row["input_ids"]))] for row in rows]
        batch["position_ids"] = torch.stack([torch.cat(row_parts) for row_parts in parts])
    return batch
