"""The vllm and openai engines with real vLLM and the embedded target: greedy answers are the target's own."""

import importlib.util
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.greedy_reference import check_greedy
from support.vllm_server import vllm_environment

from draftsmith.data.distill.distill import distill
from draftsmith.data.distill.ledger import LedgerView
from draftsmith.data.engines.engine import (
    Completion,
    Engine,
    EngineSetting,
    Failure,
    GenerationSettings,
    Outcome,
    Request,
    open_engine,
)
from draftsmith.data.engines.vllm_engine import VllmEngine
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import answer_end_ids, prompt_token_ids
from draftsmith.eval.commands.stages import local_target
from draftsmith.models.target.loading import load_generation_config, load_target, load_tokenizer, target_location
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe, TargetRecipe

__all__ = ["vllm_environment"]  # fixture
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]
TARGET = TargetRecipe(model="embedded", dtype="float32")
TOKENIZER = load_tokenizer(TARGET)
END_IDS = tuple(answer_end_ids(load_generation_config(TARGET), TOKENIZER))
SMALL = {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "max_model_len": 512, "concurrency": 16}


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target(TARGET)[0]


@pytest.fixture(scope="module")
def vllm_engine() -> Iterator[VllmEngine]:
    # Defaults of a server that would spoil every answer, greedy ones too, if requests left them open.
    spoiled = {"repetition_penalty": 1.8, "top_k": 2, "min_p": 0.5}
    llm = {"generation_config": "vllm", "override_generation_config": spoiled}
    with open_engine(setting("vllm", **SMALL, llm=llm)) as engine:
        assert isinstance(engine, VllmEngine)
        yield engine


@pytest.fixture(scope="module")
def server_url(vllm_engine: VllmEngine) -> str:
    return vllm_engine._servers[0].url


def setting(engine: str, **options: Any) -> EngineSetting:
    recipe = Recipe.model_validate(
        {
            "name": "x",
            "target": {"model": "embedded", "dtype": "float32"},
            "data": {"distill": {"engine": engine, "options": options}},
        }
    )

    return EngineSetting(
        recipe, TOKENIZER, target_location(TARGET), END_IDS, lambda: local_target(load_target(TARGET)[0])
    )


def questions(count: int, **sampling: Any) -> list[Request]:
    drawn = GenerationSettings(**{"max_new_tokens": 96, **sampling})
    asked = [question.turns[0] for question in load_questions("embedded")][:count]
    assert len(asked) == count
    return [
        Request(
            f"q{n}", prompt_token_ids(TOKENIZER, [Turn("user", text)]), [{"role": "user", "content": text}], drawn, n
        )
        for n, text in enumerate(asked)
    ]


def run(engine: Engine, asked: list[Request]) -> dict[str, Outcome]:
    for request in asked:
        engine.submit(request)
    outcomes: dict[str, Outcome] = {}
    while len(outcomes) < len(asked):
        outcomes.update(engine.collect())
    return outcomes


def token_ids(outcome: Outcome) -> list[int]:
    assert isinstance(outcome, Completion)
    assert outcome.token_ids is not None
    assert (outcome.token_ids[-1] in END_IDS) == (outcome.finish_reason == "stop")
    assert not set(outcome.token_ids[:-1]) & set(END_IDS)
    return outcome.token_ids


def assert_the_targets_own(target: Any, asked: list[Request], outcomes: dict[str, Outcome]) -> None:
    """Every token is the argmax of the target's logits after what came before it, but for ties."""
    answers = {request.key: (request.prompt_ids, token_ids(outcomes[request.key])) for request in asked}
    check = check_greedy(target, answers)
    print(check.sentence())
    assert check.threshold < 1e-3
    assert not check.wrong
    assert len(check.ties) <= 0.01 * check.tokens


def test_greedy_answers_are_the_targets(target: Any, vllm_engine: Engine) -> None:
    assert (vllm_engine.concurrency, vllm_engine.max_length_tokens) == (20, 512)
    asked = questions(32)
    outcomes = run(vllm_engine, asked)
    assert {outcome.finish_reason for outcome in outcomes.values() if isinstance(outcome, Completion)} == {
        "stop", "length"
    }  # fmt: skip
    assert_the_targets_own(target, asked, outcomes)
    with open_engine(setting("transformers", batch_size=8)) as reference:
        expected = run(reference, asked)
    different = [key for key in expected if expected[key] != outcomes[key]]
    print(f"{len(different)} of {len(asked)} answers differ from those of the transformers engine (ties: above)")
    assert_the_targets_own(target, asked, expected)
    assert len(different) <= 2


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_served_endpoint_says_the_same(target: Any, server_url: str, api: str) -> None:
    asked = questions(32)
    options = {"base_urls": [server_url], "api": api, "concurrency_per_server": 16}
    with open_engine(setting("openai", **options)) as engine:
        assert (engine.concurrency, engine.max_length_tokens) == (16, 512)
        assert_the_targets_own(target, asked, run(engine, asked))


def test_text_alone_is_the_text_of_the_ids(server_url: str) -> None:
    """Without vLLM's fields the server's own defaults apply, but an answer of one token is not changed by them."""
    asked = questions(4, max_new_tokens=1)
    with open_engine(setting("openai", base_urls=[server_url])) as engine:
        ids = run(engine, asked)
    with open_engine(setting("openai", base_urls=[server_url], extensions=False)) as engine:
        texts = run(engine, asked)
    for key, outcome in texts.items():
        assert outcome == Completion(None, "length", TOKENIZER.decode(token_ids(ids[key])))


def test_a_prompt_too_long_is_a_failure_of_its_own(vllm_engine: Engine) -> None:
    long = Request("long", [5] * 600, [], GenerationSettings(max_new_tokens=8), 0)
    outcomes = run(vllm_engine, [long, *questions(2)])
    refused = outcomes["long"]
    assert isinstance(refused, Failure)
    assert refused.reason.startswith("HTTP 400: ")
    assert "600" not in refused.reason
    assert all(isinstance(outcomes[key], Completion) for key in ("q0", "q1"))


def test_sampled_answers_depend_on_their_seed_alone(vllm_engine: Engine) -> None:
    asked = questions(8, temperature=1.0, top_k=40, top_p=0.95, max_new_tokens=24)
    together = run(vllm_engine, asked)
    alone = {key: outcome for request in reversed(asked) for key, outcome in run(vllm_engine, [request]).items()}
    assert alone == together
    reseeded = [Request(r.key, r.prompt_ids, r.messages, r.settings, r.seed + 1000) for r in asked]
    assert run(vllm_engine, reseeded) != together


def test_conversations_of_several_turns(target: Any, server_url: str, tmp_path: Path) -> None:
    """The project's own scheduler over the engine: every answer is the target's after the rewritten history."""
    turns = [question.turns[0] for question in load_questions("embedded")][:24]
    source = tmp_path / "chats.jsonl"
    with source.open("w") as stream:
        for first, count in [(0, 1), (1, 2), (3, 3), (6, 4), (10, 3), (13, 2), (15, 4), (19, 5)]:
            chat = [
                {"from": who, "value": text}
                for asked in turns[first : first + count]
                for who, text in (("human", asked), ("gpt", "someone else's answer"))
            ]
            stream.write(json.dumps({"conversations": chat}) + "\n")
    data = {"conversations": {"source": str(source), "decontaminate": []}, "max_length_tokens": 500}
    values = {
        "name": "openai", "runs_dir": str(tmp_path), "target": TARGET.model_dump(),
        "data": {**data, "distill": {"engine": "openai", "max_new_tokens": 120}},
    }  # fmt: skip
    recipe = Recipe.model_validate(values)
    folder = RunFolder(recipe)
    opened = partial(open_engine, setting("openai", base_urls=[server_url]))
    assert distill(recipe, TOKENIZER, folder, opened, progress=False).kept >= 4
    answers = {}
    for distilled in LedgerView(folder.data).distilled():
        history = distilled.conversation.turns
        at = [n for n, turn in enumerate(history) if turn.role == "assistant"]
        for n, ids in zip(at, distilled.answer_ids, strict=True):
            assert ids is not None
            answers[f"{distilled.conversation.id[:6]}/{n}"] = (prompt_token_ids(TOKENIZER, history[:n]), ids)
    assert len(answers) >= 16
    assert not check_greedy(target, answers).wrong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 5000}, "vLLM does not start with data.distill.options: .*max_model_len.*5000"),
        ({"llm": {"no_such_argument": 1}}, "vLLM does not start with data.distill.options: .*no-such-argument"),
    ],
)
def test_options_that_vllm_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message), open_engine(setting("vllm", **{**SMALL, **options})):
        pass
