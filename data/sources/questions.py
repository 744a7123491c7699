"""Questions in Spec-Bench's format: JSON lines of `question_id, category, turns`; turns are asked one after the other.

Xia et al., arXiv 2401.07851. `embedded` are the project's own questions, written for the embedded target; `spec_bench`
are that paper's. They are read here, not in evaluation, because conversations to train on are kept apart from them.
"""

from __future__ import annotations

import codecs
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.sources.conversation import json_kind, text_of
from draftsmith.data.sources.json_records import UnusableJson, json_of
from draftsmith.data.sources.spec_bench import SPEC_BENCH, spec_bench_file
from draftsmith.recipes.errors import UserError

EMBEDDED = "embedded"
EMBEDDED_FILE = Path(__file__).parents[1] / "embedded" / "embedded.jsonl"
# The task that these categories are together; every other category is a task of its own (its evaluation/speed.py).
MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
FORMAT = 'Spec-Bench lines look like {"question_id": 81, "category": "writing", "turns": ["...", "..."]}'


@dataclass(frozen=True)
class Question:
    question_id: int | str
    category: str
    turns: tuple[str, ...]


def task_of(category: str) -> str:
    """The one of Spec-Bench's six tasks that a category belongs to."""
    return MT_BENCH if category in MT_BENCH_CATEGORIES else category


def questions_file(source: str) -> Path:
    """The file behind the recipe's `eval.questions`.

    Raises:
        UserError: It is to be fetched, and cannot be.
    """
    if source == SPEC_BENCH:
        return spec_bench_file()
    return EMBEDDED_FILE if source == EMBEDDED else Path(source).expanduser()


def load_questions(
    source: str, limit_per_category: int | None = None, limit_per_task: int | None = None
) -> list[Question]:
    """Read and check the questions; with limits the first ones, of a task evenly from its categories.

    Raises:
        UserError: The file is missing or empty, or a line is no question.
    """
    file = questions_file(source)
    if not file.is_file():
        raise UserError(
            f"questions file {file} does not exist: set eval.questions to a JSONL file, `embedded` or `spec_bench`"
        )
    questions: list[Question] = []
    seen: dict[int | str, int] = {}
    for number, line in enumerate(file.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        question = _parse(line, f"{file} line {number}")
        if question.question_id in seen:
            first = seen[question.question_id]
            raise UserError(
                f"{file} line {number}: question_id {question.question_id!r} is already used on line {first}"
            )
        seen[question.question_id] = number
        questions.append(question)
    if not questions:
        raise UserError(f"questions file {file} holds no question: {FORMAT}")
    return _limited(questions, limit_per_category or len(questions), limit_per_task or len(questions))


def _limited(questions: list[Question], per_category: int, per_task: int) -> list[Question]:
    """In the order of the file."""
    of_category: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        of_category.setdefault(question.category, []).append(index)
    ranked = [(rank, index) for indices in of_category.values() for rank, index in enumerate(indices[:per_category])]
    kept: list[int] = []
    taken: Counter[str] = Counter()
    for _, index in sorted(ranked):
        task = task_of(questions[index].category)
        taken[task] += 1
        if taken[task] <= per_task:
            kept.append(index)
    return [questions[index] for index in sorted(kept)]


def _parse(line: bytes, where: str) -> Question:
    try:
        fields: Any = json_of(line)
    except UnusableJson as error:
        raise UserError(f"{where} is {error}: {FORMAT}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{where} is not a JSON object: {FORMAT}")
    for key in ("question_id", "category", "turns"):
        if key not in fields:
            raise UserError(f"{where} has no `{key}`: {FORMAT}")
    identity, category, turns = fields["question_id"], fields["category"], fields["turns"]
    if not isinstance(identity, (int, str)) or not str(identity).isprintable():
        raise UserError(f"{where}: question_id must be a number or text of one line, not {_shown(identity)}")
    if not isinstance(category, str) or not category.isprintable() or category.strip() in ("", "overall"):
        raise UserError(f"{where}: category must be text other than `overall`, of one line, not {_shown(category)}")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UserError(f"{where}: turns must be a list of one or more non-empty texts")
    return Question(identity, category, tuple(text_of(turn, where) for turn in turns))


def _shown(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, (str, float)) else json_kind(value)
