"""Distilled conversations as an Arrow dataset of token ids and loss masks, which the trainer reads.

It is built in a temporary folder next to its final place and renamed, so it is complete or absent. It is built again
only if the conversations, the tokenizer, its chat template or the length have changed, and never while an unfinished
training uses it. Several processes tokenise the conversations in bounded memory: just enough chunks are in flight that
no process waits. Rows are in the order of the conversations' ids, whatever the number of processes.
"""

import hashlib
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock

from draftsmith.data.distill.ledger import LedgerView
from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.tokens.loss_mask import TokenizedConversation
from draftsmith.data.tokens.rows import tokenize_batch, tokenize_rows
from draftsmith.data.tokens.templates import TemplateProblem
from draftsmith.errors import UserError, reason
from draftsmith.files import read_json
from draftsmith.parent import end_with_parent
from draftsmith.progress import Progress, progress_bar
from draftsmith.recipes.run_folder import RunFolder, check_no_training_reads, run_lock
from draftsmith.recipes.schema import Recipe

MOST_PROCESSES = 8  # by default
CHUNK_CONVERSATIONS = 128
CHUNKS_PER_PROCESS = 3  # being tokenised or waiting: one is always ready
REPORT_NAME = "token_report.json"
# Column with the number of a row's conversation; datasets of earlier versions lack it.
CONVERSATION = "conversation"
FORMAT_VERSION = 5
FEATURES = datasets.Features(
    input_ids=datasets.Sequence(datasets.Value("int32")),
    loss_mask=datasets.Sequence(datasets.Value("int8")),
    length=datasets.Value("int32"),
    conversation=datasets.Value("int32"),
)

Chunk = tuple[Counter[str], list[dict[str, Any]]]


@dataclass(frozen=True)
class Work:
    """Settings for tokenising conversations to training rows.

    max_length_tokens: most tokens of a row.
    """

    tokenizer: Any
    max_length_tokens: int


@dataclass
class TokenReport:
    """Size of the token dataset, and counts of the conversations it was built from. A row is one training example.

    too_long: conversations without a row, as no answer fits into one. refused: those that the template rejects.
    answers_cut: answers that are learned up to the length limit; answers_out: answers beyond it.
    extra_rows: further rows of conversations in which a later prompt does not begin with the row before it.
    answers_refused: answers that the template rejects, in conversations where it accepts others.
    not_in_recipe: conversations of the run folder that are not in the recipe any more, and are left out.
    fingerprint: hash of the dataset's inputs. reused: whether an existing dataset with this fingerprint is used.
    """

    conversations: int = 0
    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    too_long: int = 0
    refused: int = 0
    answers_cut: int = 0
    extra_rows: int = 0
    answers_out: int = 0
    answers_refused: int = 0
    not_in_recipe: int = 0
    path: str = ""
    fingerprint: str = ""
    reused: bool = False

    def sentence(self) -> str:
        """Return a summary in one line for the console: examples, tokens, and what was left out."""
        extra = f" ({self.extra_rows} of them because later prompts change earlier turns)" if self.extra_rows else ""
        counts = {
            "without an example, as no answer fits into data.max_length_tokens": self.too_long,
            "refused by the chat template": self.refused,
            "answers cut at data.max_length_tokens": self.answers_cut,
            "answers beyond data.max_length_tokens": self.answers_out,
            "answers refused by the chat template": self.answers_refused,
        }
        lost = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        others = f"; {self.not_in_recipe} stored conversations are not in the recipe, and left out"
        return (
            f"{self.rows} examples{extra}, {self.tokens} tokens ({self.loss_tokens} of the assistant) in "
            f"{self.path}{f'; of {self.conversations} conversations {lost}' if lost else ''}"
            f"{others if self.not_in_recipe else ''}"
        )


def build_token_dataset(
    recipe: Recipe, tokenizer: Any, folder: RunFolder, ids: Collection[str] | None = None
) -> TokenReport:
    """Tokenise the distilled conversations to the Arrow dataset `folder.data/tokens`, unless it is up to date.

    Columns: `input_ids` (int32), `loss_mask` (int8), `length` and `conversation` (int32, its number among those read).
    Rows are in the order of the conversations' ids: one per conversation, or several, see `data/tokens/rows.py`.

    Args:
        recipe, tokenizer, folder: See `distill`.
        ids: Ids of the recipe's conversations; others in the folder are only counted. None: use all in the folder.

    Raises:
        UserError: Nothing was distilled, or no conversation fits `data.max_length_tokens`.
    """
    view, settings = LedgerView(folder.data, ids), recipe.data
    work = Work(tokenizer, settings.max_length_tokens)
    final, building = folder.data / "tokens", folder.data / "tokens.partial"
    # Two distillations that share the folder may end at the same time.
    with FileLock(folder.data / "tokens.lock"):
        fingerprint = _fingerprint(view, work)
        recorded = recorded_report(final)
        if recorded is not None and recorded.fingerprint == fingerprint:
            return replace(recorded, path=str(final), reused=True, not_in_recipe=view.num_others)
        is_replaced = final.exists()
        if is_replaced:
            check_no_training_reads(folder.data)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        with progress_bar(len(view), "tokenise", "conv") as bar:
            report = write_token_rows(
                view.distilled(),
                work,
                building / "rows.arrow",
                settings.tokenize_processes or min(os.cpu_count() or 1, MOST_PROCESSES),
                bar,
            )
        if report.rows == 0:
            shutil.rmtree(building)
            if report.refused == report.conversations:
                tokenize_rows(work.tokenizer, next(view.distilled()), work.max_length_tokens)  # raises what is wrong
            raise UserError(
                f"no conversation of {folder.data} is left to train on ({report.conversations} read, {report.too_long} "
                f"longer than {work.max_length_tokens} tokens, {report.refused} refused by the chat template"
                + "): "
                + ("raise data.max_length_tokens" if report.too_long else "take other conversations")
            )
        report = replace(report, path=str(final), fingerprint=fingerprint, not_in_recipe=view.num_others)
        # Saved next to the final place, then renamed; an older dataset is deleted only once the new one is complete.
        whole, old = building / "whole", final.with_name(final.name + ".old.partial")
        shutil.rmtree(old, ignore_errors=True)
        save_rows(building / "rows.arrow", whole)
        (whole / REPORT_NAME).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
        # A training that has opened the old dataset and not started yet holds the run's lock.
        with run_lock(folder.data.resolve().parent, "distill") if is_replaced else nullcontext():
            if is_replaced:
                check_no_training_reads(folder.data)
                final.rename(old)
            whole.rename(final)
        for leftover in (building, old):
            shutil.rmtree(leftover, ignore_errors=True)
        return report


def write_token_rows(
    conversations: Iterable[Conversation], work: Work, file: Path, processes: int, bar: Progress
) -> TokenReport:
    """Tokenise conversations to an Arrow file with the columns of `FEATURES`.

    Args:
        conversations: Conversations in the order of the rows; iterated once.
        work: Tokenizer and settings.
        file: The Arrow file; an existing one is overwritten.
        processes: Number of processes that tokenise; 1: only this process.
        bar: Progress bar, in conversations.

    Raises:
        UserError: See `tokenize_rows`; conversations that the template rejects are only counted.
    """
    counts: Counter[str] = Counter()
    with ArrowWriter(path=str(file), features=FEATURES) as writer:
        for counted, rows in _tokenize_in_processes(iter(conversations), work, processes):
            for row in rows:
                writer.write(row | {CONVERSATION: counts["conversations"] + row[CONVERSATION]})
            counts += counted
            bar.update(counted["conversations"])
        writer.finalize()
    totals: dict[str, Any] = dict(counts)
    return TokenReport(**totals)


def _tokenize_in_processes(conversations: Iterator[Conversation], work: Work, processes: int) -> Iterator[Chunk]:
    """Tokenise chunks of conversations in order, in this process if there are only a few."""
    chunks = iter(lambda: list(islice(conversations, CHUNK_CONVERSATIONS)), [])
    # Chunks for every process, or none: processes take seconds to start, which few conversations do not repay.
    ahead = list(islice(chunks, processes * CHUNKS_PER_PROCESS))
    if processes == 1 or len(ahead) < processes * CHUNKS_PER_PROCESS:
        yield from (_tokenize(chunk, work) for chunk in chain(ahead, chunks))
        return
    # Spawned, not forked as by `datasets.map`: this process may have threads and a GPU. The tokenizer is too large to
    # go with every chunk.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _start_process, (work,))
    try:
        submitted = deque(pool.submit(_tokenize, chunk) for chunk in ahead)
        del ahead
        while submitted:
            yield submitted.popleft().result()
            submitted.extend(pool.submit(_tokenize, chunk) for chunk in islice(chunks, 1))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_work: list[Work] = []  # settings of this pool process


def _start_process(work: Work) -> None:
    """Initialise a process of the pool."""
    end_with_parent()
    _work.append(work)


def _tokenize(conversations: list[Conversation], work: Work | None = None) -> Chunk:
    """Tokenise a chunk of conversations; returns its rows and counts."""
    work = work or _work[0]
    counts: Counter[str] = Counter(conversations=len(conversations))
    found: list[tuple[int, TokenizedConversation]] = []
    tokenized = tokenize_batch(work.tokenizer, conversations, work.max_length_tokens)
    for number, result in enumerate(tokenized):
        if isinstance(result, TemplateProblem):
            counts["refused"] += 1
            continue
        rows, lost = result
        counts += lost
        counts["too_long"] += not rows and lost["answers_out"] > 0
        counts["extra_rows"] += max(0, len(rows) - 1)
        found += [(number, row) for row in rows]
    counts["rows"] += len(found)
    counts["tokens"] += sum(len(row.input_ids) for _, row in found)
    counts["loss_tokens"] += sum(sum(row.loss_mask) for _, row in found)
    return counts, [
        {
            "input_ids": np.array(row.input_ids, dtype=np.int32),
            "loss_mask": np.array(row.loss_mask, dtype=np.int8),
            "length": len(row.input_ids),
            CONVERSATION: number,
        }
        for number, row in found
    ]


def _fingerprint(view: LedgerView, work: Work) -> str:
    """Hash all inputs of the dataset: conversations, tokenizer, template and settings."""
    tokenizer = work.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    template = str(tokenizer.chat_template)
    # The last part is that of answers which are too long, as in datasets of earlier versions.
    parts = [str(FORMAT_VERSION), view.fingerprint(), vocabulary, template, str(work.max_length_tokens), "cut"]
    return hashlib.sha256(b"".join(hashlib.sha256(part.encode()).digest() for part in parts)).hexdigest()


def recorded_report(tokens: Path) -> TokenReport | None:
    """Read the `TokenReport` that is stored with the token dataset in this folder; None if it cannot be read."""
    try:
        return read_json(tokens / REPORT_NAME, TokenReport, "")
    except UserError:
        return None


def save_rows(rows_file: Path, folder: Path) -> None:
    """Save the Arrow file as a dataset that `datasets.load_from_disk` maps into memory."""
    were_shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset.from_file(str(rows_file)).save_to_disk(str(folder))
    finally:
        if were_shown:  # else progress bars are disabled for another reason
            datasets.enable_progress_bars()


def load_tokens(run: RunFolder) -> datasets.Dataset:
    """Load a run's token dataset, which `draftsmith distill` wrote.

    Raises:
        UserError: The dataset is missing, damaged or empty.
    """
    folder = run.data / "tokens"
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: run `draftsmith distill` with the same arguments first")
    try:
        tokens = datasets.load_from_disk(str(folder))
        lists = {field.name for field in tokens.data.schema if str(field.type).startswith("list<")}
    except Exception as error:  # of any type: it depends on how the damage shows in datasets and Arrow
        raise UserError(
            f"{folder} cannot be read ({reason(error)}): delete it and run `draftsmith distill` again"
        ) from None
    missing = {"input_ids", "loss_mask"} - lists
    if missing or len(tokens) == 0:
        what = f"has no column {', '.join(sorted(missing))}" if missing else "is empty"
        raise UserError(f"{folder} {what}: delete it and run `draftsmith distill` again")
    return tokens


def tokens_hash(tokens: datasets.Dataset) -> str:
    """Return a SHA-256 (16 hex digits) of a token dataset: ids, masks, and which rows are of the same conversation."""
    digest = hashlib.sha256()
    begins = first_rows_of_conversations(tokens)
    if len(set(begins)) < len(begins):  # else the hash equals that of datasets without the column
        digest.update(np.array(begins, dtype=np.int64).tobytes())
    for name in ("input_ids", "loss_mask"):
        for chunk in tokens.data.column(name).chunks:
            digest.update(chunk.value_lengths().to_numpy(zero_copy_only=False).astype("int64").tobytes())
        for chunk in tokens.data.column(name).chunks:
            digest.update(chunk.flatten().to_numpy(zero_copy_only=False).astype("int64").tobytes())
    return digest.hexdigest()[:16]


def first_rows_of_conversations(tokens: datasets.Dataset) -> list[int]:
    """Return for each row the index of its conversation's first row; without a `conversation` column, its own index."""
    numbers = tokens[CONVERSATION] if CONVERSATION in tokens.column_names else range(len(tokens))
    first: dict[int, int] = {}
    return [first.setdefault(number, row) for row, number in enumerate(numbers)]


def row_lengths(tokens: datasets.Dataset) -> list[int]:
    """Return the number of tokens of each row, from Arrow's offsets alone."""
    column = (
        tokens.with_format("arrow")["input_ids"] if tokens._indices is not None else tokens.data.column("input_ids")
    )
    return np.concatenate([chunk.value_lengths().to_numpy() for chunk in column.chunks]).tolist()


def answer_lengths(tokens: datasets.Dataset) -> list[int]:
    """Return the number of tokens that carry loss, for each row; one batch is in memory at a time."""
    masks = tokens.select_columns("loss_mask").with_format("numpy").iter(1000)
    return [int(mask.sum()) for batch in masks for mask in batch["loss_mask"]]
