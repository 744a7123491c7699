"""What our own decoder's records say of the very prompts that an engine was asked: a chain, one question at a time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from draftsmith.data.sources.questions import Question
from draftsmith.eval.bench.records import MethodRecord, QuestionRecord, answer_settings
from draftsmith.eval.decoding.answer import AnswerRecord
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.serving.asking import DRAFTING, PLAIN, ServedAnswer, clock_figures, draft_figures
from draftsmith.eval.serving.endpoint import DraftCounts
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.recipes.schema import DRAFTER_KIND, EvalRecipe, MethodRecipe

OURS = "draftsmith"


def chain_of(evaluation: EvalRecipe, drafted_tokens: int) -> MethodRecipe | None:
    """The method that drafts what an engine does: the run's drafter, its whole chain, losslessly."""
    for method in evaluation.methods:
        whole = method.max_depth is None or method.max_depth == drafted_tokens
        own = method.kind == DRAFTER_KIND and method.drafter is None
        if own and whole and method.tree == "chain" and method.lenience == 1:
            return method
    return None


def own_figures(
    records: Iterable[QuestionRecord],
    method: str,
    asked: dict[int | str, tuple[Question, list[int]]],
    sampling: Sampling,
    max_new_tokens: int,
) -> list[dict[str, Any]]:
    """A row without and one with the drafter; none where nothing was measured with these prompts.

    Args:
        method: The name of the chain's.
        asked: The questions, with the ids of their first prompts.
    """
    arms: dict[str, list[tuple[QuestionRecord, MethodRecord]]] = {PLAIN: [], DRAFTING: []}
    temperature = sampling.temperature
    for record in records:
        if record.question_id not in asked:
            continue
        question, prompt_ids = asked[record.question_id]
        wanted = answer_settings({}, prompt_ids, question.turns, sampling, max_new_tokens)
        found = [record.answers.get(f"{name}@{temperature:g}") for name in (AUTOREGRESSIVE, method)]
        for arm, answer in zip(arms, found, strict=True):
            if answer is not None and wanted.items() <= answer.settings.items():
                arms[arm].append((record, answer))
    return [_row(arm, temperature, answers) for arm, answers in arms.items() if answers and arms[DRAFTING]]


def _row(arm: str, temperature: float, answers: list[tuple[QuestionRecord, MethodRecord]]) -> dict[str, Any]:
    served = [_timed(record, number, turn) for record, answer in answers for number, turn in enumerate(answer.turns)]
    turns = [answer.turns for _, answer in answers if arm == DRAFTING]
    by_question = [
        sum(kept) / len(kept) for each in turns if (kept := [k for turn in each for k in turn.accept_lengths])
    ]
    wall_time_s = sum(turn.wall_time_s for _, answer in answers for turn in answer.turns)
    return {
        "arm": arm,
        "temperature": temperature,
        "concurrency": 1,
        "questions": len({record.question_id for record, _ in answers}),
        "answers": len(served),
        **clock_figures(served, wall_time_s),
        **draft_figures(_counts([turn for each in turns for turn in each]), [], served),
        # Nothing is accepted past an answer's end here: there is the committed tau alone.
        "tau": None,
        "tau_by_question": statistics.fmean(by_question) if by_question else None,
    }


def _counts(turns: list[AnswerRecord]) -> DraftCounts:
    rounds = [pair for turn in turns for pair in zip(turn.draft_lengths, turn.draft_depths, strict=True)]
    return DraftCounts.of_rounds([length for length, _ in rounds], [depth for _, depth in rounds])


def _timed(record: QuestionRecord, number: int, turn: AnswerRecord) -> ServedAnswer:
    rest_s = turn.wall_time_s - turn.first_token_s
    return ServedAnswer(record.question_id, number, [], turn.ids, turn.first_token_s, rest_s)
