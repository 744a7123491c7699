"""What only a GPU can tell, in less than 25 minutes on one: its tests, then speed, memory and launches.

    make gpu                                                        # into docs/results/machinery/gpu.json
    python benchmarks/gpu.py --shape tiny --json FILE               # the same with small shapes, on any machine
    python benchmarks/gpu.py --parts attention trees --minutes 5 --json FILE
    python benchmarks/gpu.py --shape 135m --parts step_bound        # a training step against its bounds, on a CPU

What is measured is in `parts/`. What fails is in the result as an error, what there was no time for as left out, and
both make the exit code 1; the result is written after each part.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from parts import decoding, training
from parts.shapes import SHAPES
from parts.timing import MOST_CHARACTERS, Suite, benchmark_parser, device_facts, in_turns, write_figures

from draftsmith.recipes.errors import UserError, exit_with_one_sentence
from draftsmith.train.plan.plan import matmul_flops_per_s

MINUTES = 24.0
LONGEST_FRAC = 0.4  # of all the time, for one part
COPIED_BYTES = {"cuda": 4 << 30, "cpu": 1 << 26}


def peaks(suite: Suite) -> None:
    """Measure what the device can do at most: products of large matrices, and reading memory."""
    for dtype in [torch.bfloat16, torch.float32] if suite.device.type == "cuda" else [torch.float32]:
        name = f"matmul_{str(dtype).removeprefix('torch.')}_flops_per_s"
        suite.measure(name, matmul_flops_per_s, suite.device, dtype)
    suite.measure("memory_bytes_per_s", memory_bytes_per_s, suite.device)


def memory_bytes_per_s(device: torch.device) -> float:
    """Time a copy, of which each byte is read and written."""
    source = torch.zeros(COPIED_BYTES[device.type] // 2, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * len(source) / min(in_turns({"copy": lambda: copy.copy_(source)}, device, 10)["copy"])


def run_tests() -> str:
    """Run the tests that are skipped without a CUDA device; returns pytest's last line.

    Raises:
        RuntimeError: A test failed, or there was none.
    """
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-p", "no:cacheprovider"]
    root = Path(__file__).resolve().parents[1]
    process = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"pytest -m cuda: {(process.stdout + process.stderr)[-MOST_CHARACTERS:]}")
    return process.stdout.strip().splitlines()[-1]


# In this order: what compiles, and so takes longest, comes last.
PARTS: dict[str, Callable[[Suite], None]] = {
    "peaks": peaks,
    "tests": lambda suite: suite.measure("pytest", run_tests),
    "attention": training.attention,
    "trees": decoding.trees,
    "drafts": decoding.drafts,
    "step_bound": training.step_bound,
    "compiled_trees": decoding.compiled_trees,
    "compiled_drafts": decoding.compiled_drafts,
}


@exit_with_one_sentence()
def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b", help="of the target; 8b by default")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which nothing new is begun")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.shape in ("8b", "1b") and device.type != "cuda":
        raise UserError("benchmarks/gpu.py finds no CUDA device: use --shape tiny to try it, or --shape 135m on a CPU")
    end_s = time.monotonic() + 60 * options.minutes
    figures: dict[str, Any] = {
        "device": device_facts(device),
        "threads": torch.get_num_threads(),
        "shape": {"name": options.shape, **vars(SHAPES[options.shape])},
        "parts": {},
        "wall_time_s": {},
        "errors": {},
        "left_out": [],
        "complete": False,
    }
    for part in options.parts:
        begin_s = time.monotonic()
        part_end_s = min(end_s, begin_s + LONGEST_FRAC * 60 * options.minutes)
        found = Suite(SHAPES[options.shape], device, part_end_s).run(PARTS[part])
        figures["parts"][part] = found.figures
        figures["errors"] |= {f"{part}: {what}": error for what, error in found.errors.items()}
        figures["left_out"] += [f"{part}: {what}" for what in found.left_out]
        figures["wall_time_s"][part] = round(time.monotonic() - begin_s, 1)
        figures["complete"] = set(figures["parts"]) == set(PARTS) and not figures["errors"] and not figures["left_out"]
        write_figures(options, figures)
        print(f"{part}: {figures['wall_time_s'][part]:.0f} s\n{json.dumps(found.figures, indent=2)}", flush=True)
        print(*(f"{what}: {error}" for what, error in found.errors.items()), sep="\n", flush=True)
    if figures["errors"] or figures["left_out"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
