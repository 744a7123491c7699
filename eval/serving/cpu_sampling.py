"""A vLLM plugin that corrects vLLM 0.32's sampling on a CPU when it drafts at temperatures above 0.

vLLM's kernel that gives each draft token its request's temperature (top-k and top-p too) writes there to an int64 copy
of its output, which is thrown away, so that the target's probabilities are computed from uninitialised memory
(`utils/cpu_triton_utils.py`, `_expand_kernel_impl`). Greedy answers do not use this kernel, and GPUs have another one.

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
    """Repeat each request's value for each of its draft tokens; the arguments are named as in vLLM's kernel.

    Args:
        output: [tokens], written to.
        input_val: [requests].
        cu_num_tokens: [requests], cumulated numbers of tokens.
        replace_from, replace_to: A value of the input, and its replacement.
        MAX_NUM_TOKENS: Most tokens of a request; not used here.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(input_val.masked_fill(input_val == replace_from, replace_to).repeat_interleave(counts))


def correct() -> None:
    """Replace vLLM's faulty kernel by `expanded`, if the environment asks for it.

    Raises:
        RuntimeError: This vLLM has no such kernel.
    """
    if os.environ.get(SWITCH) != "1":
        return
    from vllm.utils import cpu_triton_utils

    if not hasattr(cpu_triton_utils, REPLACED):
        raise RuntimeError(f"{SWITCH} is for vLLM 0.32 on a CPU, and this vLLM has no {REPLACED}: unset the variable")
    setattr(cpu_triton_utils, REPLACED, expanded)
