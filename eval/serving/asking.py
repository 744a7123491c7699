"""Every question to an engine, so many conversations at once: a turn follows its previous answer at once.

Prompts and histories are made as in `eval/bench/spec_bench.py`, so that the same answers give the same prompts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from draftsmith.data.engines.engine import Completion, Failure, GenerationSettings, Outcome, Request
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import Question
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.eval.bench.spec_bench import FEWEST_NEW_TOKENS, request_seed
from draftsmith.eval.serving.counts import DraftCounts
from draftsmith.recipes.progress import progress_bar


@dataclass(frozen=True)
class TimedCompletion(Completion):
    """`first_token_s`: from the request to its first token; `rest_s`: from that to the last one."""

    first_token_s: float = 0.0
    rest_s: float = 0.0


class MeasuredEngine(Protocol):
    """An `Engine` whose answers are timed (`TimedCompletion`, with ids), and which counts its drafts."""

    max_length_tokens: int | None

    def submit(self, request: Request) -> None: ...

    def collect(self) -> list[tuple[str, Outcome]]: ...

    def close(self) -> None: ...

    def counts(self, generated_tokens: int = 0) -> DraftCounts:
        """What was counted so far, once as many generated tokens were."""
        ...

    def forget_prompts(self) -> None:
        """Empty the cache of prompts, where that is possible."""


@dataclass(frozen=True)
class Asking:
    """What answers depend on. settings: of every turn; seed: of all sampling."""

    tokenizer: Any
    settings: GenerationSettings
    seed: int


@dataclass(frozen=True)
class ServedAnswer:
    """One turn's."""

    question_id: int | str
    turn: int
    prompt_ids: list[int]
    ids: list[int]
    first_token_s: float
    rest_s: float


@dataclass
class Asked:
    """What came of all questions.

    failures: by their reason; by_question: what was counted of each, where they were asked one at a time.
    """

    answers: list[ServedAnswer] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    turns_left_out: int = 0
    wall_time_s: float = 0.0
    counts: DraftCounts = field(default_factory=DraftCounts)
    by_question: list[DraftCounts] = field(default_factory=list)


@dataclass
class _Conversation:
    question: Question
    history: list[Turn] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)

    @property
    def turn(self) -> int:
        return len(self.history) // 2


def ask(engine: MeasuredEngine, questions: list[Question], asking: Asking, concurrency: int, label: str = "") -> Asked:
    """Ask them all and wait for the last answer.

    Raises:
        UserError: The engine cannot go on.
    """
    asked = Asked()
    waiting: Iterator[_Conversation] = (_Conversation(question) for question in questions)
    in_flight: dict[str, _Conversation] = {}
    before = latest = engine.counts()
    generated = before.generated_tokens
    started = time.perf_counter()
    with progress_bar(len(questions), label, "question", shown=bool(label)) as progress:
        while True:
            while len(in_flight) < concurrency and (conversation := next(waiting, None)) is not None:
                if not _submit_turn(engine, conversation, asking, asked, in_flight):
                    progress.update()
            if not in_flight:
                break
            for key, outcome in engine.collect():
                conversation = in_flight.pop(key)
                if isinstance(outcome, Failure):
                    asked.failures[outcome.reason] += 1
                else:
                    generated += len(_add_answer(asked, conversation, outcome, asking.tokenizer))
                    if _submit_turn(engine, conversation, asking, asked, in_flight):
                        continue
                progress.update()
                if concurrency == 1:
                    asked.wall_time_s += time.perf_counter() - started
                    now = engine.counts(generated)
                    asked.by_question.append(now - latest)
                    latest, started = now, time.perf_counter()
    asked.wall_time_s += time.perf_counter() - started
    asked.counts = engine.counts(generated) - before
    return asked


def _submit_turn(
    engine: MeasuredEngine, conversation: _Conversation, asking: Asking, asked: Asked, in_flight: dict[str, Any]
) -> bool:
    """The next turn, if there is one and room for it."""
    question, number = conversation.question, conversation.turn
    if number == len(question.turns):
        return False
    conversation.history.append(Turn("user", question.turns[number]))
    conversation.prompt_ids = prompt_token_ids(asking.tokenizer, conversation.history)
    settings = asking.settings
    if engine.max_length_tokens is not None:
        room = engine.max_length_tokens - len(conversation.prompt_ids)
        if room < min(settings.max_new_tokens, FEWEST_NEW_TOKENS):
            asked.turns_left_out += len(question.turns) - number
            return False
        settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, room))
    key = f"{question.question_id}/{number}"
    messages = [{"role": turn.role, "content": turn.content} for turn in conversation.history]
    seed = request_seed(asking.seed, 0, question.question_id, number, f"engine@{settings.temperature:g}")
    in_flight[key] = conversation
    engine.submit(Request(key, conversation.prompt_ids, messages, settings, seed))
    return True


def _add_answer(asked: Asked, conversation: _Conversation, outcome: Completion, tokenizer: Any) -> list[int]:
    assert isinstance(outcome, TimedCompletion)
    assert outcome.token_ids is not None
    ids, question_id = outcome.token_ids, conversation.question.question_id
    asked.answers.append(
        ServedAnswer(
            question_id, conversation.turn, conversation.prompt_ids, ids, outcome.first_token_s, outcome.rest_s
        )
    )
    text = tokenizer.decode(ids, skip_special_tokens=True).strip()
    conversation.history.append(Turn("assistant", text))
    return ids
