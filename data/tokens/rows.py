"""Conversations to rows of token ids with their loss masks, by several processes, in bounded memory and in order.

The conversations are read once, a chunk at a time; so many chunks are at work that no process waits, and no more. Rows
come back in the order of the conversations, whatever the number of processes, and go straight to an Arrow file.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.arrow_writer import ArrowWriter

from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.tokens.answer_spans import TemplateProblem
from draftsmith.data.tokens.chat_tokens import (
    AnswerIds,
    TokenizedConversation,
    tokenize_conversation,
    tokenize_shortened,
    up_to_turn,
)
from draftsmith.recipes.progress import Progress

Answered = tuple[Conversation, AnswerIds | None]
FEATURES = datasets.Features(
    input_ids=datasets.Sequence(datasets.Value("int32")),
    loss_mask=datasets.Sequence(datasets.Value("int8")),
    length=datasets.Value("int32"),
)
CHUNK_CONVERSATIONS = 128
CHUNKS_PER_PROCESS = 3  # at work or waiting: one is always ready
ROWS_IN_A_BATCH = 1000


@dataclass
class TokenCounts:
    """What became of conversations when they were tokenised.

    shortened: conversations that lost trailing turns to the length; too_long: that did not fit at all.
    answers_cut: first answers that were cut at the length, beyond which nothing of them is left.
    extra_rows: of answers that the rows they belong to do not hold.
    """

    conversations: int = 0
    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    shortened: int = 0
    too_long: int = 0
    refused: int = 0
    answers_cut: int = 0
    extra_rows: int = 0

    def add(self, other: "TokenCounts") -> None:
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))


@dataclass
class _Chunk:
    """Rows of a chunk of conversations."""

    counts: TokenCounts = field(default_factory=TokenCounts)
    ids: list[np.ndarray[Any, Any]] = field(default_factory=list)
    masks: list[np.ndarray[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _ChunkTokenizer:
    """What every chunk is tokenised with, in every process."""

    tokenizer: Any
    max_length_tokens: int
    cut_answers: bool

    def tokenize(self, conversations: list[Answered]) -> _Chunk:
        chunk = _Chunk()
        for conversation, answer_ids in conversations:
            chunk.counts.conversations += 1
            try:
                rows, shortened = tokenize_rows(self.tokenizer, conversation, self.max_length_tokens, answer_ids)
            except TemplateProblem:
                chunk.counts.refused += 1
                continue
            if not rows and self.cut_answers:
                rows = cut_first_answer(self.tokenizer, conversation, self.max_length_tokens, answer_ids)
                chunk.counts.answers_cut += len(rows)
            chunk.counts.too_long += not rows
            chunk.counts.shortened += shortened
            chunk.counts.extra_rows += max(0, len(rows) - 1)
            for row in rows:
                chunk.counts.rows += 1
                chunk.counts.tokens += len(row.input_ids)
                chunk.counts.loss_tokens += sum(row.loss_mask)
                chunk.ids.append(np.array(row.input_ids, dtype=np.int32))
                chunk.masks.append(np.array(row.loss_mask, dtype=np.int8))
        return chunk


def tokenize_rows(
    tokenizer: Any, conversation: Conversation, max_length_tokens: int, answer_ids: AnswerIds | None = None
) -> tuple[list[TokenizedConversation], bool]:
    """The rows of one conversation, and whether it was shortened; none if it does not fit at all.

    One row, unless the template rewrites answers whose ids are known: each of these then has a further row, which ends
    with it and in which it alone carries loss. So every answer is learned behind exactly what the target read.
    """
    result = tokenize_shortened(tokenizer, conversation, max_length_tokens, answer_ids)
    if result is None:
        return [], False
    whole, dropped = result
    rows = [whole]
    for turn in whole.unsaid_turns:
        row = tokenize_conversation(tokenizer, *up_to_turn(conversation, turn + 1, answer_ids))
        if len(row.input_ids) <= max_length_tokens:  # thoughts may make it longer than the whole
            rows.append(row.with_last_answer_only())
    return rows, dropped > 0


def cut_first_answer(
    tokenizer: Any, conversation: Conversation, max_length_tokens: int, answer_ids: AnswerIds | None
) -> list[TokenizedConversation]:
    """The first exchange to the length, if that lies in its answer and the answer's ids are known: one row or none."""
    if not answer_ids or answer_ids[0] is None:
        return []
    end = next(number for number, turn in enumerate(conversation.turns, start=1) if turn.role == "assistant")
    cut = tokenize_conversation(tokenizer, *up_to_turn(conversation, end, answer_ids)).cut_to(max_length_tokens)
    return [cut] if any(cut.loss_mask) else []


def write_token_rows(
    conversations: Iterable[Answered],
    tokenizer: Any,
    max_length_tokens: int,
    file: Path,
    processes: int,
    bar: Progress,
    cut_answers: bool = False,
) -> TokenCounts:
    """Tokenise to an Arrow file, with the columns of `FEATURES`.

    Args:
        conversations: Read once, in the order of the rows; for each the ids of its answers where they are known.
        tokenizer: The target's.
        max_length_tokens: Longer conversations are shortened, by whole turns.
        file: Is written anew.
        processes: With 1 all is done in this one.
        bar: Of conversations.
        cut_answers: Keep of a first exchange that is too long what fits, if it ends in the answer.

    Raises:
        UserError: As `tokenize_conversation`, but for a conversation that the template does not take: that is counted.
    """
    counts, waiting = TokenCounts(), _Chunk()
    work = _ChunkTokenizer(tokenizer, max_length_tokens, cut_answers)
    with ArrowWriter(path=str(file), features=FEATURES) as writer:
        for chunk in _tokenized_chunks(iter(conversations), work, processes):
            counts.add(chunk.counts)
            bar.update(chunk.counts.conversations)
            waiting.ids += chunk.ids
            waiting.masks += chunk.masks
            if len(waiting.ids) >= ROWS_IN_A_BATCH:
                _write(writer, waiting)
                waiting = _Chunk()
        if waiting.ids:
            _write(writer, waiting)
        writer.finalize()
    return counts


def _write(writer: ArrowWriter, chunk: _Chunk) -> None:
    lengths = [len(ids) for ids in chunk.ids]
    writer.write_batch({"input_ids": chunk.ids, "loss_mask": chunk.masks, "length": lengths})


def _tokenized_chunks(conversations: Iterator[Answered], work: _ChunkTokenizer, processes: int) -> Iterator[_Chunk]:
    chunks = iter(lambda: list(islice(conversations, CHUNK_CONVERSATIONS)), [])
    # Chunks for every process, or none: processes take seconds to start, which few conversations do not repay.
    ahead = list(islice(chunks, processes * CHUNKS_PER_PROCESS))
    if processes == 1 or len(ahead) < processes * CHUNKS_PER_PROCESS:
        yield from map(work.tokenize, ahead)
        yield from map(work.tokenize, chunks)
        return
    # Spawned, not forked: this process may hold threads and a GPU.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (work,))
    try:
        at_work: deque[Future[_Chunk]] = deque(pool.submit(_tokenize, chunk) for chunk in ahead)
        del ahead
        while at_work:
            yield at_work.popleft().result()
            at_work.extend(pool.submit(_tokenize, chunk) for chunk in islice(chunks, 1))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_of_this_process: list[_ChunkTokenizer] = []


def _begin(work: _ChunkTokenizer) -> None:
    """In a worker process, once."""
    _of_this_process[:] = [work]


def _tokenize(chunk: list[Answered]) -> _Chunk:
    return _of_this_process[0].tokenize(chunk)
