"""Conversations that repeat an evaluation question: trained on, they would flatter the figures.

A conversation is contaminated if, in words (case and punctuation aside; a Chinese or Japanese character is a word),

1. a user turn *is* the first turn of a question,
2. any of its turns has n words in a row in common with any turn of a question (n = 13, after GPT-3, arXiv 2005.14165,
   appendix C), or
3. any of its turns contains the whole first turn of a question that is shorter than n words, but not shorter than 5.

A later turn of a question ("Rewrite it in one sentence.") says nothing without the first, so only rule 2 looks at it.

Rules 2 and 3 look up every m-th block of m words alone, with 2m - 1 <= n: any n words in a row hold such a block whole.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.sources.questions import load_questions, questions_file
from draftsmith.recipes.errors import UserError

SAME, CONTAINED, SHARED = "is a question", "contains a short question", "shares words with a question"
FEWEST_WORDS = 5  # a shorter question ("Who is he?") is found anywhere
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")

Words = tuple[str, ...]


@dataclass(frozen=True)
class Match:
    """Why a conversation is contaminated, and by which question: `file:question_id`."""

    reason: str
    question: str


class Contamination:
    """The questions to avoid.

    Args:
        sources: Question files, or `embedded`.
        shared_words: n of rules 2 and 3.

    Raises:
        UserError: A file is missing or holds no questions.
    """

    def __init__(self, sources: Iterable[str], shared_words: int = 13) -> None:
        self._first_turns: dict[Words, str] = {}
        self._shared, self._contained = _Runs(shared_words), _Runs(FEWEST_WORDS)
        for source in sources:
            if not questions_file(source).is_file():
                raise UserError(
                    f"questions file {source}, which conversations are kept apart from, does not exist: correct "
                    "eval.questions or data.conversations.decontaminate ([] keeps them apart from none)"
                )
            for question in load_questions(source):
                name = f"{questions_file(source).name}:{question.question_id}"
                first = words_of(question.turns[0])
                self._first_turns.setdefault(first, name)
                if FEWEST_WORDS <= len(first) < shared_words:
                    self._contained.add(first, name)
                for turn in question.turns:
                    for run in _windows(words_of(turn), shared_words):
                        self._shared.add(run, name)
        self._first_turns.pop((), None)

    def find(self, conversation: Conversation) -> Match | None:
        """The first match, if any."""
        if not self._first_turns:
            return None
        for turn in conversation.turns:
            words = words_of(turn.content)
            if turn.role == "user" and (question := self._first_turns.get(words)):
                return Match(SAME, question)
            for reason, runs in ((SHARED, self._shared), (CONTAINED, self._contained)):
                if question := runs.find_in(words):
                    return Match(reason, question)
        return None


class _Runs:
    """Runs of at least `fewest_words` words, each to be found anywhere in a text."""

    def __init__(self, fewest_words: int) -> None:
        self._block_words = (fewest_words + 1) // 2
        self._names: dict[Words, str] = {}
        self._lengths: set[int] = set()
        self._blocks: set[Words] = set()

    def add(self, run: Words, name: str) -> None:
        self._names.setdefault(run, name)
        self._lengths.add(len(run))
        self._blocks.update(_windows(run, self._block_words))

    def find_in(self, words: Words) -> str | None:
        """The name of a run in the text."""
        block_words = self._block_words
        for at in range(0, len(words) - block_words + 1, block_words):
            if words[at : at + block_words] not in self._blocks:
                continue
            for length in self._lengths:
                for start in range(max(0, at + block_words - length), min(at, len(words) - length) + 1):
                    if name := self._names.get(words[start : start + length]):
                        return name
        return None


def words_of(text: str) -> Words:
    return tuple(WORD.findall(text.casefold()))


def _windows(words: Words, length: int) -> Iterator[Words]:
    return (words[start : start + length] for start in range(len(words) - length + 1))
