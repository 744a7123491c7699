"""A whole training step of the parallel drafter, `folded` against `dense`: tokens/s in turns, and peak memory.

    OMP_NUM_THREADS=2 python benchmarks/training_step.py [--json FILE]

A step is the target's forward, the drafter's layer with all its groups, the LM head, the backward and AdamW, at the
embedded target's widths with random weights and every token supervised (the worst case: no row can be skipped).
Peak memory is the growth of the resident set of a fresh process over its size before the first step.
"""

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftsmith.models.drafters.parallel import ParallelDrafter
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import EMBEDDED_TARGET
from draftsmith.recipes.results import write_result

BACKENDS = ("folded", "dense")


class TrainingStep:
    """Target, drafter and optimiser for one backend."""

    def __init__(self, backend: str, num_masks: int) -> None:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(EMBEDDED_TARGET, max_position_embeddings=8192)
        self._target: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self._target.eval().requires_grad_(False)
        self._drafter = ParallelDrafter.from_target(self._target, {"num_masks": num_masks, "attention": backend})
        self._optimizer = torch.optim.AdamW(self._drafter.parameters(), lr=1e-4)

    def run(self, length: int) -> float:
        """Seconds of one step on a row of `length` random tokens."""
        ids = torch.randint(0, self._target.config.vocab_size, (1, length))
        begin_s = time.perf_counter()
        features = target_features(self._target, ids)
        self._drafter(ids, features, torch.ones_like(ids)).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begin_s


def measure_speed(length: int, num_masks: int, turns: int) -> dict[str, float]:
    """Medians over alternating turns, after one to warm up."""
    steps = {backend: TrainingStep(backend, num_masks) for backend in BACKENDS}
    times_s: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for turn in range(turns + 1):
        for backend, step in steps.items():
            time_s = step.run(length)
            if turn:
                times_s[backend].append(time_s)
    ratios = [dense / folded for folded, dense in zip(times_s["folded"], times_s["dense"], strict=True)]
    speeds = {f"{backend}_tokens_per_s": length / statistics.median(times) for backend, times in times_s.items()}
    return {**speeds, "speedup": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def measure_memory(backend: str, length: int, num_masks: int) -> float:
    """MiB, in a process of its own: what a resident set once held it never gives back reliably."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_peak_growth, args=(sender, backend, length, num_masks))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the memory of {backend} at S={length} could not be measured (exit {process.exitcode})")
    return float(receiver.recv())


def _peak_growth(sender: Any, backend: str, length: int, num_masks: int) -> None:
    step = TrainingStep(backend, num_masks)
    step.run(16)  # optimiser state and thread pools belong to the base
    before = _peak_bytes()
    step.run(length)
    sender.send((_peak_bytes() - before) / 2**20)


def _peak_bytes() -> int:
    """Largest resident set of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux ru_maxrss begins with that of the parent process
        lines = status.read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a training step, folded against dense.")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048], help="sequence lengths S")
    parser.add_argument("--masks", type=int, default=4, help="K")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each backend")
    options = parser.parse_args()
    rows = []
    for length in options.lengths:
        row: dict[str, Any] = {"length_tokens": length, "masks": options.masks}
        row |= measure_speed(length, options.masks, options.turns)
        row |= {f"{backend}_mib": measure_memory(backend, length, options.masks) for backend in BACKENDS}
        rows.append(row)
        print(
            f"S={length:5d}  folded {row['folded_tokens_per_s']:7,.0f} tokens/s {row['folded_mib']:6,.0f} MiB   "
            f"dense {row['dense_tokens_per_s']:7,.0f} tokens/s {row['dense_mib']:6,.0f} MiB   "
            f"speedup {row['speedup']:.2f}x ({row['lowest']:.2f} to {row['highest']:.2f})",
            flush=True,
        )
    if options.json:
        write_result(options.json, {"threads": torch.get_num_threads(), "rows": rows})


if __name__ == "__main__":
    main()
