"""Records of a measurement, as `records.jsonl` stores them, and the check that their times may be compared.

A line holds the answers of all methods to one question in one run. Times are compared within one process, on the same
target, dtype, prompts, sampling and token limit. Every answer stores these settings as they were when it was generated,
so that no later edit of a recipe, a target or a record can make two different ones look equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from pydantic import TypeAdapter
from pydantic_core import from_json
from torch import nn

from draftsmith.data.sources.questions import task_of
from draftsmith.errors import UserError
from draftsmith.eval.decoding.generate import AnswerRecord
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.files import append_whole
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.section import MethodName

# Keys of `MethodResult.settings`, and their names in messages.
SETTINGS = {
    "target": "target weights",
    "dtype": "dtype",
    "prompts": "prompts",
    "sampling": "sampling",
    "max_new_tokens": "token limit",
}
MEASURE_AGAIN = "delete that line from records.jsonl and run `draftsmith eval` again"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class MethodResult:
    """Answers of one method to all turns of one question at one temperature.

    lenience: below 1 the method is not lossless. process: random id of the measuring process: only times of one process
    are compared. settings: what the answers depend on, see `answer_settings`. turns_left_out: number of later turns
    that left no room for an answer.
    """

    method: MethodName  # part of the name of a file of answers
    temperature: float
    lenience: float
    process: str
    settings: dict[str, Any]
    turns: list[AnswerRecord]
    turns_left_out: int

    @property
    def lossless(self) -> bool:
        return self.lenience == 1

    @property
    def ids(self) -> list[list[int]]:
        """Return the token ids of each turn's answer."""
        return [turn.ids for turn in self.turns]


@dataclass(slots=True)
class QuestionRecord:
    """Answers of all methods to one question in one run.

    answers: by `method@temperature`. weights_bytes: bytes of weights that a step of the target reads. weights_read_s:
    seconds of a plain read of as many bytes. task: the question's task; None: Spec-Bench's task of its category.
    """

    run: int
    question_id: int | str
    category: str
    tstamp: float
    answers: dict[str, MethodResult]
    weights_bytes: int | None = None
    weights_read_s: float | None = None
    task: str | None = None

    @property
    def task_name(self) -> str:
        """Return the task of the question: `task`, or Spec-Bench's task of its category."""
        return task_of(self.category) if self.task is None else self.task

    @property
    def where(self) -> str:
        return f"run {self.run} of question {self.question_id}"

    def with_baseline(self, key: str) -> tuple[MethodResult, MethodResult]:
        """Return the answers of `method@temperature` and those of the baseline at the same temperature."""
        answer = self.answers[key]
        return answer, self.answers[f"{AUTOREGRESSIVE}@{answer.temperature:g}"]

    @staticmethod
    def from_json(values: dict[str, Any]) -> QuestionRecord:
        """Check the values of a line of `records.jsonl`, and build a record from them.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: The line is no record.
        """
        record: QuestionRecord = _FORM.validate_python(values)
        for key, answer in record.answers.items():
            is_key = key == f"{answer.method}@{answer.temperature:g}"
            if not (answer.turns and is_key and SETTINGS.keys() <= answer.settings.keys()):
                raise ValueError(key)
            for each in answer.turns:
                per_round: list[Sized] = [each.draft_lengths, each.draft_depths, each.round_s]
                if any(len(part) != each.rounds for part in per_round) or each.wall_time_s <= 0:
                    raise ValueError(key)
        return record


_FORM = TypeAdapter(QuestionRecord)


class RecordLog:
    """The append-only file of records, which survives Ctrl-C, a killed process and a full disk.

    A record is one line of the file. Opening the file removes a line that was not written completely. A lock
    keeps a reader, such as `report`, from removing a line that is being written.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(f"{file}.lock")
        if file.exists():
            with self._lock, file.open("rb+") as stream:  # drop an incomplete last line, left by an interrupted append
                stream.truncate(stream.read().rfind(b"\n") + 1)

    def append(self, record: QuestionRecord) -> None:
        """Append a record and wait until it is on disk."""
        with self._lock:
            append_whole(self.file, json.dumps(asdict(record), ensure_ascii=False).encode() + b"\n")

    def __iter__(self) -> Iterator[QuestionRecord]:
        """Read the records one by one.

        Raises:
            UserError: A line is damaged, or was written by a version that recorded fewer fields.
        """
        if not self.file.exists():
            return
        with self.file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):  # another process is writing it
                    return
                try:
                    record = QuestionRecord.from_json(from_json(line, allow_inf_nan=False))
                except (ValueError, TypeError, KeyError, AttributeError):
                    raise UserError(
                        f"{self.file} line {number} is damaged: delete that line (its question will be measured "
                        "again) or the whole folder"
                    ) from None
                yield record


def answer_settings(
    target: dict[str, str], prompt_ids: list[int], turns: tuple[str, ...], sampling: Sampling, max_new_tokens: int
) -> dict[str, Any]:
    """Return the settings that an answer depends on.

    Args:
        target: `target_settings` of the measured model.
        prompt_ids: Token ids of the first turn's prompt. Later prompts depend on the method's own answers, so that only
            the texts of their turns are compared.
        turns: All turns of the question.
    """
    prompts = json.dumps([prompt_ids, turns[1:]]).encode()
    return {
        **target,
        "prompts": hashlib.sha256(prompts).hexdigest()[:16],
        "sampling": {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p},
        "max_new_tokens": max_new_tokens,
    }


def target_settings(target: Any) -> dict[str, str]:
    """Return the settings of an answer that depend on the target alone: a hash of its weights, and its dtype."""
    return {"target": weights_fingerprint(target), "dtype": str(target.dtype).removeprefix("torch.")}


@torch.no_grad()
def weights_fingerprint(model: nn.Module) -> str:
    """Hash the names, shapes and bits of all parameters, to identify a model by its weights and not by its name.

    SHA-256 over integer sums of the bits of each row, which are fast and equal on every device.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        bits = weight.detach().contiguous().view(_INTEGERS[weight.element_size()])
        sums = bits.sum(-1, dtype=torch.int64) if bits.dim() else bits.to(torch.int64)
        digest.update(sums.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def check_fair_clock(records: list[QuestionRecord]) -> None:
    """Check that every speedup compares answers with equal settings, measured in one process.

    Raises:
        UserError: A record is not comparable; the message names it and the difference.
    """
    if not records:
        raise UserError("nothing has been measured yet: run `draftsmith eval` with this recipe first")
    for record in records:
        answers, where = record.answers.values(), record.where
        if len({answer.process for answer in answers}) > 1:
            raise UserError(f"{where} mixes times of several processes, which cannot be compared: {MEASURE_AGAIN}")
        baselines = {answer.temperature: answer for answer in answers if answer.method == AUTOREGRESSIVE}
        for answer in answers:
            if answer.temperature not in baselines:
                raise UserError(f"{where} lacks its autoregressive baseline: {MEASURE_AGAIN}")
            for setting, word in SETTINGS.items():
                value, baseline_value = answer.settings[setting], baselines[answer.temperature].settings[setting]
                if value != baseline_value:
                    raise UserError(
                        f"{where}: {answer.method} was measured with other {word} than its autoregressive baseline "
                        f"({value} against {baseline_value}), so there is no valid speedup: {MEASURE_AGAIN}"
                    )
        if record.answers.keys() != records[0].answers.keys():
            raise UserError(f"{where} has other methods than the first record: {MEASURE_AGAIN}")
        for key, answer in record.answers.items():
            first_settings = records[0].answers[key].settings
            for setting, word in SETTINGS.items():
                # Each question has its own prompts.
                if setting != "prompts" and answer.settings[setting] != first_settings[setting]:
                    raise UserError(
                        f"{where} was measured with another {word} than the first record: delete the run's folder "
                        "`eval` to measure again"
                    )
