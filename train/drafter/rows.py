"""The token rows of a training: which are kept out of it, which share a row, and what a drafter does on those kept out.

Conversations stand in the order of a hash of their tokens: the first ones are kept out, training takes those after
them. So adding data moves none, parts are nested in each other, and drafters trained on any are measured on the same
rows. All rows of a conversation, of which some templates make several, are on one side.

Packing puts several conversations into one row, so that next to nothing of a batch is padding. Which conversations
share a row is decided once, from their lengths alone (best-fit decreasing). Position ids start anew with each document:
from that the target's attention masks (transformers) and the drafters' (`models/groups/rows.py`) end at the borders,
and so do the features that a group reads. The loss is that of the documents in rows of their own.

The answers are the target's own, so a greedy chain can be replayed without decoding: of the group that it is drafted
after one knows how many of its depths are right, and the next round begins after those and the target's own token. At
T = 0 that is what the decoding loop does, except for the target's ties and for drafters that read their own drafts.

Shapes: B batch, S sequence, D hidden, G depths.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.data.distill.token_dataset import answer_lengths, conversation_begins, row_lengths
from draftsmith.models.losses import DrafterOutput
from draftsmith.models.target.features import target_features
from draftsmith.recipes.errors import UserError

# The column of a dataset that says which rows of the feature cache, in this order, its row is made of.
ROWS_COLUMN = "feature_rows"
HASHED_BYTES = 8
PROBE_LENGTHS = (5, 9, 3)
# Relative to the features' size. Half precision rounds, by some multiple of its own unit.
PROBE_TOLERANCE_FRAC, PROBE_TOLERANCE_UNITS = 1e-3, 8.0


def split_rows(
    tokens: Dataset, eval_rows_frac: float, answer_tokens: int | None = None
) -> tuple[Dataset, Dataset | None]:
    """Return the rows to train on, and about so many of them kept out; both know their numbers (`ROWS_COLUMN`).

    Args:
        tokens: Rows; of datasets that do not say their conversation each is one of its own.
        eval_rows_frac: Share of all conversations to keep out.
        answer_tokens: Train on no more rows than hold so many tokens with loss; by default on all.

    Raises:
        UserError: None would be left on one side, or there are fewer answer tokens.
    """
    if not eval_rows_frac and answer_tokens is None:
        return tokens, None
    rows = tokens.with_format("numpy", columns=["input_ids"])["input_ids"]
    begins = conversation_begins(tokens)
    of_first = {row: _place(np.asarray(rows[row])) for row in dict.fromkeys(begins)}
    places = np.array([of_first[row] for row in begins])
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
    """Return a row's place in [0, 1), by its tokens alone."""
    digest = hashlib.sha256(ids_s.astype("<i8").tobytes()).digest()[:HASHED_BYTES]
    return int.from_bytes(digest, "big") / 256**HASHED_BYTES


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


def heldout_sums(output: DrafterOutput, loss_mask_bs: Tensor) -> Tensor:
    """Return [1 + 5G], float64 on the CPU: what a batch adds to the sums that `heldout_metrics` reads.

    The loss times its labels; of each depth the sum of losses, correct labels and labels; of greedy chains of 1, ..., G
    drafted tokens the tokens committed and the rounds.
    """
    parts = (output.depth_loss_sum, output.depth_correct, output.depth_count)
    sums_3g = torch.stack([part.double() for part in parts if part is not None]).cpu()
    chains_2g = torch.tensor(replayed_chains(output.correct_bgs, loss_mask_bs), dtype=torch.float64)
    loss = torch.zeros(()) if output.loss is None else output.loss.cpu()
    return torch.cat([(loss.double() * sums_3g[2].sum())[None], sums_3g.flatten(), chains_2g.flatten()])


def heldout_metrics(sums: Tensor, prefix: str) -> dict[str, float]:
    """Return the mean loss over labels, and of each depth loss, accuracy and tau of a chain that long."""
    losses, correct, counts, tokens, rounds = sums[1:].view(5, -1).tolist()
    metrics = {f"{prefix}_loss": float(sums[0]) / max(1.0, sum(counts))}
    for j, count in enumerate(counts):
        if count:
            metrics[f"{prefix}_loss_depth{j + 1}"] = round(losses[j] / count, 4)
            metrics[f"{prefix}_accuracy_depth{j + 1}"] = round(correct[j] / count, 4)
        if rounds[j]:
            metrics[f"{prefix}_tau_depth{j + 1}"] = round(tokens[j] / rounds[j], 4)
    return metrics


def replayed_chains(correct_bgs: Tensor | None, loss_mask_bs: Tensor) -> list[list[float]]:
    """Return the tokens committed, then the rounds, of greedy chains of 1, 2, ..., G tokens over all answers.

    Args:
        correct_bgs: Whether depth j of the group at t is the token x_{t+1+j}; False where there is no label.
        loss_mask_bs: 1 at the tokens of answers. An answer's first token comes from the prefill.
    """
    if correct_bgs is None:
        raise ValueError("the drafter's forward does not say which labels are right: DrafterOutput.correct_bgs")
    right_bs = correct_bgs.long().cumprod(1).sum(1).tolist()
    depths = correct_bgs.shape[1]
    tokens, rounds = [0.0] * depths, [0.0] * depths
    for right_s, mask_s in zip(right_bs, loss_mask_bs.tolist(), strict=True):
        for first, last in answers_in(mask_s):
            for j in range(depths):
                tokens[j] += last - first
                rounds[j] += _count_rounds(right_s, first, last, j + 1)
    return [tokens, rounds]


def _count_rounds(right_s: list[int], first: int, last: int, depth: int) -> int:
    """Count the rounds of chains of `depth` tokens in the answer from token `first` to token `last`."""
    newest, rounds = first, 0
    while newest < last:
        newest += min(right_s[newest], depth) + 1
        rounds += 1
    return rounds


def answers_in(mask_s: list[int]) -> list[tuple[int, int]]:
    """Return the first and last token of every run of ones."""
    begins = [s for s, is_answer in enumerate(mask_s) if is_answer and (s == 0 or not mask_s[s - 1])]
    ends = [s for s, is_answer in enumerate(mask_s) if is_answer and (s + 1 == len(mask_s) or not mask_s[s + 1])]
    return list(zip(begins, ends, strict=True))
