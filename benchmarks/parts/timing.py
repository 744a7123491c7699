"""What every benchmark measures with: the command line, seconds in turns, and bytes."""

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from draftsmith.results import write_result

Work = Callable[[], Any]


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
    """Wait until the device has finished its queued work."""
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
    """Time every work once per turn, so that other load on the machine slows all of them equally."""
    times_s: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warmup + turns):
        for name, work in works.items():
            time_s = seconds(work, device)
            if turn >= warmup:
                times_s[name].append(time_s)
    return times_s


def peak_growth_bytes(work: Work, device: torch.device) -> int | None:
    """Return the largest growth of a call's allocated GPU memory over that before it; None on a CPU."""
    if device.type != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    work()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes
