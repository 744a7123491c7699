"""A few answers round by round, in words: what was drafted, what the target kept of it, and what it made itself.

An untimed pass with the loop that was measured and the seeds of the first run, so that the answers are those of its
records. Only first turns are traced, and not further than `TRACED_NEW_TOKENS`.

Shapes: N tree nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.data.sources.questions import Question
from draftsmith.eval.bench.measured_methods import MeasuredMethod
from draftsmith.eval.bench.records import QuestionRecord
from draftsmith.eval.bench.spec_bench import SpecBench
from draftsmith.eval.decoding.loop import Round
from draftsmith.eval.decoding.method import AUTOREGRESSIVE

TRACED_NEW_TOKENS = 96
TRACED_QUESTIONS = 2
MOST_METHODS = 4
UNFINISHED = "\ufffd"  # how tokenizers show the first bytes of a character


@dataclass
class TracedRound:
    """texts, parents: [N] of the draft tree's nodes, root first, whose own text is empty.

    path: the nodes that were kept, root first; own: the target's token behind them, None if the answer ended before.
    """

    texts: list[str]
    parents: list[int]
    path: list[int]
    own: str | None


@dataclass
class TracedAnswer:
    """kind: of what drafted; first: the text of the token that came with the prompt, before any round."""

    arm: str
    kind: str
    question_id: int | str
    category: str
    prompt: str
    first: str = ""
    rounds: list[TracedRound] = field(default_factory=list)


class TextOfTokens:
    """What each token adds to the text of those before it.

    Args:
        tokenizer: Of the target.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[tuple[int, ...], str] = {(): ""}

    def added(self, before: list[int], token: int) -> str:
        """Empty for all but the last token of a character of several."""
        earlier, now = self._text((*before,)), self._text((*before, token))
        same = next((i for i, (a, b) in enumerate(zip(earlier, now, strict=False)) if a != b), len(earlier))
        return now[same:]

    def _text(self, ids: tuple[int, ...]) -> str:
        if ids not in self._texts:
            self._texts[ids] = self._tokenizer.decode(list(ids), skip_special_tokens=False).rstrip(UNFINISHED)
        return self._texts[ids]


class Trace:
    """Collects the rounds of one answer: `on_round` goes to the loop.

    Args:
        answer: Filled.
        text: Of the target's tokens.
    """

    def __init__(self, answer: TracedAnswer, text: TextOfTokens) -> None:
        self.answer, self._text = answer, text
        self._ids: list[int] = []

    def on_round(self, round_: Round) -> None:
        tree, path = round_.tree, round_.verdict.path
        if not self._ids:
            self._ids = [tree.tokens[0]]
            self.answer.first = self._text.added([], tree.tokens[0])
        texts = [""]
        paths: list[list[int]] = [[]]
        for node in range(1, len(tree)):
            above = paths[tree.shape.parents[node]]
            texts.append(self._text.added(self._ids + above, tree.tokens[node]))
            paths.append([*above, tree.tokens[node]])
        kept = path[: round_.kept + 1]
        self._ids += paths[kept[-1]]
        own = None
        if round_.kept == len(path):
            own = self._text.added(self._ids, round_.verdict.next_token)
            self._ids.append(round_.verdict.next_token)
        self.answer.rounds.append(TracedRound(texts, list(tree.shape.parents), kept, own))


def best_of_each_kind(records: Iterable[QuestionRecord], kinds: dict[str, str]) -> list[str]:
    """The methods to show: of every kind the one that took least time per token, the fastest first.

    Only the lowest temperature, where all of them write the same text.

    Args:
        kinds: Of what drafts, by method.
    """
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    methods: dict[str, tuple[str, float]] = {}
    for record in records:
        for key, answer in record.answers.items():
            if answer.method != AUTOREGRESSIVE:
                methods[key] = (answer.method, answer.temperature)
                tokens[key] = tokens.get(key, 0) + sum(len(turn.ids) for turn in answer.turns)
                seconds[key] = seconds.get(key, 0.0) + sum(turn.wall_time_s for turn in answer.turns)
    lowest = min((temperature for _, temperature in methods.values()), default=0.0)
    best: dict[str, str] = {}
    for key in sorted(methods, key=lambda key: seconds[key] / tokens[key]):
        method, temperature = methods[key]
        if temperature == lowest:
            best.setdefault(kinds.get(method, method), key)
    return list(best.values())[:MOST_METHODS]


def trace_answers(bench: SpecBench, methods: list[MeasuredMethod], kinds: dict[str, str]) -> list[TracedAnswer]:
    """Of each method the same questions, from the beginning and the middle.

    Args:
        methods: Those to show.
        kinds: As above.
    """
    text = TextOfTokens(bench.tokenizer)
    answers = []
    for question in bench.questions[:: max(1, len(bench.questions) // TRACED_QUESTIONS)][:TRACED_QUESTIONS]:
        for measured in methods:
            answers.append(
                _traced(bench, measured, question, kinds.get(measured.method.name, measured.method.name), text)
            )
    return answers


def _traced(
    bench: SpecBench, measured: MeasuredMethod, question: Question, kind: str, text: TextOfTokens
) -> TracedAnswer:
    answer = TracedAnswer(measured.key, kind, question.question_id, question.category, question.turns[0])
    first_turn = replace(question, turns=question.turns[:1])
    bench.answer(measured, first_turn, most_new_tokens=TRACED_NEW_TOKENS, on_round=Trace(answer, text).on_round)
    return answer
