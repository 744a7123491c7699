"""What `draftsmith eval --engine vllm` takes beside the recipe. Imports nothing heavy: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from draftsmith.recipes.errors import UserError, did_you_mean

OPTIONS_KEY, CORRECTION = "--engine-options", "--correct-cpu-sampling"
ENGINES = ("vllm",)
LEVELS = "1,4,16,64"


@dataclass(frozen=True)
class ServingOptions:
    """concurrency: how many questions are in flight, one measurement each.

    server: URL of one that drafts; plain_server: the same target without a drafter. Without, vLLM's is started.
    server_model: its name there; api_key_env: the environment variable that holds the key.
    engine_options: `VllmOptions` of a server that is started. correct_cpu_sampling: see `cpu_sampling`.
    """

    concurrency: tuple[int, ...] = (1, 4, 16, 64)
    engine_options: dict[str, Any] = field(default_factory=dict)
    server: str | None = None
    plain_server: str | None = None
    server_model: str | None = None
    api_key_env: str | None = None
    correct_cpu_sampling: bool = False

    def __post_init__(self) -> None:
        """
        Raises:
            UserError: What is given does not go together.
        """
        if self.server is None:
            for name, value in (
                ("--plain-server", self.plain_server),
                ("--server-model", self.server_model),
                ("--api-key-env", self.api_key_env),
            ):
                if value is not None:
                    raise UserError(f"option {name} goes with --server, the URL of a vLLM server that drafts")
        else:
            for name, given in ((CORRECTION, self.correct_cpu_sampling), (OPTIONS_KEY, self.engine_options)):
                if given:
                    raise UserError(f"option {name} is for a server that is started here: give it without --server")
        for url in (self.server, self.plain_server):
            if url is not None and not url.startswith(("http://", "https://")):
                raise UserError(f"{url} is no URL of a server: it begins with http:// or https://")


def check_engine(name: str) -> None:
    """
    Raises:
        UserError: There is no such engine.
    """
    if name not in ENGINES:
        raise UserError(f"there is no engine {name}: {did_you_mean(name, ENGINES, 'use vllm')}")


def read_levels(text: str) -> tuple[int, ...]:
    """`1,4,16` as numbers, ascending.

    Raises:
        UserError: They are none.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"option --concurrency: numbers above 0 with commas between them, as {LEVELS}, not {text!r}")
    return tuple(sorted({int(word) for word in words}))


def read_mapping(text: str) -> dict[str, Any]:
    """YAML's `{key: value, ...}`.

    Raises:
        UserError: It is none.
    """
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"option {OPTIONS_KEY}: give a mapping, as '{{max_model_len: 2048}}', not {text!r}")
    return {str(key): value for key, value in values.items()}
