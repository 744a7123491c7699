"""The tests that need CUDA; their tracebacks are in the step's log."""

import importlib.util
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu.step import Step, run_step

ROOT = Path(__file__).parents[2]
FILES = ("tests/models/groups/test_attention.py", "tests/models/kernels/test_cuda_attention.py")
SUMMARY_S = 12  # for pytest's summary of its failures
INTERRUPTED, NONE_SELECTED = 2, 5  # exit codes of pytest


def main(step: Step) -> None:
    if importlib.util.find_spec("pytest") is None:
        step.add("not_run", "pytest is not installed")
        return
    report = step.folder / f"{step.name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "cuda"]
    command += ["--tb=long", f"--junitxml={report}", *FILES]
    code = run_until(command, step.left_s - SUMMARY_S)
    step.add("exit", code)
    if report.is_file():
        for key, value in counts(report).items():
            step.add(key, value)
    if code not in (0, NONE_SELECTED):
        reason = "was late" if code == INTERRUPTED else f"ended with exit code {code}"
        raise RuntimeError(f"pytest {reason}: see {step.name}.log")


def run_until(command: list[str], limit_s: float) -> int:
    """Run pytest; when it is late interrupt it, so that it still prints the tracebacks of its failures."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return process.wait()  # or until the step is killed


def counts(report: Path) -> dict[str, Any]:
    """Count the results of a JUnit report, and return the message of each failure by the name of its test."""
    results: Counter[str] = Counter()
    failures = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        children = {child.tag: child for child in case}
        bad = children.get("failure", children.get("error"))
        results["failed" if bad is not None else "skipped" if "skipped" in children else "passed"] += 1
        if bad is not None:
            failures[str(case.get("name"))] = str(bad.get("message"))[:300]
    return {**results, "failures": failures}


if __name__ == "__main__":
    run_step(main)
