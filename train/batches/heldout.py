"""Token rows that training leaves out, to see how much of what a drafter learns holds for other answers.

A row is kept out by a hash of its own tokens, so that data which are added move none, and drafters that are trained on
parts of the same data are measured on the same rows.
"""

import hashlib

import numpy as np
from datasets import Dataset

from draftsmith.recipes.errors import UserError
from draftsmith.train.batches.collate import ROWS_COLUMN

HASHED_BYTES = 8


def split_rows(tokens: Dataset, eval_rows_frac: float) -> tuple[Dataset, Dataset | None]:
    """The rows to train on, and about so many of them kept out; both know their numbers (`ROWS_COLUMN`).

    Raises:
        UserError: None would be left on one side.
    """
    if not eval_rows_frac:
        return tokens, None
    rows = tokens.with_format("numpy", columns=["input_ids"])["input_ids"]
    kept_out = [_place(np.asarray(row)) < eval_rows_frac for row in rows]
    numbered = tokens.add_column(ROWS_COLUMN, [[row] for row in range(len(tokens))])
    to_train, to_eval = ([row for row, out in enumerate(kept_out) if out == side] for side in (False, True))
    if not to_train or not to_eval:
        raise UserError(
            f"key `data.eval_rows_frac`: {eval_rows_frac} of {len(tokens)} rows leaves {len(to_train)} to train on and "
            f"{len(to_eval)} to evaluate on: choose a share that leaves some of both"
        )
    return numbered.select(to_train), numbered.select(to_eval)


def _place(ids_s: np.ndarray) -> float:
    """In [0, 1), by the tokens alone."""
    digest = hashlib.sha256(ids_s.astype("<i8").tobytes()).digest()[:HASHED_BYTES]
    return int.from_bytes(digest, "big") / 256**HASHED_BYTES
