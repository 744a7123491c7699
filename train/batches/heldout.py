"""Token rows that training leaves out: to see how much of what a drafter learns holds for other answers, and to train
on a part of the data.

Rows stand in the order of a hash of their own tokens: the first ones are kept out, training takes those behind them. So
data which are added move none, parts lie in each other, and drafters trained on any are measured on the same rows.
"""

import hashlib

import numpy as np
from datasets import Dataset

from draftsmith.data.distill.token_dataset import answer_lengths
from draftsmith.recipes.errors import UserError
from draftsmith.train.batches.collate import ROWS_COLUMN

HASHED_BYTES = 8


def split_rows(
    tokens: Dataset, eval_rows_frac: float, answer_tokens: int | None = None
) -> tuple[Dataset, Dataset | None]:
    """The rows to train on, and about so many of them kept out; both know their numbers (`ROWS_COLUMN`).

    Args:
        eval_rows_frac: Share of all rows to keep out.
        answer_tokens: Train on no more rows than hold so many tokens with loss; by default on all.

    Raises:
        UserError: None would be left on one side, or there are fewer answer tokens.
    """
    if not eval_rows_frac and answer_tokens is None:
        return tokens, None
    rows = tokens.with_format("numpy", columns=["input_ids"])["input_ids"]
    places = np.array([_place(np.asarray(row)) for row in rows])
    out = places < eval_rows_frac
    numbered = tokens.add_column(ROWS_COLUMN, [[row] for row in range(len(tokens))])
    if eval_rows_frac and (out.all() or not out.any()):
        raise UserError(
            f"key `data.eval_rows_frac`: {eval_rows_frac} of {len(tokens)} rows leaves {int((~out).sum())} to train on "
            f"and {int(out.sum())} to evaluate on: choose a share that leaves some of both"
        )
    to_train = np.flatnonzero(~out)
    if answer_tokens is not None:
        by_place = to_train[np.argsort(places[to_train], kind="stable")]
        held = np.array(answer_lengths(tokens))[by_place].cumsum()
        if answer_tokens > held[-1]:
            raise UserError(
                f"key `data.train_answer_tokens`: {answer_tokens:,} are wanted, but the rows to train on hold "
                f"{held[-1]:,}: distil more, or leave the key out to train on all"
            )
        to_train = np.sort(by_place[: np.searchsorted(held, answer_tokens) + 1])
    return numbered.select(to_train), numbered.select(np.flatnonzero(out)) if eval_rows_frac else None


def _place(ids_s: np.ndarray) -> float:
    """In [0, 1), by the tokens alone."""
    digest = hashlib.sha256(ids_s.astype("<i8").tobytes()).digest()[:HASHED_BYTES]
    return int.from_bytes(digest, "big") / 256**HASHED_BYTES
