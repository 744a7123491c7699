"""The library of `cpu_kernels.cpp`, with the operations `torch.ops.draftsmith`: built once on a machine, and loaded.

It is stored in draftsmith's cache, named after its source, torch, and the compiler with the instructions that this
processor has: machines that share a home have a library each. It is built again where it is damaged or another user
could have written it. Where there is no compiler, or it fails, decoding and training use torch's own operations, and
one sentence says how much slower that is.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from draftsmith.files import cache_root, file_sha256, is_own

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
HEADERS = tuple(SOURCE.with_name(name) for name in ("cpu_math.h", "cpu_layers.h"))
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
# Flags that a compiler may not know: for the processor's instructions, and for threads, which are torch's.
MACHINE_FLAGS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ())
WITHOUT = (
    "decoding on this CPU uses torch's own products, which read weights at a third to a half of the memory's "
    "speed: install a C++ compiler (g++ 10 or clang 12, or later)"
)

logger = logging.getLogger(__name__)


def cpp_compiler() -> str | None:
    """Return the path of `$CXX`, or of the first C++ compiler found."""
    requested = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [requested] if requested else ["c++", "g++", "clang++"])), None)


_lanes: int | None = None  # fp32 values in a vector register; 0: there are no kernels, None: not known yet


def has_kernels() -> bool:
    """Return True if the operations are available; the first call builds them, in half a minute.

    If they cannot be built, the reason is logged once.
    """
    global _lanes
    if _lanes is None:
        _lanes = torch.ops.draftsmith.lanes() if _load() else 0
    return _lanes > 0


def vector_lanes() -> int:
    """Return the number of fp32 values in a vector register of this processor; 0 without kernels."""
    return (_lanes or 0) if has_kernels() else 0


def _load() -> bool:
    """Build and load the library. Returns False, after a warning, if it cannot be built."""
    compiler = cpp_compiler()
    if compiler is None:
        logger.warning("there is no C++ compiler: %s", WITHOUT)
        return False
    try:
        torch.ops.load_library(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        reason = next((line for line in output.splitlines() if "error" in line.lower()), output.strip()[:200])
        logger.warning("%s does not build %s (%s): %s", compiler, SOURCE.name, reason.strip(), WITHOUT)
        return False
    _register_shapes()
    return True


def _built(compiler: str) -> Path:
    """Return the library in the cache; build it if it cannot be used, and move it there in one step."""
    sources = [each.read_text(encoding="utf-8") for each in (SOURCE, *HEADERS)]
    parts = (*sources, torch.__version__, _instructions(compiler))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    library = cache_root() / "kernels" / f"cpu-{digest}.so"
    if _is_usable(library):
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not _is_usable(library):
            logger.warning("building %s for this processor, once; it takes half a minute", SOURCE.name)
            with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
                made = Path(scratch, library.name)
                _build(compiler, made)
                made.chmod(0o700)
                with made.open("rb") as stream:
                    os.fsync(stream.fileno())
                library.with_suffix(".sha256").write_text(file_sha256(made), encoding="utf-8")
                made.replace(library)
    return library


def _instructions(compiler: str) -> str:
    """Return the macros that the compiler defines for this processor: its version, and each set of instructions."""
    for flags in MACHINE_FLAGS:
        command = [compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
    raise subprocess.CalledProcessError(done.returncode, compiler, done.stdout, done.stderr)


def _is_usable(library: Path) -> bool:
    """Return True if the library is whole, and nobody else can have written it."""
    sum_file = library.with_suffix(".sha256")
    if not library.is_file() or not sum_file.is_file() or not is_own(library):
        return False
    return sum_file.read_text(encoding="utf-8") == file_sha256(library)


def _build(compiler: str, library: Path, machine_flags: Sequence[Sequence[str]] = MACHINE_FLAGS) -> None:
    """Compile the library.

    Args:
        machine_flags: Tried in order until the compiler accepts one.

    Raises:
        CalledProcessError: With the compiler's errors in `stderr`.
    """
    # Not from torch.utils.cpp_extension, which needs setuptools.
    folder = Path(torch.__file__).parent
    includes = [f"-I{folder / 'include'}", f"-I{folder / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{folder / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [compiler, *FLAGS, abi, *includes, str(SOURCE), "-o", str(library), *libraries]
    for extra in machine_flags:
        done = subprocess.run([*command, *extra], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    raise subprocess.CalledProcessError(done.returncode, compiler, done.stdout, done.stderr)


def _register_shapes() -> None:
    """Register the shapes of the operations' results for torch's compiler."""

    @torch.library.register_fake("draftsmith::linear")
    def _(rows: Tensor, packed: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        return rows.new_empty((*rows.shape[:-1], outputs))

    @torch.library.register_fake("draftsmith::attention")
    def _(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        batch, heads, rows, head_size = query.shape
        return query.new_empty((batch, rows, heads, head_size))

    @torch.library.register_fake("draftsmith::cross_entropy")
    def _(logits: Tensor, labels: Tensor, weights: Tensor, losses: Tensor, is_largest: Tensor) -> None:
        return
