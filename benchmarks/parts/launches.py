"""What a round, or a training step, asks of the device: launches, waits and copies, by torch's profiler.

Two answers of different length are profiled: their difference belongs to the rounds alone, not to the prompt.
"""

from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile

# Names as CUPTI gives them, by their beginnings.
KINDS = {
    "kernel_launches": ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel"),
    "graph_launches": ("cudaGraphLaunch",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "copies_back": ("Memcpy DtoH",),
    "copies_in": ("Memcpy HtoD",),
    "operators": ("aten::",),
}


def launches_per_round(answer: Callable[[int], int], few: int, many: int, device: torch.device) -> dict[str, float]:
    """Means.

    Args:
        answer: Generates so many tokens, or takes so many steps; in how many rounds.
        few, many: Numbers of tokens.
    """
    counts, rounds = zip(*(_profiled(answer, tokens, device) for tokens in (few, many)), strict=True)
    return per_round(counts[0], counts[1], rounds[0], rounds[1])


def per_round(few: dict[str, int], many: dict[str, int], rounds_few: int, rounds_many: int) -> dict[str, float]:
    return {kind: (many[kind] - few[kind]) / (rounds_many - rounds_few) for kind in many}


def count(events: Iterable[tuple[str, int]]) -> dict[str, int]:
    """By kind, of (name, how often)."""
    counts = dict.fromkeys(KINDS, 0)
    for name, times in events:
        for kind, beginnings in KINDS.items():
            if name.startswith(beginnings):
                counts[kind] += times
    return counts


def _profiled(answer: Callable[[int], int], tokens: int, device: torch.device) -> tuple[dict[str, int], int]:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        rounds = answer(tokens)
    return count((event.key, event.count) for event in profiler.key_averages()), rounds
