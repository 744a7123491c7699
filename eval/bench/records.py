"""What is measured, as records.jsonl has it: a line for each question and run, with what every arm answered."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any, TypeVar

from pydantic import TypeAdapter

from draftsmith.eval.decoding.answer import AnswerRecord
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MethodName

T = TypeVar("T")

# Of a turn, what earlier versions did not measure and a report can do without.
NEWER: dict[str, Any] = {"outside_tokens": None, "ended_outside": None, "phases_s": []}

# Keys of an arm's `settings`, and how an error calls them.
SETTINGS = {
    "target": "target weights",
    "dtype": "dtype",
    "prompts": "prompts",
    "sampling": "sampling",
    "max_new_tokens": "token limit",
}


@dataclass(slots=True)
class ArmRecord:
    """What one arm did with one question.

    lenience: below 1 it is not lossless; process: that measured it, as only times of one are compared; sequential: see
    `Method`; settings: what the answers were made with, see `fair_clock`; turns_left_out: later ones without room.
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
        """Of each turn."""
        return [turn.ids for turn in self.turns]


@dataclass(slots=True)
class QuestionRecord:
    """What all arms did with one question in one run.

    answers: by the arm's key; weights_bytes, weights_read_s: see `WeightReading`, None of earlier versions.
    """

    run: int
    question_id: int | str
    category: str
    tstamp: float
    answers: dict[str, ArmRecord]
    weights_bytes: int | None = None
    weights_read_s: float | None = None

    @property
    def where(self) -> str:
        return f"run {self.run} of question {self.question_id}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> QuestionRecord:
        """
        Raises:
            UserError: An earlier version of draftsmith measured less than this one needs.
            ValueError, TypeError, KeyError, AttributeError: These are no records.
        """
        record = _FORMS[QuestionRecord].validate_python({**values, "answers": {}})
        for key, answer in values["answers"].items():
            answer = _by_turns(answer) if "token_ids" in answer else answer
            turns = [_complete(AnswerRecord, {**NEWER, **turn}, record.where) for turn in answer["turns"]]
            arm = record.answers[key] = _complete(ArmRecord, {**answer, "turns": turns}, record.where)
            if not turns or key != f"{arm.method}@{arm.temperature:g}" or not SETTINGS.keys() <= arm.settings.keys():
                raise ValueError(key)
            for turn in turns:
                per_round: list[Sized] = [turn.draft_lengths, turn.draft_depths, turn.round_s]
                if any(len(part) != turn.rounds for part in per_round) or turn.wall_time_s <= 0:
                    raise ValueError(key)
        return record


_FORMS: dict[Any, Any] = {kind: TypeAdapter(kind) for kind in (AnswerRecord, ArmRecord, QuestionRecord)}


def _complete(kind: type[T], values: dict[str, Any], where: str) -> T:
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    missing = [name for name in names if name not in values]
    if missing:
        raise UserError(
            f"{where} in records.jsonl was measured by an earlier version of draftsmith (no {', '.join(missing)}): "
            "delete the eval folder and run `draftsmith eval` again"
        )
    return _FORMS[kind].validate_python({name: values[name] for name in names})


def _by_turns(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer as earlier versions wrote it: each figure a list over the turns, or over the rounds of all turns."""
    names = {"turns": "text", "token_ids": "ids", "wall_time": "wall_time_s"}
    steps = answer["decoding_steps"]
    turns: list[dict[str, Any]] = [{} for _ in steps]
    for key, values in answer.items():
        if key in ("accept_lengths", "draft_lengths", "draft_depths", "round_s"):
            values = [values[end - count : end] for count, end in zip(steps, accumulate(steps), strict=True)]
        if isinstance(values, list):
            for turn, value in zip(turns, values, strict=True):
                turn[names.get(key, key)] = value
    return {"lenience": 1.0, **answer, "turns": turns}
