"""The tests that need a CUDA device, which are skipped everywhere else: pytest's marker `cuda`."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from parts.suite import TAIL_CHARACTERS, Suite

ROOT = Path(__file__).resolve().parents[2]


def run(suite: Suite) -> None:
    suite.measure("pytest", run_tests)


def run_tests() -> dict[str, Any]:
    """Counts by outcome.

    Raises:
        RuntimeError: One failed, or none was found.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-p", "no:cacheprovider", f"--junitxml={file}"]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        counts = outcomes(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if process.returncode:
        raise RuntimeError(f"pytest -m cuda: {counts}; {(process.stdout + process.stderr)[-TAIL_CHARACTERS:]}")
    return counts


def outcomes(junit_xml: str) -> dict[str, int]:
    """Of pytest's own report."""
    suite = ElementTree.fromstring(junit_xml).find("testsuite")
    assert suite is not None
    tests, failed, errors, skipped = (int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped"))
    return {"passed": tests - failed - errors - skipped, "failed": failed + errors, "skipped": skipped}
