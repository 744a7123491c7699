"""`draftsmith eval --engine vllm` with real vLLM and the embedded target: started or given servers, CPU sampling."""

import importlib.util
import json
import statistics
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.finished_run import write_lines
from support.served_drafters import SERVED, train_briefly
from support.tiny_runs import recipe_in
from support.vllm_server import vllm_environment

from draftsmith.data.engines.engine import EngineSetting, GenerationSettings
from draftsmith.data.engines.vllm_engine import VllmServer
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import answer_end_ids, prompt_token_ids
from draftsmith.eval.bench.records import RecordLog
from draftsmith.eval.commands.evaluate import evaluate
from draftsmith.eval.commands.in_engine import ServingOptions, evaluate_in_engine
from draftsmith.eval.commands.prove import chi_square_uniform, rosenblatt
from draftsmith.eval.serving.cpu_sampling import SWITCH
from draftsmith.eval.serving.endpoint import DraftCounts, Endpoint
from draftsmith.eval.serving.load_test import ArmResult, send_questions
from draftsmith.models.base.registry import TRAINING_FILE
from draftsmith.models.formats.exporting import export_drafter, speculative_config
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.loading import EMBEDDED_TARGET, load_target
from draftsmith.models.weights import weights_sha256
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

__all__ = ["vllm_environment"]  # fixture
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]
KIND, _, OPTIONS = SERVED["eagle"]
EMBEDDED = {
    "model": str(EMBEDDED_TARGET), "dtype": "float32", "enforce_eager": True, "max_model_len": 512,
    "kv_cache_memory_bytes": 128 << 20,
}  # fmt: skip
QUESTIONS, NEW_TOKENS, DEPTH = 16, 20, 3
TEMPERATURE, SAMPLED_TOKENS, SEEDS = 0.6, 8, 6


@dataclass
class Setup:
    """A run with a briefly trained drafter, measured in our decoder."""

    recipe: Recipe
    target: Any
    tokenizer: Any
    drafter: Any
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
    run = RunFolder(recipe)
    drafter.save_pretrained(run.drafter)
    training = {"steps": 1, "history": [], "weights_sha256": weights_sha256(run.drafter)}
    (run.drafter / TRAINING_FILE).write_text(json.dumps(training))
    evaluate(recipe)
    return Setup(recipe, target, tokenizer, drafter, list(RecordLog(run.eval / "records.jsonl")))


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
    evaluate_in_engine(setup.recipe, ServingOptions(concurrency="1,16"))
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
        assert row["acceptance_conditional"] == expected.acceptance_conditional
        assert min(row["acceptance_by_depth"]) > 0
    taus = [1 + statistics.fmean(each) for each in by_question]
    assert figures["rows"][2]["tau_by_question"] == pytest.approx(statistics.fmean(taus))
    assert [(proof["prompts"], proof["divergences"]) for proof in figures["greedy"]] == [(QUESTIONS, [])] * 2


def drafting_server(setup: Setup, folder: Path, **environment: str) -> VllmServer:
    export_drafter(setup.drafter, "vllm", folder / "served", str(EMBEDDED_TARGET), RunFolder(setup.recipe).drafter)
    speculative = speculative_config(setup.drafter.config, str(folder / "served"))
    return VllmServer({**EMBEDDED, "speculative_config": speculative}, "options", environment)


@torch.inference_mode()
def p_value(setup: Setup, drawn: list[ArmResult]) -> float:
    """Return Rosenblatt's p-value of all tokens after each answer's first, 0 if one is impossible."""
    uniforms, generator = [], torch.Generator().manual_seed(0)
    for answer in (answer for asked in drawn for answer in asked.answers):
        logits = setup.target(torch.tensor([answer.prompt_ids + answer.ids])).logits[0, len(answer.prompt_ids) : -1]
        p = Sampling(TEMPERATURE).probabilities(logits)
        uniform, impossible = rosenblatt(p, torch.tensor(answer.ids[1:]), generator)
        uniforms += [uniform, torch.ones(impossible, dtype=torch.float64)]
    return chi_square_uniform(torch.cat(uniforms))[1]


def test_sampling_on_a_cpu_is_right_with_the_correction(setup: Setup, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("of vLLM on a CPU")
    end_ids = tuple(answer_end_ids(setup.target.generation_config, setup.tokenizer))
    setting = EngineSetting(setup.recipe, setup.tokenizer, end_ids)
    settings = GenerationSettings(TEMPERATURE, max_new_tokens=SAMPLED_TOKENS)
    questions = load_questions(setup.recipe.eval.questions)[: QUESTIONS // 2]
    with (
        closing(drafting_server(setup, tmp_path, **{SWITCH: "1"})) as server,
        closing(Endpoint(server.url, setting)) as endpoint,
    ):
        drawn = [send_questions(endpoint, setup.tokenizer, questions, settings, seed, 16) for seed in range(SEEDS)]
    assert p_value(setup, drawn) > 1e-3
