"""The correction that vLLM 0.32 needs on a CPU before it drafts at temperatures above 0.

Its kernel that gives each drafted token its request's temperature (top-k and top-p too) is called with an int64 copy of
the output there, which is thrown away, so that the target's probabilities are those of whatever lay in memory
(`utils/cpu_triton_utils.py`, `_expand_kernel_impl`). Greedy answers do not pass through it, and GPUs have another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from draftsmith.eval.serving.options import CORRECTION
from draftsmith.recipes.errors import UserError

REPLACED = "_expand_kernel_impl"


def expanded(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: Any,
    replace_to: Any,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Each request's value, once for every drafted token of it; the arguments are named as vLLM's kernel has them.

    Args:
        output: [tokens], written to.
        input_val: [requests].
        cu_num_tokens: [requests], tokens up to and with each.
        replace_from, replace_to: A value, and what stands for it.
        MAX_NUM_TOKENS: Of a request; of no use here.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(input_val.masked_fill(input_val == replace_from, replace_to).repeat_interleave(counts))


@contextmanager
def corrected_cpu_sampling() -> Iterator[None]:
    """For every `vllm.LLM` that is made within, in this process.

    Raises:
        UserError: This vLLM does not run on a CPU, or has no such function.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise UserError(
            f"{CORRECTION} is for vLLM on a CPU, and this one runs on {current_platform.device_type}: leave it out"
        )
    from vllm.utils import cpu_triton_utils

    original = getattr(cpu_triton_utils, REPLACED, None)
    if original is None:
        raise UserError(f"{CORRECTION} is for vLLM 0.32, and this one has no {REPLACED}: leave it out")
    setattr(cpu_triton_utils, REPLACED, expanded)
    try:
        yield
    finally:
        setattr(cpu_triton_utils, REPLACED, original)
