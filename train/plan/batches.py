"""The batches that `draftsmith plan` computes with: the largest that can come, and a typical one."""

from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from torch import Tensor

from draftsmith.data.distill.token_dataset import load_tokens, row_lengths
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.batches.collate import PackedRows, collate_right_padded
from draftsmith.train.batches.heldout import split_rows


@dataclass(frozen=True)
class Batch:
    """A batch to plan with."""

    inputs: dict[str, Tensor]
    how: str

    @property
    def rows(self) -> int:
        return len(self.inputs["input_ids"])

    def describe(self) -> str:
        """Its shape, its labels and where it is from."""
        rows, length = self.inputs["input_ids"].shape
        labelled = float(self.inputs["loss_mask"].sum() / self.inputs["attention_mask"].sum())
        return f"{rows} x {length}, {labelled:.0%} labelled; {self.how}"


@dataclass(frozen=True)
class TrainingData:
    """The largest batch that can come, a typical one, and how many tokens there are in all (None: unknown)."""

    largest: Batch
    typical: Batch
    tokens: int | None
    tokens_how: str


def training_data(recipe: Recipe, batch_size: int, labelled_share: float | None = None) -> TrainingData:
    """From the distilled tokens if there are any, else from `data.max_length_tokens`."""
    run, length = RunFolder(recipe), recipe.data.max_length_tokens
    tokens = load_tokens(run, recipe.name) if (run.data / "tokens").is_dir() else None
    if tokens is not None and labelled_share is None:
        packed_tokens = length if recipe.data.packing else None
        tokens, _ = split_rows(tokens, recipe.data.eval_rows_frac, recipe.data.train_answer_tokens)
        return _from_dataset(tokens, batch_size, packed_tokens, str(run.data / "tokens"))
    share = 1.0 if labelled_share is None else labelled_share
    how = "assumed: rows of data.max_length_tokens"
    if labelled_share is None:
        how += ", all labelled: the most there can be (--labelled-share)"
    num_prompt = length - round(share * length)
    row = {"input_ids": [0] * length, "loss_mask": [0] * num_prompt + [1] * (length - num_prompt)}
    batch = Batch(collate_right_padded([row] * batch_size), how)
    if tokens is not None:
        return TrainingData(batch, batch, sum(row_lengths(tokens)), f"the tokens of {run.data / 'tokens'}")
    limit = recipe.data.conversations.limit
    if limit is None:
        return TrainingData(batch, batch, None, "data.conversations.limit is not set and nothing is distilled yet")
    how = "at most: data.conversations.limit x data.max_length_tokens, as nothing is distilled yet"
    return TrainingData(batch, batch, limit * length, how)


def _from_dataset(tokens: Dataset, batch_size: int, packed_tokens: int | None, folder: str) -> TrainingData:
    """Rows as they are, or packed to `packed_tokens`."""
    lengths = np.array(row_lengths(tokens))
    masks = tokens.with_format("numpy").iter(batch_size=4096)
    labels = np.array([mask.sum() for batch in masks for mask in batch["loss_mask"]])
    rows: Dataset | PackedRows = tokens
    if packed_tokens is not None:
        rows = PackedRows(tokens, packed_tokens)
        lengths, labels = (np.array([each[row].sum() for row in rows.rows]) for each in (lengths, labels))
    batch_size = min(batch_size, len(rows))
    longest = int(lengths.argmax())
    others = [int(row) for row in np.argsort(-labels, kind="stable") if row != longest][: batch_size - 1]
    by_length = np.argsort(lengths, kind="stable")
    spread = [int(by_length[(2 * i + 1) * len(rows) // (2 * batch_size)]) for i in range(batch_size)]
    largest, typical = (collate_right_padded([rows[row] for row in chosen]) for chosen in ([longest, *others], spread))
    return TrainingData(
        Batch(largest, f"the longest and the most labelled rows of {folder}"),
        Batch(typical, f"rows of all lengths of {folder}"),
        int(lengths.sum()),
        f"the tokens of {folder}",
    )
