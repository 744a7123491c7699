"""What our own decoder's records say of the very prompts that an engine was asked: a chain, one question at a time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from draftsmith.data.sources.questions import Question
from draftsmith.eval.artifacts.measurement import RECORDS, drafter_weights, recorded_settings
from draftsmith.eval.bench.records import MethodRecord, QuestionRecord, RecordLog, answer_settings
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.serving.asking import (
    DRAFTING,
    PLAIN,
    ServedAnswer,
    clock_figures,
    draft_figures,
    with_speedups,
)
from draftsmith.eval.serving.endpoint import DraftCounts
from draftsmith.eval.trees.verify import Sampling
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import DRAFTER_KIND, EvalRecipe, MethodRecipe, Recipe

Prompts = dict[int | str, tuple[Question, list[int]]]  # the questions, with the ids of their first prompts


def own_rows(recipe: Recipe, prompts: Prompts, depth: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return our own decoder's rows, as far as the run has the same prompts and drafter, and notes of what is missing.

    Args:
        depth: Tokens that the engine drafted in a round.
    """
    file = RunFolder(recipe).eval / RECORDS
    if not file.is_file():
        return [], ["Our own decoder has not been measured: `draftsmith eval` without --engine does."]
    recorded = recorded_settings(recipe)
    chain = chain_of(recorded.eval, depth)
    if chain is None:
        return [], [f"Our own decoder's records are not compared: no method is its whole chain of {depth}."]
    of_this_run = recipe.eval.model_copy(update={"methods": [MethodRecipe(name="x")]})
    weights = drafter_weights(recipe.model_copy(update={"eval": of_this_run}))
    if recorded.target != recipe.target or weights[0] not in recorded.drafter_weights:
        return [], ["Our own decoder's records are not compared: they are of another target or drafter."]
    records, rows = list(RecordLog(file)), []
    for temperature in recipe.eval.temperatures:
        sampling = Sampling(temperature, recipe.eval.top_k, recipe.eval.top_p)
        rows += own_figures(records, chain.name, prompts, sampling, recipe.eval.max_new_tokens)
    return with_speedups(rows), [] if rows else ["Our own decoder's records have none of these prompts."]


def chain_of(evaluation: EvalRecipe, drafted_tokens: int) -> MethodRecipe | None:
    """Find the method that drafts as an engine does: the run's drafter, its whole chain, losslessly."""
    for method in evaluation.methods:
        whole = method.max_depth is None or method.max_depth == drafted_tokens
        own = method.kind == DRAFTER_KIND and method.drafter is None
        if own and whole and method.tree == "chain" and method.lenience == 1:
            return method
    return None


def own_figures(
    records: Iterable[QuestionRecord], chain: str, prompts: Prompts, sampling: Sampling, max_new_tokens: int
) -> list[dict[str, Any]]:
    """Return a row without and one with the drafter; none where nothing was measured with these prompts.

    Args:
        chain: The name of the chain's method.
    """
    temperature = sampling.temperature
    sides: dict[str, list[tuple[QuestionRecord, MethodRecord]]] = {PLAIN: [], DRAFTING: []}
    for record in records:
        if record.question_id not in prompts:
            continue
        question, prompt_ids = prompts[record.question_id]
        wanted = answer_settings({}, prompt_ids, question.turns, sampling, max_new_tokens)
        for side, name in ((PLAIN, AUTOREGRESSIVE), (DRAFTING, chain)):
            answer = record.answers.get(f"{name}@{temperature:g}")
            if answer is not None and wanted.items() <= answer.settings.items():
                sides[side].append((record, answer))
    return [_row(side, temperature, answers) for side, answers in sides.items() if answers and sides[DRAFTING]]


def _row(side: str, temperature: float, answers: list[tuple[QuestionRecord, MethodRecord]]) -> dict[str, Any]:
    turns = [turn for _, answer in answers for turn in answer.turns]
    served = [ServedAnswer("", 0, [], t.ids, t.first_token_s, t.wall_time_s - t.first_token_s) for t in turns]
    drafted = turns if side == DRAFTING else []
    counts = DraftCounts.of_rounds(
        [length for turn in drafted for length in turn.draft_lengths],
        [depth for turn in drafted for depth in turn.draft_depths],
    )
    lengths = [[length for turn in answer.turns for length in turn.accept_lengths] for _, answer in answers]
    by_question = [statistics.fmean(each) for each in lengths if each and side == DRAFTING]
    return {
        "arm": side,
        "temperature": temperature,
        "concurrency": 1,
        "questions": len({record.question_id for record, _ in answers}),
        "answers": len(served),
        **clock_figures(served, sum(turn.wall_time_s for turn in turns)),
        **draft_figures(counts, [], served),
        # Nothing is accepted past an answer's end here: there is the committed tau alone.
        "tau": None,
        "tau_by_question": statistics.fmean(by_question) if by_question else None,
    }
