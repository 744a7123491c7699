"""The vllm and openai engines with real vLLM and the embedded target: greedy answers are the target's own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.openai_setup import run
from support.vllm_server import NEEDS_VLLM, vllm_environment

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
from draftsmith.errors import UserError
from draftsmith.models.target.loading import load_generation_config, load_target, load_tokenizer
from draftsmith.recipes.schema import Recipe, TargetRecipe

__all__ = ["vllm_environment"]  # fixture
pytestmark = NEEDS_VLLM
TARGET = TargetRecipe(model="embedded", dtype="float32")
TOKENIZER = load_tokenizer(TARGET)
END_IDS = tuple(answer_end_ids(load_generation_config(TARGET), TOKENIZER))
SMALL = {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "max_model_len": 512, "concurrency": 16}


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target(TARGET)[0]


@pytest.fixture(scope="module")
def vllm_engine() -> Iterator[VllmEngine]:
    # Server defaults that would change every answer, greedy ones too, if requests did not override them.
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

    return EngineSetting(recipe, TOKENIZER, END_IDS)


def questions(count: int, **sampling: Any) -> list[Request]:
    drawn = GenerationSettings(**{"max_new_tokens": 96, **sampling})
    batch = [question.turns[0] for question in load_questions("embedded")][:count]
    assert len(batch) == count
    return [
        Request(f"q{n}", prompt_token_ids(TOKENIZER, [Turn("user", text)]), drawn, n) for n, text in enumerate(batch)
    ]


def token_ids(outcome: Outcome) -> list[int]:
    assert isinstance(outcome, Completion)
    assert outcome.token_ids is not None
    assert (outcome.token_ids[-1] in END_IDS) == (outcome.finish_reason == "stop")
    assert not set(outcome.token_ids[:-1]) & set(END_IDS)
    return outcome.token_ids


def assert_greedy_by_the_target(target: Any, batch: list[Request], outcomes: dict[str, Outcome]) -> None:
    """Assert that every token is the argmax of the target's float64 logits, except for ties.

    A tie is a gap to the largest logit within four times the largest difference between float32 and float64 logits:
    two logits are compared in each of two engines, and each may be off by the rounding.
    """
    answers = [(request.prompt_ids, token_ids(outcomes[request.key])) for request in batch]

    def logits() -> list[torch.Tensor]:
        with torch.inference_mode():
            return [target(torch.tensor([p + a])).logits[0, len(p) - 1 : -1] for p, a in answers]  # [answer, V]

    single = logits()
    target.double()
    double = logits()
    target.float()
    threshold = 4 * max(float((d - s).abs().max()) for d, s in zip(double, single, strict=True))
    chosen = [d.gather(1, torch.tensor(a)[:, None])[:, 0] for d, (_, a) in zip(double, answers, strict=True)]
    gaps = torch.cat([d.max(dim=1).values - c for d, c in zip(double, chosen, strict=True)])
    assert threshold < 1e-3
    assert float(gaps.max()) <= threshold
    assert int((gaps > 0).sum()) <= 0.01 * len(gaps)


def test_greedy_answers_equal_the_targets(target: Any, vllm_engine: Engine) -> None:
    assert (vllm_engine.concurrency, vllm_engine.max_length_tokens) == (20, 512)
    batch = questions(32)
    outcomes = run(vllm_engine, batch)
    assert {outcome.finish_reason for outcome in outcomes.values() if isinstance(outcome, Completion)} == {
        "stop", "length"
    }  # fmt: skip
    assert_greedy_by_the_target(target, batch, outcomes)
    with open_engine(setting("transformers", batch_size=8)) as reference:
        expected = run(reference, batch)
    different = [key for key in expected if expected[key] != outcomes[key]]
    print(f"{len(different)} of {len(batch)} answers differ from those of the transformers engine (ties: above)")
    assert_greedy_by_the_target(target, batch, expected)
    assert len(different) <= 2


def test_server_gives_the_same_greedy_answers(target: Any, server_url: str) -> None:
    batch = questions(32)
    options = {"base_urls": [server_url], "concurrency_per_server": 16}
    with open_engine(setting("openai", **options)) as engine:
        assert (engine.concurrency, engine.max_length_tokens) == (16, 512)
        assert_greedy_by_the_target(target, batch, run(engine, batch))


def test_only_the_too_long_prompt_fails(vllm_engine: Engine) -> None:
    long = Request("long", [5] * 600, GenerationSettings(max_new_tokens=8), 0)
    outcomes = run(vllm_engine, [long, *questions(2)])
    refused = outcomes["long"]
    assert isinstance(refused, Failure)
    assert refused.reason.startswith("HTTP 400: ")
    assert "600" not in refused.reason
    assert all(isinstance(outcomes[key], Completion) for key in ("q0", "q1"))


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
