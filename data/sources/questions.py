"""Questions in Spec-Bench's format: JSON lines of `question_id, category, turns`; turns are asked one after the other.

Xia et al., arXiv 2401.07851. `embedded` are the project's own questions, written for the embedded target; `spec_bench`
are that paper's 480, fetched once from its repository and checked by hash, which are no part of this project: the sets
that they were taken from have licences of their own. Questions are read here, not in evaluation, because
conversations to train on are kept apart from them.
"""

from __future__ import annotations

import codecs
import hashlib
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.sources.conversation import json_kind, text_of
from draftsmith.data.sources.records import UnusableJson, json_of
from draftsmith.recipes.cache import CACHE_VARIABLE, cache_root
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import write_atomically

EMBEDDED, SPEC_BENCH = "embedded", "spec_bench"
EMBEDDED_FILE = Path(__file__).parents[1] / "embedded" / "embedded.jsonl"
COMMIT = "66230f10cb0a02aced5ef3ce1e85163c16160454"
URL = f"https://raw.githubusercontent.com/hemingkx/Spec-Bench/{COMMIT}/data/spec_bench/question.jsonl"
SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
TIMEOUT_S = 60.0
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
    """The file that the recipe's `eval.questions` names.

    Raises:
        UserError: It is to be fetched, and cannot be.
    """
    if source == SPEC_BENCH:
        return spec_bench_file()
    return EMBEDDED_FILE if source == EMBEDDED else Path(source).expanduser()


def spec_bench_file() -> Path:
    """The file of Spec-Bench's questions in draftsmith's cache; fetched the first time.

    Raises:
        UserError: It cannot be fetched, or what came is another file.
    """
    file = cache_root() / "spec_bench" / "question.jsonl"
    if file.is_file():
        return file
    way_out = (
        f"fetch it elsewhere and name it as eval.questions, or put it at {file} (its folder is ${CACHE_VARIABLE}'s)"
    )
    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read()
    except OSError as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"Spec-Bench's questions cannot be fetched from {URL} ({reason}): {way_out}") from None
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"what {URL} gave is not Spec-Bench's question file (another SHA-256): {way_out}")
    write_atomically(file, content.decode("utf-8"))
    return file


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
    """The first questions of each category and task, in the order of the file."""
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
