"""Real answers with what was drafted and kept, what was rejected and what the target made: figure 5 of ParallelSpec."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.eval.bench.traced import TracedAnswer, TracedRound

SHOWN_PROMPT_CHARS = 600


@dataclass(frozen=True)
class ShownRound:
    """drafted: kept drafts; rejected: the draft's first choice behind them, token by token; own: the target's.

    nodes: tokens in the draft tree.
    """

    number: int
    drafted: str
    kept: int
    rejected: list[str]
    own: str | None
    nodes: int

    @property
    def title(self) -> str:
        """What is said of it on hover."""
        ending = "" if self.own is None else f", then the target's {self.own!r}"
        rejected = f"; rejected: {''.join(self.rejected)!r}" if self.rejected else ""
        return f"round {self.number}: {self.nodes} tokens drafted, {self.kept} kept{ending}{rejected}"


@dataclass(frozen=True)
class ShownAnswer:
    arm: str
    kind: str
    first: str
    rounds: list[ShownRound]

    @property
    def tokens(self) -> int:
        """Of all rounds; that of the prefill belongs to none."""
        return sum(each.kept + (each.own is not None) for each in self.rounds)

    @property
    def drafted(self) -> int:
        return sum(each.kept for each in self.rounds)


@dataclass(frozen=True)
class ShownQuestion:
    question_id: int | str
    category: str
    prompt: str
    answers: list[ShownAnswer]


def shown_answers(traced: list[TracedAnswer]) -> list[ShownQuestion]:
    """By question, in the order in which they were traced; answers of no round are left out."""
    questions: dict[int | str, ShownQuestion] = {}
    for answer in traced:
        if not answer.rounds:
            continue
        prompt = answer.prompt if len(answer.prompt) <= SHOWN_PROMPT_CHARS else answer.prompt[:SHOWN_PROMPT_CHARS] + "…"
        question = questions.setdefault(
            answer.question_id, ShownQuestion(answer.question_id, answer.category, prompt, [])
        )
        rounds = [_shown(number, each) for number, each in enumerate(answer.rounds, start=1)]
        question.answers.append(ShownAnswer(answer.arm.partition("@")[0], answer.kind, answer.first, rounds))
    return list(questions.values())


def _shown(number: int, traced: TracedRound) -> ShownRound:
    drafted = "".join(traced.texts[node] for node in traced.path[1:])
    return ShownRound(number, drafted, len(traced.path) - 1, first_rejected(traced), traced.own, len(traced.texts) - 1)


def first_rejected(traced: TracedRound) -> list[str]:
    """The draft's first choice from where it was left: the first child, its first child, and so on.

    Nothing where the answer ended, as then no draft was rejected.
    """
    if traced.own is None:
        return []
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(traced.parents):
        children.setdefault(parent, []).append(node)
    texts, node = [], traced.path[-1]
    while node in children:
        node = children[node][0]
        texts.append(traced.texts[node])
    return texts
