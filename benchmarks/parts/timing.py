"""What every benchmark measures with: seconds in turns, bytes, launches, the command line, and a suite that goes on."""

import argparse
import gc
import platform
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from draftsmith.recipes.results import write_result
from parts.shapes import Shape

MOST_CHARACTERS = 2000
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


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a command line with `--json`; the script's docstring is its help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    return parser


def write_figures(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Write the figures where `--json` says, if it was given."""
    if options.json:
        write_result(options.json, figures)


def wait(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Work, device: torch.device) -> float:
    """Time one call, from an idle device to an idle device."""
    wait(device)
    begin_s = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - begin_s


def in_turns(works: Mapping[str, Work], device: torch.device, turns: int, warmup: int = 2) -> dict[str, list[float]]:
    """Time every work in each turn, so that whatever else runs slows all of them alike."""
    times_s: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warmup + turns):
        for name, work in works.items():
            time_s = seconds(work, device)
            if turn >= warmup:
                times_s[name].append(time_s)
    return times_s


def ratios(name: str, times_s: list[float], base_s: list[float]) -> dict[str, float]:
    """Divide turn by turn: the median, the extremes, and the ratio of the best times, which noise spoils least."""
    by_turn = [time_s / of_base for time_s, of_base in zip(times_s, base_s, strict=True)]
    return {
        name: median(by_turn),
        f"{name}_lowest": min(by_turn),
        f"{name}_highest": max(by_turn),
        f"{name}_of_best": min(times_s) / min(base_s),
    }


def compare(work: Work, base: Work, device: torch.device, turns: int) -> dict[str, float]:
    """Time `work` against `base`: both medians, and the ratio by turns."""
    times_s = in_turns({"work": work, "base": base}, device, turns)
    medians = {"median_s": median(times_s["work"]), "base_s": median(times_s["base"])}
    return {**medians, **ratios("ratio", times_s["work"], times_s["base"])}


def peak_growth_bytes(work: Work, device: torch.device) -> int | None:
    """Return what a call allocates at most beside what is there before it; None on a CPU, which does not count it."""
    if device.type != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    work()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes


def peak_resident_bytes() -> int:
    """Return the largest resident set of this process so far (Linux: ru_maxrss begins with the parent's)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def free_memory(device: torch.device) -> None:
    """Give back what nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_facts(device: torch.device) -> dict[str, Any]:
    """Say which device this is, and what runs on it."""
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
    """Count launches, waits and copies of a mean round, or training step, by torch's profiler.

    Two answers of different length are profiled: their difference belongs to the rounds alone, not to the prompt.

    Args:
        answer: Generates so many tokens, or takes so many steps; returns in how many rounds.
        few, many: Numbers of tokens.
    """
    found = []
    for tokens in (few, many):
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        with profile(activities=activities) as profiler:
            rounds = answer(tokens)
        found.append((count((event.key, event.count) for event in profiler.key_averages()), rounds))
    (of_few, few_rounds), (of_many, many_rounds) = found
    return {kind: (of_many[kind] - of_few[kind]) / (many_rounds - few_rounds) for kind in KINDS}


def count(events: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Add up events, (name, how often), by `KINDS`."""
    counts = dict.fromkeys(KINDS, 0)
    for name, times in events:
        for kind, beginnings in KINDS.items():
            counts[kind] += times if name.startswith(beginnings) else 0
    return counts


@dataclass
class Suite:
    """One measurement after the other: one that fails is noted down with its error, and the next is made.

    Args:
        shape: Sizes to measure at.
        end_s: On the clock. A measurement is not begun when less is left than the longest one took so far.
        figures, errors: By the measurement's name.
        left_out: Names of the measurements that there was no time for.
    """

    shape: Shape
    device: torch.device
    end_s: float
    clock: Callable[[], float] = time.monotonic
    figures: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    _longest_s: float = 0.0

    def run(self, part: Callable[["Suite"], None]) -> "Suite":
        """Make all measurements of a part; an error between them ends it."""
        self._guarded("part", part, self)
        return self

    def measure(self, name: str, work: Callable[..., Any], *inputs: Any) -> None:
        """Note down what `work` returns for the inputs, or its error."""
        begin_s = self.clock()
        if begin_s + self._longest_s > self.end_s:
            self.left_out.append(name)
            return
        value = self._guarded(name, work, *inputs)
        self._longest_s = max(self._longest_s, self.clock() - begin_s)
        if value is not None:
            self.figures[name] = value
        free_memory(self.device)

    def _guarded(self, name: str, work: Callable[..., Any], *inputs: Any) -> Any:
        try:
            return work(*inputs)
        except Exception as error:
            said = " ".join(str(error).split())[:MOST_CHARACTERS]
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.errors[name] = f"{type(error).__name__}: {said} ({Path(frame.filename).name}:{frame.lineno})"
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            return None
