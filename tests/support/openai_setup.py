"""Requests to the openai engine, and servers and engines that are stopped at the end of a test."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from support import tiny_tokenizers as templates
from support.fake_openai_server import END_ID, FakeServer, answer_ids
from support.tiny_tokenizers import tiny_tokenizer

from draftsmith.data.engines.engine import (
    Completion,
    Engine,
    EngineSetting,
    GenerationSettings,
    Outcome,
    Request,
)
from draftsmith.data.engines.openai_engine import OpenAIEngine
from draftsmith.recipes.schema import Recipe

TOKENIZER = tiny_tokenizer(templates.CHATML)
StartServer = Callable[..., FakeServer]
StartEngine = Callable[..., OpenAIEngine]


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    started: list[FakeServer] = []

    def start(*script: Any, **how: Any) -> FakeServer:
        started.append(FakeServer(*script, **how))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def start_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartEngine]:
    """Start openai engines with short pauses."""
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr(openai._base_client, "MAX_RETRY_DELAY", 0.05)
    started: list[OpenAIEngine] = []

    def start(
        *servers: FakeServer,
        distill: dict[str, Any] | None = None,
        target: dict[str, Any] | None = None,
        **options: Any,
    ) -> OpenAIEngine:
        options = {"base_urls": [server.url for server in servers], "timeout_s": 5, "give_up_after_s": 5, **options}
        engine = OpenAIEngine.make(OpenAIEngine.Options(**options), setting(target, **(distill or {})))
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


def setting(target: dict[str, Any] | None = None, **distill: Any) -> EngineSetting:
    values = {"name": "x", "target": target or {}, "data": {"distill": {"engine": "openai", **distill}}}
    recipe = Recipe.model_validate(values)
    return EngineSetting(recipe, TOKENIZER, (END_ID,))


def requests(count: int, **sampling: Any) -> list[Request]:
    drawn = GenerationSettings(**{"max_new_tokens": 32, **sampling})
    return [Request(f"c{n}", [5, 6, n], drawn, seed=2**62 + n) for n in range(count)]


def run(engine: Engine, batch: list[Request]) -> dict[str, Outcome]:
    """Submit the requests to any engine and wait for the outcome of each, of which there is one."""
    for request in batch:
        engine.submit(request)
    outcomes: dict[str, Outcome] = {}
    while len(outcomes) < len(batch):
        for key, outcome in engine.collect():
            assert key not in outcomes
            outcomes[key] = outcome
    return outcomes


def right_answers(batch: list[Request]) -> dict[str, Outcome]:
    return {request.key: Completion(answer_ids(request.prompt_ids), "stop") for request in batch}
