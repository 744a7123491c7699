"""Interface between self-distillation and the engines that generate answers: requests in, outcomes out.

An engine is one file, `data/engines/<name>_engine.py`, named by `data.distill.engine`, with a module attribute
`ENGINE`: a class with `Options` and `make`. Requests are independent of each other; the caller decides their order.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from draftsmith.data.tokens.chat_tokens import answer_end_ids
from draftsmith.errors import UserError
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.loading import load_generation_config
from draftsmith.recipes.loading import explain
from draftsmith.recipes.schema import Recipe

FinishReason = Literal["stop", "length"]
SERVED_NAME = "target"  # of the target in a vLLM server that draftsmith starts, or prints the command of


@dataclass(frozen=True)
class GenerationSettings(Sampling):
    """Sampling settings of an answer (temperature, top-k, top-p), and its largest number of new tokens."""

    max_new_tokens: int = 512


@dataclass(frozen=True)
class Request:
    """Request for one answer.

    key: id of the conversation, unique among the requests in flight.
    prompt_ids: token ids of the prompt, as the target's chat template renders it.
    seed: seed for sampling this answer at temperatures above 0; 63 bits.
    tools: the tools that the prompt offers.
    """

    key: str
    prompt_ids: list[int]
    settings: GenerationSettings
    seed: int
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Completion:
    """An answer. finish_reason: `stop` if the target ended it, `length` if it was cut at its largest number of tokens.

    token_ids: ids with the end token if `finish_reason` is `stop`. None: the engine returned only `text`.
    text: without the end token; special tokens only around thoughts and calls. None: to be decoded from `token_ids`.
    """

    token_ids: list[int] | None
    finish_reason: FinishReason
    text: str | None = None


@dataclass(frozen=True)
class Failure:
    """A request that got no answer. reason: short, to count by, as `HTTP 400`. is_final: a retry would fail again."""

    reason: str
    is_final: bool = False


Outcome = Completion | Failure


class Engine(Protocol):
    """Interface of an engine, which answers requests in any order.

    concurrency: number of requests in flight that the engine can use.
    max_length_tokens: most tokens of a prompt and its answer together; None if there is no limit.
    """

    concurrency: int
    max_length_tokens: int | None

    def submit(self, request: Request) -> None:
        """Queue a request and return immediately; `collect` returns its outcome."""

    def collect(self) -> list[tuple[str, Outcome]]:
        """Wait for an outcome, and return all (key, outcome) pairs that have arrived.

        Raises:
            UserError: No more answers can be generated: no server answers, or a batch does not fit into memory.
        """
        ...

    def close(self) -> None:
        """Release servers, processes and memory; requests in flight are lost."""


@dataclass(frozen=True)
class EngineSetting:
    """Inputs of an engine: a recipe whose target answers, the target's tokenizer, and the tokens that end an answer.

    features: folder for the hidden states that servers write next to their answers; None: they are not requested.
    """

    recipe: Recipe
    tokenizer: Any
    end_ids: tuple[int, ...]
    features: Path | None = None

    @staticmethod
    def of(recipe: Recipe, tokenizer: Any, features: Path | None = None) -> EngineSetting:
        """Build the setting for the model that answers for a recipe: `data.distill.model`, or by default the target."""
        answering = recipe.model_copy(update={"target": recipe.answering_target})
        end_ids = answer_end_ids(load_generation_config(answering.target), tokenizer)
        return EngineSetting(answering, tokenizer, tuple(end_ids), features)


def engine_class(name: str) -> Any:
    """Import the engine of this name and return its class, which has `Options` and `make`."""
    return importlib.import_module(f"draftsmith.data.engines.{name}_engine").ENGINE


def engine_options(recipe: Recipe) -> Any:
    """Validate the options of the recipe's engine and return them as an object of its class `Options`.

    Raises:
        UserError: An option is unknown or invalid.
    """
    chosen = recipe.data.distill
    kind = engine_class(chosen.engine)
    try:
        return kind.Options.model_validate(chosen.options)
    except ValidationError as error:
        raise UserError(explain(kind.Options, error, "data.distill.options")) from None


def answer_options(recipe: Recipe) -> dict[str, Any]:
    """Return the engine's options that change answers (its `answer_keys`) and are set, by recipe key."""
    options = engine_options(recipe)
    chosen = options.model_dump(include=getattr(options, "answer_keys", set()), exclude_defaults=True)
    return {f"data.distill.options.{key}": value for key, value in chosen.items() if value}


def check_engine(recipe: Recipe) -> Any:
    """Check the options and packages of the recipe's engine, and return the options.

    Raises:
        UserError: An option is unknown or invalid, or a package that the engine needs is not installed.
    """
    options, kind = engine_options(recipe), engine_class(recipe.data.distill.engine)
    if hasattr(kind, "check_installed"):
        kind.check_installed()
    return options


@contextmanager
def open_engine(setting: EngineSetting) -> Iterator[Engine]:
    """Build the recipe's engine, and close it when the context ends.

    Raises:
        UserError: See `check_engine`; or the engine cannot be built.
    """
    options = check_engine(setting.recipe)
    engine = engine_class(setting.recipe.data.distill.engine).make(options, setting)
    try:
        yield engine
    finally:
        engine.close()
