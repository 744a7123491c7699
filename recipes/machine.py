"""What a figure was measured on."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Machine:
    """`processor`: its model, where the system says it; `memory_bytes`: all there is. Earlier versions noted less."""

    platform: str
    processor: str
    cpu_count: int | None
    omp_num_threads: str | None
    memory_bytes: int | None = None

    @staticmethod
    def here() -> "Machine":
        return Machine(
            platform.platform(),
            _processor_model() or platform.processor() or platform.machine(),
            os.cpu_count(),
            os.environ.get("OMP_NUM_THREADS"),
            _memory_bytes(),
        )


def _processor_model() -> str | None:
    """Linux's own word for it; Python's says only the architecture there."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not every system counts its pages
        return None
