"""First look at a GPU, in six minutes: is everything right there, and what does it cost?

    make gpu
    python -m benchmarks.gpu [--budget 360] [--out runs/gpu] [STEP ...]
    python -m benchmarks.gpu --device cpu      # a rehearsal at tiny sizes, without a GPU

Please send FOLDER/summary.md and FOLDER/result.json. Both are written after every step. A step is a process with a
time limit, and its output is FOLDER/STEP.log; one that fails or is late ends no other. First the facts; then all checks
of correctness, several at a time on a machine with enough cores, in at most half of the time; then, each alone, what is
timed, by worth, in the time that is left. Nothing is downloaded. Without pytest its tests are left out.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# The package of this checkout, whether it is installed or not, and the other benchmarks.
PATHS = [str(ROOT / ".typing"), str(ROOT / "benchmarks")]
sys.path[:0] = PATHS

from draftsmith.results import write_result  # noqa: E402
from gpu.page import last_line, load_figures, problems, summary  # noqa: E402

BUDGET_S = {"cuda": 360, "cpu": 1800}
SLOWER = {"cuda": 1, "cpu": 4}  # factor on all limits
CHECKS_SHARE = 0.5  # of the budget, for facts and checks together
CORES_PER_STEP = 1.5
LAST_WORDS_S = 8  # between SIGTERM and SIGKILL
LEAST_S = 5  # less is not worth starting a process


@dataclass
class Job:
    """A step and its process.

    command: arguments of Python. limit_s: seconds on a GPU. is_timed: runs alone.
    """

    name: str
    command: list[str]
    limit_s: float
    is_timed: bool = True


def job(name: str, limit_s: float, module: str | None = None, part: str | None = None, is_timed: bool = False) -> Job:
    return Job(name, ["-m", f"gpu.{module or name}", name, *([part] if part else [])], limit_s, is_timed)


FACTS = job("facts", 40, is_timed=True)
CHECKS = [
    job("tests", 90, "cuda_tests"),
    *(job(f"kinds_{number}", 180, "kinds", f"{number}/3") for number in (1, 2, 3)),
    job("quickstart", 180),
    *(job(f"compile_{rows}", 120, "step_cost", str(rows)) for rows in (1, 8, 16, 64)),
]
TIMED = [
    job("step_cost", 130, is_timed=True),
    job("distill", 50, is_timed=True),
    job("training", 50, is_timed=True),
]


class Run:
    """All steps of one run, and its two files.

    Args:
        device: `cuda`, or `cpu` for a rehearsal.
        folder: Folder of all results.
        budget_s: Seconds for all steps together.
        command: Command that measures again, for the result file.
    """

    def __init__(self, device: str, folder: Path, budget_s: float, command: str) -> None:
        self._device, self._folder, self._budget_s, self._command = device, folder.absolute(), budget_s, command
        self._started_s = time.monotonic()
        self.outcomes: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._running: list[tuple[Job, subprocess.Popen[bytes], float, float]] = []  # with its start and its limit
        folder.mkdir(parents=True, exist_ok=True)

    def left_s(self, share: float = 1.0) -> float:
        """Return the seconds that are left of a share of the budget."""
        return share * self._budget_s - (time.monotonic() - self._started_s)

    def run(self, jobs: Sequence[Job], share: float = 1.0, at_a_time: int = 1) -> None:
        """Run steps in their order, several at a time, within their limits and a share of the budget."""
        waiting = list(jobs)
        try:
            while waiting or self._running:
                while waiting and len(self._running) < at_a_time:
                    self._begin(waiting.pop(0), share)
                for entry in list(self._running):
                    self._look_at(*entry)
                time.sleep(0.1)
        finally:  # Ctrl-C
            for _, process, *_ in self._running:
                end(process)

    def _begin(self, each: Job, share: float) -> None:
        limit_s = min(each.limit_s * SLOWER[self._device], self.left_s(share) - LAST_WORDS_S)
        self._names.append(each.name)
        if limit_s < LEAST_S:
            self._add(each, None, 0.0, limit_s, ["no time was left"])
        else:
            self._running.append((each, self._start(each, limit_s), time.monotonic(), limit_s))

    def _look_at(self, each: Job, process: subprocess.Popen[bytes], started_s: float, limit_s: float) -> None:
        """End a step that is late, and add the outcome of one that has ended."""
        spent_s = time.monotonic() - started_s
        is_late = process.poll() is None and spent_s > limit_s
        if is_late:
            end(process)
        if process.poll() is not None:
            self._running.remove((each, process, started_s, limit_s))
            kill_group(process)
            reasons = [f"ended after its limit of {limit_s:.0f} s"] if is_late else []
            self._add(each, process.returncode, spent_s, limit_s, reasons)

    def _start(self, each: Job, limit_s: float) -> subprocess.Popen[bytes]:
        path = [*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        threads = {} if each.is_timed else {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        environment = {**os.environ, **offline, **threads, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
        (self._folder / f"{each.name}.json").unlink(missing_ok=True)
        arguments = ["--device", self._device, "--out", str(self._folder), "--until", f"{time.time() + limit_s:.0f}"]
        command = [sys.executable, *each.command, *arguments]
        with (self._folder / f"{each.name}.log").open("wb") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _add(self, each: Job, code: int | None, spent_s: float, limit_s: float, reasons: list[str]) -> None:
        """Add a step's outcome and write both files."""
        reasons = reasons + problems(load_figures(self._folder, each.name))
        if code and not reasons:
            log = (self._folder / f"{each.name}.log").read_text(encoding="utf-8", errors="replace")
            reasons = [last_line(log)]
        outcome = {"step": each.name, "exit": "not run" if code is None else code, "seconds": round(spent_s, 1)}
        self.outcomes.append({**outcome, "limit_s": round(limit_s), "problems": reasons})
        print(
            f"{each.name}: exit code {outcome['exit']}, {spent_s:.0f} s{''.join(f'; {line}' for line in reasons)}",
            flush=True,
        )
        figures = {name: load_figures(self._folder, name) for name in self._names}
        write_result(self._folder / "result.json", {"steps": self.outcomes, **figures}, self._command)
        title = f"draftsmith on {'a GPU' if self._device == 'cuda' else 'a CPU: a rehearsal at tiny sizes'}"
        page = summary(title, self.outcomes, figures)
        (self._folder / "summary.md").write_text(page, encoding="utf-8")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a step and all that it started: SIGTERM, then SIGKILL."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS_S)
    kill_group(process)
    process.wait()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [each.name for each in (FACTS, *CHECKS, *TIMED)]
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"by default all: {', '.join(names)}")
    parser.add_argument("--device", choices=BUDGET_S, default="cuda")
    parser.add_argument("--budget", type=float, help="seconds for all steps together (default: 360; on a CPU 1800)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of the results")
    options = parser.parse_args()
    if unknown := set(options.steps) - set(names):
        parser.error(f"no step is named {', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    chosen = set(options.steps or names)
    budget_s = options.budget or BUDGET_S[options.device]
    run = Run(options.device, options.out, budget_s, shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]))
    at_a_time = max(1, int((os.cpu_count() or 1) / CORES_PER_STEP)) if options.device == "cuda" else 1
    with suppress(KeyboardInterrupt):  # the files have all until then
        run.run([each for each in [FACTS] if each.name in chosen])
        run.run([each for each in CHECKS if each.name in chosen], CHECKS_SHARE, at_a_time)
        run.run([each for each in TIMED if each.name in chosen])
    page = options.out / "summary.md"
    if run.outcomes:
        print(f"{page.read_text(encoding='utf-8')}\nplease send {page} and {options.out / 'result.json'}")


if __name__ == "__main__":
    main()
