"""Everything that only a GPU can tell, in less than 25 minutes on one: its tests, then speed, memory and launches.

    make gpu                                                        # into docs/results/machinery/gpu.json and gpu.png
    python benchmarks/gpu.py --tiny --json FILE --picture FILE.png  # the same with small shapes, on any machine
    python benchmarks/gpu.py --parts attention trees --minutes 5 --json FILE
    python benchmarks/gpu.py --shape 135m --parts step_bound        # a training step against its bounds, on a CPU

What is measured is in `parts/`. Each part runs in a process of its own. What fails is in the result as an error, what
there was no time for as left out, and both make the exit code 1; the result is written after each part.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from parts import attention, cuda_tests, drafting, peaks, picture, step_bound, target_steps, training
from parts.shapes import SHAPES
from parts.suite import Findings, Suite, described, run_apart
from parts.timing import device_facts

from draftsmith.recipes.errors import UserError, exit_with_one_sentence
from draftsmith.recipes.results import write_result

# In this order: what compiles, and so takes longest, comes last.
PARTS: dict[str, Callable[[Suite], None]] = {
    "peaks": peaks.run,
    "tests": cuda_tests.run,
    "attention": attention.run,
    "trees": target_steps.run,
    "training": training.run,
    "drafts": drafting.run,
    "step_bound": step_bound.run,
    "compiled_trees": target_steps.run_compiled,
    "compiled_drafts": drafting.run_compiled,
}
MINUTES = 24.0
LONGEST_FRAC = 0.4  # of all the time: a part that hangs leaves some for the others


@exit_with_one_sentence()
def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = options.shape or ("tiny" if options.tiny else "8b")
    if name == "8b" and device.type != "cuda":
        raise UserError("benchmarks/gpu.py finds no CUDA device: use --tiny to try it, or --shape 135m on a CPU")
    end_s = time.monotonic() + 60 * options.minutes
    if options.findings is not None:
        one_part(options.parts[0], name, device, options.findings, end_s)
        return
    figures: dict[str, Any] = {
        "device": device_facts(device),
        "threads": torch.get_num_threads(),
        "shape": SHAPES[name].as_json(),
        "parts": {},
        "wall_time_s": {},
        "errors": {},
        "left_out": [],
        "complete": False,
    }
    for part in options.parts:
        begin_s = time.monotonic()
        part_end_s = min(end_s, begin_s + LONGEST_FRAC * 60 * options.minutes)
        found = findings_of(part, name, device, part_end_s, options.together)
        figures["parts"][part] = found.figures
        figures["errors"] |= {f"{part}: {what}": error for what, error in found.errors.items()}
        figures["left_out"] += [f"{part}: {what}" for what in found.left_out]
        figures["wall_time_s"][part] = round(time.monotonic() - begin_s, 1)
        figures["complete"] = set(figures["parts"]) == set(PARTS) and not figures["errors"] and not figures["left_out"]
        keep(figures, options.json, options.picture)
        tell(part, found, figures["wall_time_s"][part])
    if figures["errors"] or figures["left_out"]:
        sys.exit(1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result there, after each part")
    parser.add_argument("--picture", type=Path, help="draw it there")
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help="some only"
    )
    parser.add_argument("--shape", choices=list(SHAPES), help="of the target; 8b by default")
    parser.add_argument("--tiny", action="store_true", help="the same as --shape tiny")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which nothing new is begun")
    parser.add_argument("--together", action="store_true", help="all in this process, where a crash ends everything")
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)  # of one part, for the process that asked
    return parser.parse_args()


def one_part(part: str, shape: str, device: torch.device, file: Path, end_s: float) -> Findings:
    """In this process."""
    return Suite(SHAPES[shape], device, file, end_s).run(PARTS[part])


def findings_of(part: str, shape: str, device: torch.device, end_s: float, together: bool) -> Findings:
    """In a process of its own, unless `together`."""
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        return Findings(left_out=["all of it"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "findings.json"
        if together:
            return one_part(part, shape, device, file, end_s)
        options = ["--parts", part, "--shape", shape, "--minutes", f"{left_s / 60:.3f}", "--findings", str(file)]
        return run_apart([sys.executable, __file__, *options], file, left_s)


def keep(figures: dict[str, Any], result: Path | None, image: Path | None) -> None:
    """A picture that cannot be drawn is an error like any other."""
    if image is not None:
        device, shape = figures["device"]["name"], figures["shape"]["name"]
        try:
            picture.draw(figures["parts"], f"{device}, target of shape {shape}", image)
        except Exception as error:
            figures["errors"]["picture"] = described(error)
    if result is not None:
        write_result(result, figures)


def tell(part: str, found: Findings, time_s: float) -> None:
    print(f"{part}: {time_s:.0f} s\n{json.dumps(asdict(found), indent=2)}", flush=True)


if __name__ == "__main__":
    main()
