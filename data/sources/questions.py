"""Questions in Spec-Bench's format: JSON lines of `question_id, category, turns`; turns are user messages in order.

Xia et al., arXiv 2401.07851. `embedded` are the project's own questions, written for the embedded target; `spec_bench`
are that paper's 480, downloaded once from its repository and checked by hash. They are not part of this project, as
their original datasets have different licences. Questions are read here, not in evaluation, because training data must
not contain them (`Contamination`).
"""

from __future__ import annotations

import codecs
import hashlib
import re
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.sources.files import InvalidConversation, parse_json_line
from draftsmith.data.sources.turn_checks import json_kind, text_of
from draftsmith.errors import UserError, reason
from draftsmith.files import CACHE_VARIABLE, cache_root, write_atomically

EMBEDDED, SPEC_BENCH = "embedded", "spec_bench"
EMBEDDED_FILE = Path(__file__).parents[1] / "embedded" / "embedded.jsonl"
COMMIT = "66230f10cb0a02aced5ef3ce1e85163c16160454"
URL = f"https://raw.githubusercontent.com/hemingkx/Spec-Bench/{COMMIT}/data/spec_bench/question.jsonl"
SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
TIMEOUT_S = 60.0
# The task that these categories form together in Spec-Bench's file (its evaluation/speed.py). Every other category, and
# the same names in any other file (SPEED-Bench has eleven), is a separate task.
MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
# SPEED-Bench ships without the texts of its sources: whole turns, or a line of a turn, wait to be filled in.
PLACEHOLDER = re.compile(
    r"FULL BENCHMARK DATA SHOULD BE FETCHED|"
    r"^[ \t]*\{(?:articles?|documents?|passages?|context|story|transcript|dialogue|question)\}[ \t]*$",
    re.MULTILINE,
)
FORMAT = 'Spec-Bench lines look like {"question_id": 81, "category": "writing", "turns": ["...", "..."]}'
SAME, CONTAINED, SHARED = "is a question", "contains a short question", "shares words with a question"
FEWEST_WORDS = 5  # a shorter question ("Who is he?") is found anywhere
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")

Words = tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A question with its category; `task` is what it counts under, by default the category."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    task: str = ""

    @property
    def task_name(self) -> str:
        """Return the task that the question counts under."""
        return self.task or self.category


def task_of(category: str) -> str:
    """Return the task, of Spec-Bench's six, that a category of Spec-Bench's file belongs to."""
    return MT_BENCH if category in MT_BENCH_CATEGORIES else category


def questions_file(source: str) -> Path:
    """Return the file that the recipe's `eval.questions` names; Spec-Bench's is downloaded the first time.

    Raises:
        UserError: Spec-Bench's file cannot be downloaded, or has another hash.
    """
    if source != SPEC_BENCH:
        return EMBEDDED_FILE if source == EMBEDDED else Path(source).expanduser()
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
        raise UserError(f"Spec-Bench's questions cannot be fetched from {URL} ({reason(error)}): {way_out}") from None
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"the file at {URL} is not Spec-Bench's question file (its SHA-256 differs): {way_out}")
    write_atomically(file, content.decode("utf-8"))
    return file


def load_questions(
    source: str, limit_per_category: int | None = None, limit_per_task: int | None = None
) -> list[Question]:
    """Read and check the questions.

    Args:
        source: A file, or a name of `questions_file`.
        limit_per_category: Keep the first ones of each category.
        limit_per_task: Keep the first ones of each task, taken in turn from its categories.

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
    content = file.read_bytes()
    is_spec_bench = hashlib.sha256(content).hexdigest() == SHA256
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        question = _parse(line, f"{file} line {number}")
        if is_spec_bench:
            question = replace(question, task=task_of(question.category))
        if question.question_id in seen:
            first = seen[question.question_id]
            raise UserError(
                f"{file} line {number}: question_id {question.question_id!r} is already used on line {first}"
            )
        seen[question.question_id] = number
        questions.append(question)
    if not questions:
        raise UserError(f"questions file {file} holds no question: {FORMAT}")
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


def _parse(line: bytes, where: str) -> Question:
    try:
        fields: Any = parse_json_line(line, where)
    except InvalidConversation as error:
        raise UserError(f"{where} is {error.sentence}: {FORMAT}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{where} is not a JSON object: {FORMAT}")
    for key in ("question_id", "category", "turns"):
        if key not in fields:
            raise UserError(f"{where} has no `{key}`: {FORMAT}")
    identity, category, turns = fields["question_id"], fields["category"], fields["turns"]
    if not isinstance(identity, (int, str)) or not str(identity).isprintable():
        raise UserError(f"{where}: question_id must be a number or text of one line, not {_quote(identity)}")
    if not isinstance(category, str) or not category.isprintable() or category.strip() in ("", "overall"):
        raise UserError(f"{where}: category must be text other than `overall`, of one line, not {_quote(category)}")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UserError(f"{where}: turns must be a list of one or more non-empty texts")
    if placeholder := next(filter(None, map(PLACEHOLDER.search, turns)), None):
        raise UserError(
            f"{where}: a turn holds the placeholder `{placeholder[0].strip()[:40]}` in place of its text: prepare the "
            "file with its benchmark's own script, which fetches the texts, or remove such lines"
        )
    return Question(identity, category, tuple(text_of(turn, where) for turn in turns))


def _quote(value: Any) -> str:
    """Show a wrong value in a message: texts and numbers shortened, others by their JSON type."""
    return repr(value)[:80] if isinstance(value, (str, float)) else json_kind(value)


@dataclass(frozen=True)
class Match:
    """Why a conversation is contaminated, and by which question: `file:question_id`."""

    reason: str
    question: str


class Contamination:
    """The questions that conversations to train on must not repeat: they would flatter the figures.

    A conversation is contaminated if, in words (case and punctuation aside; a Chinese or Japanese character is a word),

    1. a user turn *is* the first turn of a question,
    2. any of its turns has n words in a row in common with any turn of a question (n = 13, after GPT-3, arXiv
       2005.14165, appendix C), or
    3. any of its turns contains the whole first turn of a question that is shorter than n words, but not than 5.

    A later turn of a question ("Rewrite it in one sentence.") says nothing without the first: only rule 2 looks at it.

    Args:
        sources: Question files, or `embedded`.
        shared_words: n of rules 2 and 3.

    Raises:
        UserError: A file is missing or holds no questions.
    """

    def __init__(self, sources: Iterable[str], shared_words: int = 13) -> None:
        self._first_turns: dict[Words, Match] = {}
        self._runs: dict[Words, dict[Words, Match]] = {}  # of rules 2 and 3, by their first `FEWEST_WORDS` words
        for source in sources:
            file = questions_file(source)
            if not file.is_file():
                raise UserError(
                    f"questions file {source}, whose questions are removed from the conversations, does not exist: "
                    "correct eval.questions or data.conversations.decontaminate ([] for none)"
                )
            for question in load_questions(source):
                name, first = f"{file.name}:{question.question_id}", words_of(question.turns[0])
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
    """Split a text into words, for comparison: without case and punctuation."""
    return tuple(WORD.findall(text.casefold()))
