"""Seconds and bytes of what runs on a device, what it asks of the device, and which device that is."""

import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Work = Callable[[], Any]
# Names as CUPTI gives them, by their beginnings.
KINDS = {
    "kernel_launches": ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel"),
    "graph_launches": ("cudaGraphLaunch",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "copies_back": ("Memcpy DtoH",),
    "copies_in": ("Memcpy HtoD",),
    "operators": ("aten::",),
}


def wait(device: torch.device) -> None:
    """Until it has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Work, device: torch.device) -> float:
    """Of one call, from an idle device to an idle device."""
    wait(device)
    begin_s = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - begin_s


def in_turns(works: dict[str, Work], device: torch.device, turns: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each work in each turn, so that what else goes on slows all of them."""
    times_s: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warmup + turns):
        for name, work in works.items():
            time_s = seconds(work, device)
            if turn >= warmup:
                times_s[name].append(time_s)
    return times_s


def compare(work: Work, base: Work, device: torch.device, turns: int) -> dict[str, float]:
    """The median of `work`, that of `base`, and the ratio by turns."""
    times_s = in_turns({"work": work, "base": base}, device, turns)
    ratios = [w / b for w, b in zip(times_s["work"], times_s["base"], strict=True)]
    return {
        "median_s": statistics.median(times_s["work"]),
        "base_s": statistics.median(times_s["base"]),
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
    }


def peak_growth_bytes(work: Work, device: torch.device) -> int | None:
    """What a call needs at most beside what is there before it; None where it is not counted, as on a CPU."""
    if device.type != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    work()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes


def give_memory_back(device: torch.device) -> None:
    """What nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_facts(device: torch.device) -> dict[str, Any]:
    """Which device, with what on it."""
    if device.type != "cuda":
        return {"type": device.type, "name": platform.processor() or platform.machine(), "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": device.type,
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability(device)),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "torch": torch.__version__,
    }


def launches_per_round(answer: Callable[[int], int], few: int, many: int, device: torch.device) -> dict[str, float]:
    """Mean number of launches, waits and copies of a round, or of a training step, by torch's profiler.

    Two answers of different length are profiled: their difference belongs to the rounds alone, not to the prompt.

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
