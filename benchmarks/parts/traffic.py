"""Traffic for a server's worker: conversations of files, asked one after the other, and ratios of what came of them."""

import queue
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.files import InvalidConversation, open_records
from draftsmith.data.sources.record_reader import parse_conversation
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.eval.serving.worker import CompletedAnswer, Job, Worker
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import SourceRecipe

RESAMPLES = 1000
MOST_TURNS = 6


def conversations(spec: str) -> Iterator[list[str]]:
    """Yield the user turns of COUNT conversations of a file after the first SKIPPED, given as FILE:COUNT[:SKIPPED]."""
    file, count, skipped = [*spec.split(":"), "0"][:3]
    for where, record in islice(
        open_records(SourceRecipe(source=file), "all"), int(skipped), int(skipped) + int(count)
    ):
        with suppress(InvalidConversation):
            turns = parse_conversation(record, where).turns
            yield [turn.content for turn in turns if turn.role == "user"][:MOST_TURNS]


def traffic_name(spec: str) -> str:
    return Path(spec.split(":")[0]).name


class Traffic:
    """A client that sends conversations to the server's worker at a given load."""

    def __init__(self, worker: Worker, new_tokens: int, load: float) -> None:
        self._worker, self._new_tokens, self._load = worker, new_tokens, load

    def ask(self, questions: list[str]) -> Iterator[tuple[CompletedAnswer, float]]:
        """Yield each answer of a conversation, and its duration in seconds."""
        turns: list[Turn] = []
        for question in questions:
            turns.append(Turn("user", question))
            ids = prompt_token_ids(self._worker.tokenizer, turns)
            if len(ids) + self._new_tokens > self._worker.length:
                return
            out: queue.SimpleQueue[Any] = queue.SimpleQueue()
            begin_s = time.perf_counter()
            self._worker.submit(Job(ids, self._new_tokens, Sampling(), 0, (), out.put))
            while not isinstance(end := out.get(), CompletedAnswer):
                if isinstance(end, BaseException):
                    raise end
            seconds = time.perf_counter() - begin_s
            yield end, seconds
            time.sleep(seconds * (1 / self._load - 1))
            text = self._worker.tokenizer.decode(end.record.ids, skip_special_tokens=True)
            turns.append(Turn("assistant", text or "."))


def interval(tokens: np.ndarray, before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """Return tau after / tau before, with the interval of 90 % of the resamplings of the answers."""
    drawn = np.random.default_rng(0).integers(len(tokens), size=(RESAMPLES, len(tokens)))
    ratios = before[drawn].sum(axis=1) / after[drawn].sum(axis=1)
    low, high = np.quantile(ratios, [0.05, 0.95])
    return {
        "ratio": float(before.sum() / after.sum()),
        "low": float(low),
        "high": float(high),
        "of_answers": len(tokens),
    }
