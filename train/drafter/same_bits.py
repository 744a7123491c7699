"""The same weights from the same tokens and seed, every time, on one machine.

With several threads torch's scatter-like kernels (the backward of indexing, above all) add up in the order in which
threads happen to come: the last bit differs from run to run, and after some hundred steps the drafter does. Its
deterministic kernels add up in one order. What is left is the number of threads, by which sums are cut into parts.

On a CPU this is always on. On CUDA `train.full_determinism: true` is what the Trainer has for it, at a price.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic
from transformers import TrainingArguments


@contextmanager
def same_bits_every_time(args: TrainingArguments) -> Iterator[None]:
    """In here torch's kernels are deterministic, if training runs on a CPU."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    checks: Any = deterministic  # its flag is a property that type checkers do not see
    fills = checks.fill_uninitialized_memory
    if args.device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        checks.fill_uninitialized_memory = False  # finds bugs, and costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        checks.fill_uninitialized_memory = fills


def reproducible_where(args: TrainingArguments) -> str | None:
    """What the same command must have in common to give the same bits, for `training.json`; None: it may not."""
    if args.device.type == "cpu":
        return f"this processor, these versions, {torch.get_num_threads()} threads, {args.world_size} process(es)"
    return "this device, these versions" if args.full_determinism else None
