"""What is measured, as `records.jsonl` stores it, and the check that its times may be compared.

A line holds what all methods did with one question in one run. Times are compared within one process, on the same
target, dtype, prompts, sampling and token limit. Every answer carries these settings as they were when it was made, so
that no later edit of a recipe, a target or a record can make two of them look alike.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sized
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from pydantic import TypeAdapter
from pydantic_core import from_json
from torch import nn

from draftsmith.data.sources.questions import task_of
from draftsmith.eval.decoding.loop import AnswerRecord
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.trees.verify import Sampling
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MethodName

# Keys of `MethodRecord.settings`, and how an error calls them.
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
class MethodRecord:
    """What one method did with one question at one temperature.

    lenience: below 1 it is not lossless; process: that measured it, as only times of one are compared; sequential: see
    `Method`; settings: what the answers were made with, see `answer_settings`; turns_left_out: later ones without room.
    """

    method: MethodName  # a file of answers is called by it
    temperature: float
    lenience: float
    process: str
    sequential: bool
    settings: dict[str, Any]
    turns: list[AnswerRecord]
    turns_left_out: int

    @property
    def lossless(self) -> bool:
        return self.lenience == 1

    @property
    def ids(self) -> list[list[int]]:
        """The token ids of each turn."""
        return [turn.ids for turn in self.turns]


@dataclass(slots=True)
class QuestionRecord:
    """What all methods did with one question in one run.

    answers: by `method@temperature`; weights_bytes, weights_read_s: see `WeightReading`; task: what the question counts
    under. The last three are None of earlier versions, whose tasks were Spec-Bench's in every file.
    """

    run: int
    question_id: int | str
    category: str
    tstamp: float
    answers: dict[str, MethodRecord]
    weights_bytes: int | None = None
    weights_read_s: float | None = None
    task: str | None = None

    @property
    def task_name(self) -> str:
        """The task that the question counts under."""
        return task_of(self.category) if self.task is None else self.task

    @property
    def where(self) -> str:
        return f"run {self.run} of question {self.question_id}"

    def beside_baseline(self, key: str) -> tuple[MethodRecord, MethodRecord]:
        """The answers of `method@temperature` and those of the baseline at the same temperature."""
        answer = self.answers[key]
        return answer, self.answers[f"{AUTOREGRESSIVE}@{answer.temperature:g}"]

    @staticmethod
    def from_json(values: dict[str, Any]) -> QuestionRecord:
        """Check and build a record from a line of the file.

        Raises:
            UserError: An earlier version of draftsmith measured less than this one needs.
            ValueError, TypeError, KeyError, AttributeError: These are no records.
        """
        missing: set[str] = set()
        for answer in values["answers"].values():
            missing |= _OF_METHODS - answer.keys()
            for turn in answer.get("turns", []):
                missing |= _OF_TURNS - set(turn)
        if missing:
            raise UserError(
                f"run {values['run']} of question {values['question_id']} in records.jsonl was measured by an earlier "
                f"version of draftsmith (no {', '.join(sorted(missing))}): delete the eval folder and run `draftsmith "
                "eval` again"
            )
        record: QuestionRecord = _FORM.validate_python(values)
        for key, found in record.answers.items():
            is_key = key == f"{found.method}@{found.temperature:g}"
            if not (found.turns and is_key and SETTINGS.keys() <= found.settings.keys()):
                raise ValueError(key)
            for each in found.turns:
                per_round: list[Sized] = [each.draft_lengths, each.draft_depths, each.round_s]
                if any(len(part) != each.rounds for part in per_round) or each.wall_time_s <= 0:
                    raise ValueError(key)
        return record


_FORM = TypeAdapter(QuestionRecord)
_OF_METHODS = {each.name for each in fields(MethodRecord)}
# Earlier versions did not measure the others, without which a report can do.
_OF_TURNS = {each.name for each in fields(AnswerRecord)} - {"outside_tokens", "ended_outside", "phases_s"}


class RecordLog:
    """The append-only file of records, which survives Ctrl-C, a killed process and a full disk.

    A record is in the file whole, on a line of its own, or not at all once the file is opened again. Several processes
    may append, one after the other.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(f"{file}.lock")
        if file.exists():
            with self._lock, file.open("rb+") as stream:  # drop what an interrupted append wrote after the last newline
                stream.truncate(stream.read().rfind(b"\n") + 1)

    def append(self, record: QuestionRecord) -> None:
        """Write a record and wait until it is on disk."""
        with self._lock, self.file.open("ab") as stream:
            stream.write((json.dumps(asdict(record), ensure_ascii=False) + "\n").encode("utf-8"))
            stream.flush()
            os.fsync(stream.fileno())

    def __iter__(self) -> Iterator[QuestionRecord]:
        """Read the records one by one.

        Raises:
            UserError: A line is damaged, or was written by a version that measured less.
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
                        f"{self.file} line {number} is no record, so the file was damaged: delete that line (it will "
                        "be measured again) or the whole folder"
                    ) from None
                yield record


def answer_settings(
    of_target: dict[str, str], prompt_ids: list[int], turns: tuple[str, ...], sampling: Sampling, max_new_tokens: int
) -> dict[str, Any]:
    """What an answer was made with.

    Args:
        of_target: `target_settings` of the model that is measured.
        prompt_ids: Of the first turn. The later ones follow each method's own answers: they count as asked.
        turns: The question's, as asked.
    """
    prompts = json.dumps([prompt_ids, turns[1:]]).encode()
    return {
        **of_target,
        "prompts": hashlib.sha256(prompts).hexdigest()[:16],
        "sampling": {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p},
        "max_new_tokens": max_new_tokens,
    }


def target_settings(target: Any) -> dict[str, str]:
    """The settings that depend on the target alone."""
    return {"target": weights_fingerprint(target), "dtype": str(target.dtype).removeprefix("torch.")}


@torch.no_grad()
def weights_fingerprint(model: nn.Module) -> str:
    """Tell a model by its weights, not by its name: a hash of names, shapes and bits of all parameters.

    SHA-256 over integer sums of the bits, row by row, which every device adds up alike in a moment.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        bits = weight.detach().contiguous().view(_INTEGERS[weight.element_size()])
        sums = bits.sum(-1, dtype=torch.int64) if bits.dim() else bits.to(torch.int64)
        digest.update(sums.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def check_fair_clock(records: list[QuestionRecord]) -> None:
    """Check that every speedup compares like with like, in one process.

    Raises:
        UserError: Names the record and what differs.
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
                found, wanted = answer.settings[setting], baselines[answer.temperature].settings[setting]
                if found != wanted:
                    raise UserError(
                        f"{where}: {answer.method} was measured with other {word} than its autoregressive baseline "
                        f"({found} against {wanted}), so no speedup can be told: {MEASURE_AGAIN}"
                    )
        if record.answers.keys() != records[0].answers.keys():
            raise UserError(f"{where} has other methods than the first record: {MEASURE_AGAIN}")
        for key, answer in record.answers.items():
            of_first = records[0].answers[key].settings
            for setting, word in SETTINGS.items():
                # Each question has its own prompts.
                if setting != "prompts" and answer.settings[setting] != of_first[setting]:
                    raise UserError(
                        f"{where} was measured with another {word} than the first record: delete the folder to "
                        "measure again"
                    )
