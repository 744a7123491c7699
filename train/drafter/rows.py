"""Training examples: the held-out split, packing, batches, and the metrics of a drafter on held-out examples.

Conversations are ordered by a hash of their tokens: the first ones are held out, training takes the following ones. So
adding data moves no conversation to the other side, and drafters trained on any part of the data are measured on the
same examples. All examples of a conversation (some templates give several) are on the same side.

Packing puts several conversations (documents) into one row, so that almost nothing of a batch is padding. A row's
documents are chosen once, by their lengths alone (best-fit decreasing). Position ids restart with each document. By
them the attention masks of the target (transformers) and of drafters (`models/groups/layout.py`) end at its borders,
and so do the features that a group reads. The loss equals that of the documents in separate rows.

The answers are the target's own, so a greedy chain can be replayed without decoding: it is known how many depths of the
group after a round's newest token are right, and the next round starts after these and the target's token. At T = 0
this equals the decoding loop, except for the target's ties. The held-out loss is a mean over batches, weighted by their
labels: their size changes it a little.

Shapes: B batch, S sequence, D hidden, G depths.
"""

import hashlib
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
from transformers.trainer_pt_utils import LengthGroupedSampler

from draftsmith.data.distill.token_dataset import first_rows_of_conversations, row_lengths
from draftsmith.data.tokens.loss_mask import runs_of_ones
from draftsmith.errors import UserError
from draftsmith.models.loss import DrafterOutput
from draftsmith.models.target.checks import keeps_documents_apart
from draftsmith.train.features.stored import StoredFeatures

# The column of a dataset that says which rows of the stored features, in this order, its row is made of.
ROWS_COLUMN = "feature_rows"
HASHED_BYTES = 8
# Key of a batch whose features could not be had: the sentence for the user.
ERROR = "error"
# The batch of a process for which no row is left; two tokens, as the second has a token to its left.
EMPTY_ROW: dict[str, Any] = {"input_ids": [0, 0], "loss_mask": [0, 0]}


def split_rows(tokens: Dataset, eval_rows_frac: float) -> tuple[Dataset, Dataset | None]:
    """Split `tokens` into training and held-out examples (or None); `ROWS_COLUMN` has their row numbers in `tokens`.

    Args:
        tokens: Examples; without a conversation column each counts as a separate conversation.
        eval_rows_frac: Approximate share of all conversations to hold out, one at least; 0: none.

    Raises:
        UserError: Nothing would be left to train on.
    """
    numbered = tokens.add_column(ROWS_COLUMN, [[row] for row in range(len(tokens))])
    if not eval_rows_frac:
        return numbered, None
    rows = tokens.with_format("numpy", columns=["input_ids"])["input_ids"]
    begins = first_rows_of_conversations(tokens)
    of_first = {row: _place(np.asarray(rows[row])) for row in dict.fromkeys(begins)}
    places = np.array([of_first[row] for row in begins])
    out = places <= max(eval_rows_frac, places.min())
    if out.all():
        raise UserError(
            f"key `data.eval_rows_frac`: {eval_rows_frac} of {len(tokens)} rows leaves none to train on: set it to 0, "
            "or distil more conversations"
        )
    return numbered.select(np.flatnonzero(~out)), numbered.select(np.flatnonzero(out))


def _place(ids_s: np.ndarray) -> float:
    """Return a row's place in [0, 1), by its tokens alone."""
    digest = hashlib.sha256(ids_s.astype("<i8").tobytes()).digest()[:HASHED_BYTES]
    return int.from_bytes(digest, "big") / 256**HASHED_BYTES


def pack_by_length(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Pack documents into rows of at most `row_tokens` tokens; a longer document gets a separate row.

    The longest document is placed first. Each goes into the fullest row that has room for it, the last of equally full
    ones. Returns the documents' indices by row; rows are in the order of their longest document.
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
    """Join examples to one packed row: `input_ids`, `loss_mask`, and `position_ids`, from 0 in each example."""
    return {
        "input_ids": np.concatenate([row["input_ids"] for row in rows]),
        "loss_mask": np.concatenate([row["loss_mask"] for row in rows]),
        "position_ids": np.concatenate([np.arange(len(row["input_ids"])) for row in rows]),
    }


class PackedRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Dataset of packed rows, joined on access; `ROWS_COLUMN` has the numbers of the examples' rows of features.

    Args:
        tokens: Examples as `split_rows` returns them.
        row_tokens: Most tokens of a packed row.
    """

    def __init__(self, tokens: Dataset, row_tokens: int) -> None:
        self.tokens = tokens.select_columns(["input_ids", "loss_mask", ROWS_COLUMN])
        self.rows = pack_by_length(row_lengths(tokens), row_tokens)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        documents = [self.tokens[document] for document in self.rows[index]]
        numbers = [number for document in documents for number in document[ROWS_COLUMN]]
        return {**pack_documents(documents), ROWS_COLUMN: numbers}


def check_packing(target: PreTrainedModel) -> None:
    """Check by one short forward that the target keeps packed documents apart.

    Raises:
        UserError: The target lets packed documents attend to one another.
    """
    if not keeps_documents_apart(target):
        raise UserError(
            f"key `data.packing`: a target of type {target.config.model_type} cannot keep packed conversations "
            "separate: set data.packing=false"
        )


# ---- batches ----


def collate_right_padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return `input_ids`, `loss_mask`, `attention_mask` and, if packed, `position_ids`: [B, S], S the longest row.

    Padding is on the right, where causal attention alone keeps it out of every real token, and carries no loss, so its
    token id (0) does not matter. No rows give one row of padding, whose `attention_mask` is 0 (see `EvenBatches`).
    """
    if not rows:
        batch = collate_right_padded([EMPTY_ROW])
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


class FeatureCollator:
    """Collator like `collate_right_padded` that also reads the stored `features` [B, S, F]; zeros at padding."""

    def __init__(self, stored: StoredFeatures) -> None:
        self._stored = stored

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collate_right_padded(rows)
        try:
            return {**batch, "features": self._features(rows, batch["input_ids"])}
        except UserError as error:  # in a worker of the loader, whose exceptions arrive with their traceback as text
            return {**collate_right_padded([]), ERROR: str(error)}

    def _features(self, rows: list[dict[str, Any]], input_ids_bs: Tensor) -> Tensor:
        features = torch.zeros(*input_ids_bs.shape, self._stored.width, dtype=self._stored.dtype)
        self._stored.ask([number for row in rows for number in row[ROWS_COLUMN]])
        for place, row in enumerate(rows):
            self._stored.read(row[ROWS_COLUMN], features[place])
        return features


class EvenBatches(BatchSampler):
    """Batch sampler for all processes, with empty batches appended up to a multiple of the number of processes.

    accelerate fills the last batches of an epoch with rows from the epoch's start. Here every row comes exactly once:
    the last batch may be shorter, and a process for which no batch is left gets an empty one, which
    `collate_right_padded` turns into padding.
    """

    batch_size: Any = None  # batches differ in size

    def __init__(self, batches: BatchSampler, num_processes: int) -> None:
        self._batches, self._num_processes = batches, num_processes
        self.drop_last = batches.drop_last

    @property
    def sampler(self) -> Any:
        """Return the sampler of the rows, on which accelerate sets the epoch."""
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


class RowsByLength(LengthGroupedSampler):
    """Sampler that groups rows of similar length; its order depends on the seed and the epoch alone.

    transformers' own sampler draws from torch's global generator, whose state differs when an epoch is resumed.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self._seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order of the next iteration."""
        self.generator = torch.Generator().manual_seed(self._seed + epoch)


def even_out(loader: DataLoader) -> DataLoader:
    """Make a loader that accelerate has prepared use `EvenBatches`, if there are several processes; return it."""
    shard = getattr(loader, "batch_sampler", None)
    if isinstance(shard, BatchSamplerShard) and shard.num_processes > 1:
        shard.batch_sampler = EvenBatches(shard.batch_sampler, shard.num_processes)
        shard.batch_size, shard.even_batches = None, False
    return loader


# ---- metrics of held-out examples ----


def heldout_sums(output: DrafterOutput, loss_mask_bs: Tensor) -> Tensor:
    """Return a batch's contribution to the sums of `heldout_metrics`: [1 + 6G], float64 on the CPU.

    In order: 1 loss times the number of labels; 4G `DrafterOutput.depth_sums`; of greedy chains of 1, ..., G draft
    tokens, G numbers of committed tokens and G numbers of rounds.
    """
    sums_4g = output.depth_sums.cpu()
    chains_2g = torch.tensor(replayed_chains(output.correct_bgs, loss_mask_bs), dtype=torch.float64)
    return torch.cat([(output.loss.cpu().double() * sums_4g[2].sum())[None], sums_4g.flatten(), chains_2g.flatten()])


def heldout_metrics(sums: Tensor) -> dict[str, float]:
    """Return metrics from summed `heldout_sums`: loss; by depth d loss, accuracy and tau of chains of d tokens."""
    losses, correct, counts, counts_in_head, tokens, rounds = sums[1:].view(6, -1).tolist()
    metrics = {"eval_loss": float(sums[0]) / max(1.0, sum(counts))}
    for j, count in enumerate(counts):
        if counts_in_head[j]:
            metrics[f"eval_loss_depth{j + 1}"] = round(losses[j] / counts_in_head[j], 4)
        if count:
            metrics[f"eval_accuracy_depth{j + 1}"] = round(correct[j] / count, 4)
        if rounds[j]:
            metrics[f"eval_tau_depth{j + 1}"] = round(tokens[j] / rounds[j], 4)
    return metrics


def replayed_chains(correct_bgs: Tensor, loss_mask_bs: Tensor) -> list[list[float]]:
    """Replay answers with greedy chains of 1, 2, ..., G tokens; return their G committed tokens and G rounds.

    Args:
        correct_bgs: [B, G, S], whether depth j of the group at t is the token x_{t+1+j}; False without a label.
        loss_mask_bs: [B, S], 1 at answers' tokens, without holes. An answer's first token comes from the prefill.
    """
    right_bs = correct_bgs.long().cumprod(1).sum(1).tolist()
    depths = correct_bgs.shape[1]
    tokens, rounds = [0.0] * depths, [0.0] * depths
    for right_s, mask_s in zip(right_bs, loss_mask_bs.tolist(), strict=True):
        for first, end in runs_of_ones(mask_s):
            for j in range(depths):
                tokens[j] += end - 1 - first
                rounds[j] += _count_rounds(right_s, first, end - 1, j + 1)
    return [tokens, rounds]


def _count_rounds(right_s: list[int], first: int, last: int, depth: int) -> int:
    """Count the rounds of chains of `depth` tokens in the answer from token `first` to token `last`."""
    newest, rounds = first, 0
    while newest < last:
        newest += min(right_s[newest], depth) + 1
        rounds += 1
    return rounds
