"""The Spec-Bench harness: every question with every method in one process, one after the other, in rotating order.

One record holds the answers of all methods to one question in one run, so that each speedup compares times of the same
process, minute and prompt. Records are appended atomically; a finished (run, question) is never measured again.

Answers are exported in the format that Spec-Bench's own scripts read (hemingkx/Spec-Bench, evaluation/eval.py).
"""

from __future__ import annotations

import json
import time
import uuid
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import Question
from draftsmith.data.tokens.chat_tokens import answer_end_ids, prompt_token_ids
from draftsmith.errors import UserError
from draftsmith.eval.bench.bandwidth import WeightReading
from draftsmith.eval.bench.measured_methods import Arm
from draftsmith.eval.bench.records import MethodResult, QuestionRecord, RecordLog, answer_settings, target_settings
from draftsmith.eval.decoding.generate import AnswerRecord
from draftsmith.eval.decoding.session import open_session
from draftsmith.eval.decoding.stop_strings import StopMatcher
from draftsmith.files import write_atomically
from draftsmith.models.target.loading import longest_sequence_tokens
from draftsmith.progress import progress_bar

WARMUP_NEW_TOKENS = 64
FEWEST_NEW_TOKENS = 16  # a turn that leaves less room than this is left out
PROCESS = uuid.uuid4().hex


class SpecBench:
    """Harness that answers questions with several methods and records their times and tokens.

    Args:
        questions: Questions that do not fit the target's context are left out and counted in `left_out`; the tasks
            without a question that fits are `tasks_left_out`.
        seed: Seed of all sampling; each (run, question, turn, method) has its own stream, see `request_seed`.
        stop: Strings that end an answer, see `StopMatcher`.
        compiles: Run the target through `torch.compile`, for all methods; None: if possible, see `open_session`.

    Raises:
        UserError: No question leaves room for an answer.
    """

    def __init__(
        self,
        target: Any,
        tokenizer: Any,
        questions: list[Question],
        max_new_tokens: int,
        seed: int = 0,
        stop: Sequence[str] = (),
        compiles: bool | None = False,
    ) -> None:
        self.target, self.tokenizer = target, tokenizer
        self._max_new_tokens, self._seed = max_new_tokens, seed
        self._end_ids = frozenset(answer_end_ids(target.generation_config, tokenizer))
        self._stop = stop
        self._target_settings = target_settings(target)
        self._reading = WeightReading(target)
        limit = longest_sequence_tokens(target)
        # The first turn must leave room for an answer long enough to measure.
        fewest = min(max_new_tokens, FEWEST_NEW_TOKENS)
        self.questions = [
            question
            for question in questions
            if limit is None or len(first_turn_ids(tokenizer, question)) + fewest <= limit
        ]
        self.left_out = len(questions) - len(self.questions)
        measured = {question.task_name for question in self.questions}
        self.tasks_left_out = sorted({question.task_name for question in questions} - measured)
        if not self.questions:
            raise UserError(
                f"none of the {len(questions)} questions leaves room for an answer in the target's {limit} positions: "
                "use shorter questions in eval.questions"
            )
        length = session_length_tokens(tokenizer, self.questions, max_new_tokens, limit)
        self.session = open_session(target, length, compiles)

    def run(self, methods: list[Arm], log: RecordLog, runs: int, warmup_questions: int) -> None:
        """Measure every (run, question) that has no record in the log yet.

        Args:
            methods: The methods to measure, with the autoregressive baseline of each temperature.
            warmup_questions: Questions that are answered without recording first.
        """
        finished = {(record.run, record.question_id) for record in log}
        missing = [
            (run, index, question)
            for run in range(runs)
            for index, question in enumerate(self.questions)
            if (run, question.question_id) not in finished
        ]
        if not missing:
            return
        for measured in methods:  # so that the compiled target returns the feature layers of all methods
            self.session.read_layers(measured.feature_layers)
        # Compiling itself must not be measured.
        is_compiled = self.session.forward.compiler is not None
        for question in self.questions[: max(warmup_questions, int(is_compiled))]:
            for measured in methods:
                self.answer(measured, question, most_new_tokens=WARMUP_NEW_TOKENS)
        if is_compiled:
            self.session.forward.keep_sizes()
        total = runs * len(self.questions)
        with progress_bar(total, "measure", "question", initial=total - len(missing)) as progress:
            for run, index, question in missing:
                log.append(self._record(methods, run, index, question))
                progress.update()

    def _record(self, methods: list[Arm], run: int, index: int, question: Question) -> QuestionRecord:
        """Measure all methods on one question, in rotating order, so that no method always has warm caches."""
        shift = (run + index) % len(methods)
        answers = {measured.key: self.answer(measured, question, run) for measured in methods[shift:] + methods[:shift]}
        in_order = {measured.key: answers[measured.key] for measured in methods}
        read_s = self._reading.seconds()  # right after the answers, under the same load
        return QuestionRecord(
            run,
            question.question_id,
            question.category,
            time.time(),
            in_order,
            self._reading.bytes,
            read_s,
            question.task_name,
        )

    def answer(
        self,
        measured: Arm,
        question: Question,
        run: int = 0,
        most_new_tokens: int | None = None,
    ) -> MethodResult:
        """Answer all turns of a question with one method, with its own answers as history.

        Args:
            run: Number of the run, which changes the seed of sampling.
            most_new_tokens: Most tokens of an answer to a turn, if fewer than the bench's `max_new_tokens`.
        """
        max_new_tokens = min(self._max_new_tokens, most_new_tokens or self._max_new_tokens)
        turns: list[AnswerRecord] = []
        for number in range(len(question.turns)):
            measured.generator.manual_seed(request_seed(self._seed, run, question.question_id, number, measured.key))
            prompt_ids = self.prompt_ids(question.turns, [str(turn.text) for turn in turns])
            if number == 0:
                settings = answer_settings(
                    self._target_settings, prompt_ids, question.turns, measured.sampling, max_new_tokens
                )
            room = self.session.max_length_tokens - len(prompt_ids)
            if room < min(max_new_tokens, FEWEST_NEW_TOKENS):
                break
            new_tokens = min(max_new_tokens, room)
            stop = StopMatcher(self._stop, self.tokenizer) if self._stop else None
            answer = measured.answer(self.session, prompt_ids, new_tokens, self._end_ids, stop)
            if answer.text is None:
                answer.text = self.tokenizer.decode(answer.ids, skip_special_tokens=True)
            answer.text = answer.text.strip()
            turns.append(answer)
        return MethodResult(
            method=measured.method.name,
            temperature=measured.sampling.temperature,
            lenience=measured.lenience,
            process=PROCESS,
            settings=settings,
            turns=turns,
            turns_left_out=len(question.turns) - len(turns),
        )

    def prompt_ids(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        """Tokenise the prompt of the turn after these answers, with all earlier turns and answers as history."""
        history: list[Turn] = []
        for text, answer in zip(turns, answers, strict=False):
            history += [Turn("user", text), Turn("assistant", answer)]
        return prompt_token_ids(self.tokenizer, [*history, Turn("user", turns[len(answers)])])


def request_seed(seed: int, run: int, question_id: int | str, turn: int, method_key: str) -> int:
    """Return the seed of one answer's generator, so that its samples do not depend on earlier measurements."""
    return zlib.crc32(f"{seed}/{run}/{question_id}/{turn}/{method_key}".encode())


def first_turn_ids(tokenizer: Any, question: Question) -> list[int]:
    return prompt_token_ids(tokenizer, [Turn("user", question.turns[0])])


def first_turn_prompts(
    target: Any, tokenizer: Any, questions: list[Question], count: int, max_new_tokens: int
) -> list[tuple[int | str, list[int]]]:
    """Return (question id, prompt ids) of the first turn of `count` questions, spread over those that fit the target.

    Raises:
        UserError: No question leaves room for `max_new_tokens` tokens.
    """
    limit = longest_sequence_tokens(target)
    tokenised = ((question.question_id, first_turn_ids(tokenizer, question)) for question in questions)
    fitting = [(name, ids) for name, ids in tokenised if limit is None or len(ids) + max_new_tokens <= limit]
    if not fitting:
        raise UserError(
            f"none of {len(questions)} questions leaves room for {max_new_tokens} tokens in the target's {limit} "
            "positions: use shorter questions in eval.questions, or fewer new tokens"
        )
    return fitting[:: max(1, len(fitting) // count)][:count]


def session_length_tokens(tokenizer: Any, questions: list[Question], max_new_tokens: int, limit: int | None) -> int:
    """Return the most tokens that a question's turns and answers together can have, `limit` at most.

    One eighth is added to every answer, as its text may have more tokens when it is tokenised again.
    """
    longest = 0
    for question in questions:
        turns = [Turn("user", question.turns[0])]
        for text in question.turns[1:]:
            turns += [Turn("assistant", "."), Turn("user", text)]
        answers = len(question.turns) * (max_new_tokens + max_new_tokens // 8 + 1)
        longest = max(longest, len(prompt_token_ids(tokenizer, turns)) + answers)
    return longest if limit is None else min(longest, limit)


def write_answers(records: Iterable[QuestionRecord], folder: Path, run_name: str) -> None:
    """Write answer files in Spec-Bench's format, one per method, temperature and run."""
    lines: dict[str, list[str]] = {}
    for record in records:
        for answer in record.answers.values():
            model_id = f"{run_name}-{answer.method}-temp-{answer.temperature:g}-run-{record.run + 1}"
            choice = {
                "index": 0,
                "turns": [turn.text for turn in answer.turns],
                "decoding_steps": [turn.rounds for turn in answer.turns],
                "new_tokens": [len(turn.ids) for turn in answer.turns],
                "wall_time": [turn.wall_time_s for turn in answer.turns],
                "accept_lengths": [length for turn in answer.turns for length in turn.accept_lengths],
            }
            line = {
                "question_id": record.question_id,
                "category": record.category,
                "answer_id": uuid.uuid5(uuid.NAMESPACE_URL, f"{model_id}/{record.question_id}").hex,
                "model_id": model_id,
                "choices": [choice],
                "tstamp": record.tstamp,
            }
            lines.setdefault(model_id, []).append(json.dumps(line, ensure_ascii=False) + "\n")
    for model_id, rows in lines.items():
        write_atomically(folder / f"{model_id}.jsonl", "".join(rows))
