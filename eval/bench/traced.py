"""A few answers round by round, as text: the drafts, the accepted tokens, and the target's own tokens.

They come from an untimed pass with the measured loop and the seeds of the first run, so that the answers equal those in
its records. Only first turns are traced, up to `TRACED_NEW_TOKENS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.eval.bench.measured_methods import Arm
from draftsmith.eval.bench.records import MethodResult, QuestionRecord
from draftsmith.eval.bench.spec_bench import SpecBench
from draftsmith.eval.decoding.generate import Round
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.decoding.stop_strings import GrowingText

TRACED_NEW_TOKENS = 96
TRACED_QUESTIONS = 2
MOST_METHODS = 4
SHOWN_PROMPT_CHARS = 600


@dataclass
class TracedRound:
    """One round of a traced answer.

    num_drafted: draft tokens. accepted: texts of the accepted ones. rejected: texts of the most likely rejected path:
    the first child of the last accepted node, and so on; empty if the answer ended in this round. own: text of the
    target's token after the accepted ones; None if the answer ended before it.
    """

    num_drafted: int
    accepted: list[str]
    rejected: list[str]
    own: str | None

    @property
    def drafted(self) -> str:
        """Return the text of the accepted draft tokens."""
        return "".join(self.accepted)

    def title(self, number: int) -> str:
        """Describe the round, by its number in the answer, for the report's tooltip."""
        ending = "" if self.own is None else f", then the target's {self.own!r}"
        rejected = f"; rejected: {''.join(self.rejected)!r}" if self.rejected else ""
        return f"round {number}: {self.num_drafted} tokens drafted, {len(self.accepted)} kept{ending}{rejected}"


@dataclass
class TracedAnswer:
    """One traced answer.

    arm: `method@temperature`. kind: kind of the drafter or method. first: text of the prefill's token, before any
    round.
    """

    arm: str
    kind: str
    question_id: int | str
    category: str
    prompt: str
    first: str = ""
    rounds: list[TracedRound] = field(default_factory=list)

    @property
    def method(self) -> str:
        return self.arm.partition("@")[0]

    @property
    def drafted(self) -> int:
        return sum(len(each.accepted) for each in self.rounds)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all rounds, so without the prefill's."""
        return self.drafted + sum(each.own is not None for each in self.rounds)

    @property
    def shown_prompt(self) -> str:
        return self.prompt if len(self.prompt) <= SHOWN_PROMPT_CHARS else self.prompt[:SHOWN_PROMPT_CHARS] + "…"


def by_question(traced: Iterable[TracedAnswer]) -> list[list[TracedAnswer]]:
    """Group the answers by question, in the order of tracing; answers without a round are left out."""
    questions: dict[int | str, list[TracedAnswer]] = {}
    for answer in traced:
        if answer.rounds:
            questions.setdefault(answer.question_id, []).append(answer)
    return list(questions.values())


class Trace:
    """Collector of one answer's rounds; pass its `on_round` to the decoding loop."""

    def __init__(self, answer: TracedAnswer, tokenizer: Any) -> None:
        self.answer, self._text = answer, GrowingText(tokenizer, skips_special_tokens=False)

    def on_round(self, round_: Round) -> None:
        tree, path = round_.tree, round_.verification.path
        if not self.answer.rounds:
            self.answer.first = _added(self._text, tree.tokens[0])
        accepted = [_added(self._text, tree.tokens[node]) for node in path[1 : round_.kept + 1]]
        rejected, own = list[str](), None
        if round_.kept == len(path):
            instead, node = copy(self._text), path[-1]
            while children := tree.children(node):
                node = children[0]
                rejected.append(_added(instead, tree.tokens[node]))
            own = _added(self._text, round_.verification.next_token)
        self.answer.rounds.append(TracedRound(len(tree) - 1, accepted, rejected, own))


def _added(text: GrowingText, token: int) -> str:
    """Return the text that a token adds; empty for all but a character's last token."""
    before = len(text.text)
    return text.add(token)[before:]


def best_of_each_kind(records: Iterable[QuestionRecord], kinds: dict[str, str]) -> list[str]:
    """Choose the methods to trace, as `method@temperature`: the fastest per token of each kind, the fastest first.

    Only the lowest temperature is used, at which lossless greedy methods generate the same text.

    Args:
        kinds: Kind of each method's drafter, by method.
    """
    answers: dict[str, list[MethodResult]] = {}
    for record in records:
        for key, answer in record.answers.items():
            if answer.method != AUTOREGRESSIVE:
                answers.setdefault(key, []).append(answer)
    lowest = min((each[0].temperature for each in answers.values()), default=0.0)

    def seconds_per_token(key: str) -> float:
        turns = [turn for answer in answers[key] for turn in answer.turns]
        return sum(turn.wall_time_s for turn in turns) / sum(len(turn.ids) for turn in turns)

    best: dict[str, str] = {}
    for key in sorted(answers, key=seconds_per_token):
        method = answers[key][0].method
        if answers[key][0].temperature == lowest:
            best.setdefault(kinds.get(method, method), key)
    return list(best.values())[:MOST_METHODS]


def trace_answers(
    bench: SpecBench, methods: list[Arm], records: Iterable[QuestionRecord], kinds: dict[str, str]
) -> list[TracedAnswer]:
    """Trace the best method of each kind on the first and the middle question.

    Args:
        kinds: Kind of each method's drafter, by method.
    """
    shown = [measured for key in best_of_each_kind(records, kinds) for measured in methods if measured.key == key]
    answers = []
    for question in bench.questions[:: max(1, len(bench.questions) // TRACED_QUESTIONS)][:TRACED_QUESTIONS]:
        for measured in shown:
            kind = kinds.get(measured.method.name, measured.method.name)
            answer = TracedAnswer(measured.key, kind, question.question_id, question.category, question.turns[0])
            on_round = Trace(answer, bench.tokenizer).on_round
            first_turn = replace(question, turns=question.turns[:1])
            bench.answer(measured, first_turn, most_new_tokens=TRACED_NEW_TOKENS, on_round=on_round)
            answers.append(answer)
    return answers
