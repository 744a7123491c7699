"""The operations of `cpu_kernels.cpp`, `torch.ops.draftsmith.linear`, `attention` and `read`: built once on a machine.

The library lies in draftsmith's cache, named after its source, torch, the compiler and the processor. Where there is no
compiler, or it refuses, decoding goes on with torch's own operations, and one sentence says what that costs.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from draftsmith.recipes.provenance import Machine
from draftsmith.recipes.run_folder import cache_root

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
DTYPES = (torch.float32, torch.bfloat16)
MOST_VECTORS = 16  # of a head; MOST_PARTS in the source
MOST_ROWS = 64  # of one attention: beyond it, as in a prompt, torch's own is as fast
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
WITHOUT = (
    "decoding on this CPU goes on with torch's own products, which read weights at a third to a half of the memory's "
    "speed: install a C++ compiler (g++ 10 or clang 12, or later)"
)

logger = logging.getLogger(__name__)


def cpp_compiler() -> str | None:
    """The path of `$CXX`, or of the first C++ compiler that there is."""
    wanted = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [wanted] if wanted else ["c++", "g++", "clang++"])), None)


_lanes: int | None = None  # of a vector of this processor; 0: there are no kernels, None: nobody has asked yet


def has_kernels() -> bool:
    """Whether the operations are there; builds them the first time, in half a minute.

    Where they cannot be, the reason is logged once.
    """
    global _lanes
    if _lanes is None:
        _lanes = torch.ops.draftsmith.lanes() if _load() else 0
    return _lanes > 0


def _load() -> bool:
    compiler = cpp_compiler()
    if compiler is None:
        logger.warning("there is no C++ compiler: %s", WITHOUT)
        return False
    try:
        torch.ops.load_library(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        reason = next((line for line in said.splitlines() if "error" in line.lower()), said.strip()[:200])
        logger.warning("%s does not build %s (%s): %s", compiler, SOURCE.name, reason.strip(), WITHOUT)
        return False
    _register_shapes()
    return True


def can_attend(query: Tensor, mask: Tensor | None) -> bool:
    """Whether `attention` takes these: query [B, H, R, D], mask [1, 1, R, S] additive, or None for a single row.

    Keys and values must be like the query: in dtype, in head size, and contiguous in it.
    """
    batch, _, rows, head_size = query.shape
    return (
        batch == 1
        and query.device.type == "cpu"
        and query.dtype in DTYPES
        and query.stride(3) == 1
        and (
            rows == 1 if mask is None else rows <= MOST_ROWS and mask.dtype == query.dtype and mask.shape[:2] == (1, 1)
        )
        and not torch.is_grad_enabled()
        and has_kernels()
        and head_size % (_lanes or 1) == 0
        and head_size <= MOST_VECTORS * (_lanes or 0)
    )


def _built(compiler: str) -> Path:
    """The library, from the cache or built into it under its name in one step."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    machine = Machine.here()
    parts = (SOURCE.read_text(encoding="utf-8"), torch.__version__, version, machine.processor, machine.platform)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    library = cache_root() / "kernels" / f"cpu-{digest}.so"
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.is_file():
            logger.warning("building %s for this processor, once: half a minute", SOURCE.name)
            with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
                made = Path(scratch, library.name)
                _build(compiler, made)
                made.replace(library)
    return library


def _build(compiler: str, library: Path) -> None:
    """
    Raises:
        CalledProcessError: With what the compiler said in `stderr`.
    """
    # Not from torch.utils.cpp_extension, which needs setuptools.
    folder = Path(torch.__file__).parent
    includes = [f"-I{folder / 'include'}", f"-I{folder / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{folder / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [compiler, *FLAGS, abi, *includes, str(SOURCE), "-o", str(library), *libraries]
    # What a compiler may not know: the processor's own instructions, and threads, which are torch's.
    for extra in (["-march=native", "-fopenmp"], ["-mcpu=native", "-fopenmp"], ["-march=native"], []):
        done = subprocess.run([*command, *extra], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    raise subprocess.CalledProcessError(done.returncode, compiler, done.stdout, done.stderr)


def _register_shapes() -> None:
    """What the compiler must know of the operations: the shapes of their results."""

    @torch.library.register_fake("draftsmith::linear")
    def _(rows: Tensor, packed: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        return rows.new_empty((*rows.shape[:-1], outputs))

    @torch.library.register_fake("draftsmith::attention")
    def _(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        batch, heads, rows, head_size = query.shape
        return query.new_empty((batch, rows, heads, head_size))
