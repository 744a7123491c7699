"""`draftsmith bench --engine vllm` with real vLLM and the embedded target: a started server."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.finished_run import write_lines
from support.served_drafters import SERVED, train_briefly
from support.tiny_runs import recipe_in, save_trained
from support.vllm_server import NEEDS_VLLM, vllm_environment

from draftsmith.cli.engine_bench import ServingOptions, bench
from draftsmith.cli.evaluate import evaluate
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.eval.bench.records import RecordLog
from draftsmith.eval.engines.endpoint import DraftCounts
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

__all__ = ["vllm_environment"]  # fixture
pytestmark = NEEDS_VLLM
KIND, _, OPTIONS = SERVED["eagle"]
QUESTIONS, NEW_TOKENS, DEPTH = 16, 20, 3


@dataclass
class Setup:
    """A run with a briefly trained drafter, measured in our decoder."""

    recipe: Recipe
    own: Any


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("run")
    asked = [question.turns[0] for question in load_questions("embedded")][:QUESTIONS]
    lines = [{"question_id": number, "category": "all", "turns": [text]} for number, text in enumerate(asked)]
    write_lines(folder / "questions.jsonl", lines)
    recipe = recipe_in(
        folder,
        target={"model": "embedded"},
        drafter={"kind": KIND, "options": OPTIONS},
        eval={
            "questions": str(folder / "questions.jsonl"), "max_new_tokens": NEW_TOKENS, "runs": 1,
            "warmup_questions": 0, "methods": [{"name": "chain", "tree": "chain"}],
        },
    )  # fmt: skip
    target, tokenizer = load_target(recipe.target)
    prompts = [prompt_token_ids(tokenizer, [Turn("user", text)]) for text in asked]
    answers = []
    for prompt in prompts[:8]:
        ids = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS + DEPTH + 1)
        answers.append(ids[0, len(prompt) :].tolist())
    drafter = train_briefly(KIND, OPTIONS, target, prompts[:8], answers)
    save_trained(recipe, drafter)
    evaluate(recipe)
    return Setup(recipe, list(RecordLog(RunFolder(recipe).eval / "records.jsonl")))


def result(setup: Setup, name: str) -> dict[str, Any]:
    return json.loads((RunFolder(setup.recipe).eval / name).read_text())["figures"]


def past_the_end(setup: Setup) -> list[list[int]]:
    """Return accepted tokens per round and question as an engine counts them, not cut at `NEW_TOKENS`."""
    evaluation = setup.recipe.eval
    methods = [evaluation.methods[0].model_copy(update={"drafter": str(RunFolder(setup.recipe).drafter)})]
    longer = evaluation.model_copy(update={"methods": methods, "max_new_tokens": NEW_TOKENS + DEPTH + 1})
    recipe = setup.recipe.model_copy(update={"name": "longer", "eval": longer})
    evaluate(recipe)
    by_question = []
    for record in RecordLog(RunFolder(recipe).eval / "records.jsonl"):
        (turn,) = record.answers["chain@0"].turns
        tokens, kept = 1, []
        for committed, drafted in zip(turn.accept_lengths, turn.draft_lengths, strict=True):
            if tokens < NEW_TOKENS:
                kept.append(drafted)
            tokens += committed
        by_question.append(kept)
    return by_question


def test_started_server_equals_our_decoder(setup: Setup) -> None:
    bench(setup.recipe, ServingOptions(concurrency="1,16"))
    figures = result(setup, "vllm.json")
    by_question = past_the_end(setup)
    kept = [length for each in by_question for length in each]
    expected = DraftCounts.of_rounds(kept, [DEPTH] * len(kept))
    answers = [record.answers["chain@0"].turns[0] for record in setup.own]
    assert all(len(answer.ids) == NEW_TOKENS for answer in answers)  # no answer ends early, so both can be exact
    for row in figures["rows"][2:]:
        assert (row["answers"], row["failures"]) == (QUESTIONS, {})
        assert row["drafts"] == sum(answer.rounds for answer in answers)
        assert row["tau_committed"] == sum(sum(answer.accept_lengths) for answer in answers) / row["drafts"]
        assert row["tau"] == expected.tau
        assert row["acceptance_by_depth"] == expected.acceptance_by_depth
        assert min(row["acceptance_by_depth"]) > 0
    own = figures["own_chain"]  # the same rounds in our own loop, replayed
    assert own["own_tau"] == pytest.approx(own["engine_tau"], rel=1e-9)
    assert any(note.startswith("Accepts here what it accepts there") for note in figures["notes"])
    assert [(proof["prompts"], proof["divergences"]) for proof in figures["greedy"]] == [(QUESTIONS, [])] * 2
