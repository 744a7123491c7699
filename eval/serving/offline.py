"""vLLM in this process, one model at a time: without the drafter, then with it.

Of the environment, what a CPU needs is set unless it is set already: the scheduler in this process, threads that are
not pinned; and nobody is called at home.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import ValidationError
from transformers import PreTrainedConfig

from draftsmith.data.engines.engine import Completion, EngineSetting, Outcome
from draftsmith.data.engines.vllm_engine import VllmEngine, VllmOptions, llm_arguments
from draftsmith.eval.serving.asking import MeasuredEngine, TimedCompletion
from draftsmith.eval.serving.counts import DraftCounts, of_metrics
from draftsmith.eval.serving.options import OPTIONS_KEY
from draftsmith.models.decoding.kv_cache import cache_shape
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loading import explain

ON_A_CPU = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
LARGEST_CPU_CACHE_BYTES = 4 << 30
CACHE_BLOCK_TOKENS = 128  # vLLM's on a CPU
BYTES_OF_AN_ELEMENT = 4


class MeasuredVllm(VllmEngine):
    """A `VllmEngine` that times its answers and tells its counters."""

    options_key = OPTIONS_KEY

    def counts(self, generated_tokens: int = 0) -> DraftCounts:
        return of_metrics(self.llm.get_metrics())

    def forget_prompts(self) -> None:
        self.llm.reset_prefix_cache()

    def _outcome(self, request_output: Any) -> Outcome:
        outcome, times = super()._outcome(request_output), request_output.metrics
        if not isinstance(outcome, Completion):
            return outcome
        rest_s = max(0.0, times.last_token_ts - times.first_token_ts)
        return TimedCompletion(outcome.token_ids, outcome.finish_reason, None, times.first_token_latency, rest_s)


@contextmanager
def offline_engine(arguments: dict[str, Any], end_ids: tuple[int, ...]) -> Iterator[MeasuredEngine]:
    """
    Raises:
        UserError: vLLM refuses the target, the drafter or the options.
    """
    for name, value in (QUIET if torch.cuda.is_available() else QUIET | ON_A_CPU).items():
        os.environ.setdefault(name, value)
    engine = MeasuredVllm(arguments, end_ids)
    try:
        yield engine
    finally:
        engine.close()


def read_options(values: dict[str, Any]) -> VllmOptions:
    """
    Raises:
        UserError: They are not the engine's, or of several copies of the target.
    """
    try:
        options = VllmOptions.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(VllmOptions, error, OPTIONS_KEY)) from None
    if options.data_parallel_size > 1:
        raise UserError(f"{OPTIONS_KEY}: data_parallel_size is of distillation: one copy of the target is measured")
    return options


def measured_arguments(
    options: VllmOptions, setting: EngineSetting, config: PreTrainedConfig, length_tokens: int, most_at_once: int
) -> dict[str, Any]:
    """The arguments of `vllm.LLM`, with what was left open sized for these questions.

    Args:
        config: The target's.
        length_tokens: Of the longest conversation, with room for a draft.
        most_at_once: Requests.
    """
    sized: dict[str, Any] = {"max_model_len": length_tokens, "concurrency": most_at_once}
    if not torch.cuda.is_available():
        sized |= {"enforce_eager": True, "kv_cache_memory_bytes": cpu_cache_bytes(config, length_tokens, most_at_once)}
    chosen = {key: value for key, value in sized.items() if key not in options.model_fields_set}
    arguments = llm_arguments(options.model_copy(update=chosen), setting)
    return {**arguments, "disable_log_stats": False}


def cpu_cache_bytes(config: PreTrainedConfig, length_tokens: int, most_at_once: int) -> int:
    """Keys and values of as many conversations, the drafter's as many again; at most 4 GiB unless one needs more."""
    capacity = (length_tokens // CACHE_BLOCK_TOKENS + 2) * CACHE_BLOCK_TOKENS
    of_one = 2 * math.prod(cache_shape(config.get_text_config(), 1, capacity)) * BYTES_OF_AN_ELEMENT
    return max(of_one, min(most_at_once * of_one, LARGEST_CPU_CACHE_BYTES))
