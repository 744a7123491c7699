"""Questions in the formats of their publishers: the one or several sets of questions that `eval.questions` names.

A file's format is recognised by the columns of its first row (`FORMATS`). A question's turns are user messages in
order, as published, without a word added. SPEED-Bench's files have Spec-Bench's columns, and more. Questions are read
here, not in evaluation, because training data must not contain them (`Contamination`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.sources.files import InvalidConversation, Records, read_records
from draftsmith.data.sources.question_sets import GITHUB, MT_BENCH, NAMES, questions_file, set_name
from draftsmith.data.sources.turns import json_kind, listed, text_of
from draftsmith.errors import UserError
from draftsmith.files import file_sha256

# The task that these categories form together in Spec-Bench's file (its evaluation/speed.py). Every other category, and
# the same names in any other file (SPEED-Bench has eleven), is a separate task.
MT_BENCH_CATEGORIES = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
# SPEED-Bench is published without the texts of its sources: whole turns, or a line of a turn, wait to be filled in.
PLACEHOLDER = re.compile(
    r"FULL BENCHMARK DATA SHOULD BE FETCHED|"
    r"^[ \t]*\{(?:articles?|documents?|passages?|context|story|transcript|dialogue|question)\}[ \t]*$",
    re.MULTILINE,
)
PREPARE = (
    "fill it in with `python3 prepare_data.py --dataset speed` of examples/specdec_bench in NVIDIA/Model-Optimizer, "
    "which fetches the texts, and name the data/speed/*/test.parquet that it writes"
)
SAME, CONTAINED, SHARED = "is a question", "contains a short question", "shares words with a question"
FEWEST_WORDS = 5  # a shorter question ("Who is he?") is found anywhere
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")

Words = tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """An evaluation question: its user turns, its category, and the task to count it under, by default the category."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    task: str = ""

    @property
    def task_name(self) -> str:
        """Return the task that the question's results are counted under."""
        return self.task or self.category


def task_of(category: str) -> str:
    """Map a category of Spec-Bench's file to the task, one of Spec-Bench's six, that it belongs to."""
    return MT_BENCH if category in MT_BENCH_CATEGORIES else category


@dataclass(frozen=True)
class Format:
    """A published format of question files.

    columns: columns that every row has, by which a file is recognised. text: column with the user's message, or with a
    list of messages. question_id, category: columns; without them the row's number and the task. task: task of all
    questions; by default each category is one. mark: a column, and a text that it contains in every row.
    """

    name: str
    columns: tuple[str, ...]
    text: str
    question_id: str | None = None
    category: str | None = None
    task: str = ""
    mark: tuple[str, str] | None = None


FORMATS = (
    Format("Spec-Bench", ("question_id", "category", "turns"), "turns", "question_id", "category"),
    Format("HumanEval", ("task_id", "prompt", "entry_point", "test"), "prompt", "task_id", task="humaneval"),
    Format("MBPP", ("task_id", "text", "code", "test_list"), "text", "task_id", task="mbpp"),
    Format("sanitized MBPP", ("task_id", "prompt", "code", "test_list"), "prompt", "task_id", task="mbpp"),
    # Other sets have these two columns too; GSM8K's answers end with a line `#### 42`.
    Format("GSM8K", ("question", "answer"), "question", task="gsm8k", mark=("answer", "#### ")),
    Format("MATH-500", ("problem", "subject", "unique_id"), "problem", "unique_id", "subject", task="math_500"),
)


def load_questions(
    sources: str | Sequence[str], limit_per_category: int | None = None, limit_per_task: int | None = None
) -> list[Question]:
    """Read and check the questions of one set, or of several.

    With several, ids, categories and tasks begin with the set's name; a set that is one task keeps the task's name.

    Args:
        sources: File or name (`NAMES`) of a set, or several of them.
        limit_per_category: Number of questions to keep of each category, the first ones; None: all.
        limit_per_task: Number of questions to keep of each task, taken in turn from its categories; None: all.

    Raises:
        UserError: A file is missing or empty, a row is no question, or two sets have the same name or task.
    """
    named = [sources] if isinstance(sources, str) else list(sources)
    questions = _load_set(named[0]) if len(named) == 1 else list(_load_side_by_side(named))
    # The first ones of each category and task, in the order of the file.
    of_category: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        of_category.setdefault(question.category, []).append(index)
    ranked = [(rank, i) for indices in of_category.values() for rank, i in enumerate(indices[:limit_per_category])]
    kept: list[int] = []
    num_kept: Counter[str] = Counter()
    for _, index in sorted(ranked):
        task = questions[index].task_name
        num_kept[task] += 1
        if limit_per_task is None or num_kept[task] <= limit_per_task:
            kept.append(index)
    return [questions[index] for index in sorted(kept)]


def _load_side_by_side(sources: Sequence[str]) -> Iterator[Question]:
    """Read several sets, whose ids, categories and tasks must not be confused."""
    set_of: dict[str, str] = {}  # by task
    for name, count in Counter(map(set_name, sources)).items():
        if count > 1:
            raise UserError(f"eval.questions has {count} sets called `{name}`: leave one out, or rename its file")
    for source in sources:
        name, questions = set_name(source), _load_set(source)
        is_one_task = bool(questions[0].task) and len({question.task for question in questions}) == 1
        for question in questions:
            task = question.task if is_one_task else f"{name}/{question.task_name}"
            if set_of.setdefault(task, source) != source:
                raise UserError(f"eval.questions: {set_of[task]} and {source} are both `{task}`: leave one out")
            category = task if question.category == question.task_name else f"{name}/{question.category}"
            yield Question(f"{name}/{question.question_id}", category, question.turns, task)


def _load_set(source: str) -> list[Question]:
    """Read and check the questions of one set."""
    file = questions_file(source)
    if not file.is_file():
        raise UserError(
            f"questions file {file} does not exist: set eval.questions (or data.conversations.decontaminate, [] for "
            f"none) to a file, or to one of {', '.join(NAMES)}"
        )
    questions: list[Question] = []
    seen: dict[int | str, str] = {}
    published = {sha256: name for name, (_, sha256) in GITHUB.items()}.get(file_sha256(file))
    form: Format | None = None
    records: Records = read_records(file) if file.stat().st_size else iter(())
    for number, (where, row) in enumerate(records, start=1):
        if isinstance(row, InvalidConversation):
            raise UserError(f"{where}: {row.sentence}: write the line again")
        if not isinstance(row, dict):
            raise UserError(f"{where} is not a JSON object: each line must hold one question with its columns")
        form = form or _recognise(row, where)
        question = _parse(row, form, number, where)
        if published is not None:
            question = replace(question, task=MT_BENCH if published == MT_BENCH else task_of(question.category))
        if question.question_id in seen:
            raise UserError(
                f"{where}: {form.question_id} {question.question_id!r} is already used on {seen[question.question_id]}"
            )
        seen[question.question_id] = where.removeprefix(f"{file} ")
        questions.append(question)
    if not questions:
        raise UserError(f"questions file {file} holds no question: each line or row must be one")
    return questions


def _recognise(row: dict[str, Any], where: str) -> Format:
    """Return the format with the columns of a file's first row."""
    fitting = [form for form in FORMATS if set(form.columns) <= row.keys()]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = " and of ".join(form.name for form in fitting)
        raise UserError(f"{where} has the columns of {names}: leave out those of all but one")
    nearest = max(FORMATS, key=lambda form: len(row.keys() & set(form.columns)) / len(form.columns))
    others = ", ".join(form.name for form in FORMATS if form is not nearest)
    raise UserError(f"{_missing(row, nearest, where)} (other formats: {others})")


def _missing(row: dict[str, Any], form: Format, where: str) -> str:
    key = next(key for key in form.columns if key not in row)
    return f"{where} has no `{key}`: rows of {form.name}'s format have {listed(form.columns)}"


def _parse(row: dict[str, Any], form: Format, number: int, where: str) -> Question:
    """Build a question from a row of a format."""
    if not row.keys() >= set(form.columns):
        raise UserError(_missing(row, form, where))
    if form.mark is not None and form.mark[1] not in str(row[form.mark[0]]):
        column, mark = form.mark
        raise UserError(
            f"{where}: `{column}` has no `{mark.strip()}`, which every row of {form.name} has: other questions go into "
            f"{FORMATS[0].name}'s format ({listed(FORMATS[0].columns)})"
        )
    identity = number if form.question_id is None else row[form.question_id]
    category = form.task if form.category is None else row[form.category]
    turns = row[form.text] if form.text == "turns" else [row[form.text]]
    if not isinstance(identity, (int, str)) or not str(identity).isprintable():
        raise UserError(f"{where}: {form.question_id} must be a number or text of one line, not {_quote(identity)}")
    if not isinstance(category, str) or not category.isprintable() or category.strip() in ("", "overall"):
        key = form.category
        raise UserError(f"{where}: {key} must be text other than `overall`, of one line, not {_quote(category)}")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        what = "a list of one or more non-empty texts" if form.text == "turns" else "non-empty text"
        raise UserError(f"{where}: {form.text} must be {what}")
    if form.text == "turns" and (placeholder := next(filter(None, map(PLACEHOLDER.search, turns)), None)):
        raise UserError(
            f"{where}: a turn holds the placeholder `{placeholder[0].strip()[:40]}` in place of its text: {PREPARE}"
        )
    return Question(identity, category, tuple(text_of(turn, where) for turn in turns), form.task)


def _quote(value: Any) -> str:
    """Show a wrong value in a message: texts and numbers shortened, others by their JSON type."""
    return repr(value)[:80] if isinstance(value, (str, float)) else json_kind(value)


@dataclass(frozen=True)
class Match:
    """Contamination of a conversation: the kind (`reason`), and the question it repeats, as `file:question_id`."""

    reason: str
    question: str


class Contamination:
    """Search for training conversations that repeat evaluation questions, as these would make results look too good.

    A conversation is contaminated if, in words (case and punctuation aside; a Chinese or Japanese character is a word),

    1. a user turn *is* the first turn of a question,
    2. any of its turns has n words in a row in common with any turn of a question (n = 13, after GPT-3, arXiv
       2005.14165, appendix C), or
    3. any of its turns contains the whole first turn of a question, if that has at least 5 and fewer than n words.

    A later turn of a question ("Rewrite it in one sentence.") means nothing without the first: only rule 2 applies.

    Args:
        sources: Question files, or names of sets.
        shared_words: n of rules 2 and 3.

    Raises:
        UserError: A file is missing or holds no questions.
    """

    def __init__(self, sources: Iterable[str], shared_words: int = 13) -> None:
        self._first_turns: dict[Words, Match] = {}
        self._runs: dict[Words, dict[Words, Match]] = {}  # of rules 2 and 3, by their first `FEWEST_WORDS` words
        for source in sources:
            for question in load_questions(source):
                name = f"{source if source in NAMES else questions_file(source).name}:{question.question_id}"
                first = words_of(question.turns[0])
                if first:
                    self._first_turns.setdefault(first, Match(SAME, name))
                runs = [(first, CONTAINED)] if FEWEST_WORDS <= len(first) < shared_words else []
                for turn in question.turns:
                    words = words_of(turn)
                    starts = range(len(words) - shared_words + 1)
                    runs += [(words[start : start + shared_words], SHARED) for start in starts]
                for run, how in runs:
                    self._runs.setdefault(run[:FEWEST_WORDS], {}).setdefault(run, Match(how, name))

    def find(self, conversation: Conversation) -> Match | None:
        """Return the first question that the conversation repeats, if there is any."""
        for turn in conversation.turns:
            words = words_of(f"{turn.content}\n{turn.reasoning_content}")
            if turn.role == "user" and (match := self._first_turns.get(words)):
                return match
            contained = None
            for start in range(len(words) - FEWEST_WORDS + 1):
                for run, match in self._runs.get(words[start : start + FEWEST_WORDS], {}).items():
                    if words[start : start + len(run)] == run:
                        if match.reason == SHARED:
                            return match
                        contained = contained or match
            if contained is not None:
                return contained
        return None


def words_of(text: str) -> Words:
    """Split a text into words in lower case, without punctuation, for comparison."""
    return tuple(WORD.findall(text.casefold()))
