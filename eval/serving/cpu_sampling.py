"""The correction that vLLM 0.32 needs on a CPU before it drafts at temperatures above 0: a plugin of vLLM's.

vLLM's kernel that gives each drafted token its request's temperature (top-k and top-p too) is called with an int64 copy
of the output there, which is thrown away, so that the target's probabilities are those of whatever was in memory
(`utils/cpu_triton_utils.py`, `_expand_kernel_impl`). Greedy answers do not pass through it, and GPUs have another.

vLLM calls `correct` in each of its processes (entry point `vllm.general_plugins` in pyproject.toml); it does nothing
unless the environment has `SWITCH=1`.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

SWITCH = "DRAFTSMITH_CORRECT_CPU_SAMPLING"
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "draftsmith_cpu_sampling"
REPLACED = "_expand_kernel_impl"


def expanded(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: Any,
    replace_to: Any,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Repeat each request's value for every drafted token of it; the arguments are named as vLLM's kernel has them.

    Args:
        output: [tokens], written to.
        input_val: [requests].
        cu_num_tokens: [requests], tokens up to and with each.
        replace_from, replace_to: A value, and what stands for it.
        MAX_NUM_TOKENS: Of a request; not needed here.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(input_val.masked_fill(input_val == replace_from, replace_to).repeat_interleave(counts))


def correct() -> None:
    """
    Raises:
        RuntimeError: This vLLM does not run on a CPU, or has no such function.
    """
    if os.environ.get(SWITCH) != "1":
        return
    from vllm.utils import cpu_triton_utils

    if not hasattr(cpu_triton_utils, REPLACED):
        raise RuntimeError(f"{SWITCH} is for vLLM 0.32, and this one has no {REPLACED}: leave it out")
    setattr(cpu_triton_utils, REPLACED, expanded)
