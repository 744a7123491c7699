"""The library of CPU kernels: built once, again where it is damaged, and one sentence without a compiler."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.models.kernels import cpu_library
from draftsmith.models.kernels.cpu_kernels import can_attend, pack_linears
from draftsmith.models.kernels.cpu_library import cpp_compiler, has_kernels

needs_shell = pytest.mark.skipif(os.name != "posix", reason="needs a shell")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulate a new process of a user without built kernels; return the cache folder."""
    monkeypatch.setattr(cpu_library, "_lanes", None)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], str]:
    """Return a function that installs a fake C++ compiler which defines these macros, and cannot compile."""

    def make(macros: str) -> str:
        script = tmp_path / "c++"
        script.write_text(
            f'#!/bin/sh\ncase "$*" in *-E*) echo "{macros}"; exit 0;; esac\necho "In file included from here:" >&2\n'
            'echo "here:1:1: fatal error: no such header" >&2\nexit 1\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return str(script)

    return make


def check_without(caplog: pytest.LogCaptureFixture, sentence: str) -> None:
    """Check that kernels are absent, one sentence gives the reason, and everything works without them."""
    linear = nn.Linear(8, 8).requires_grad_(False)
    assert not has_kernels()
    pack_linears(linear)
    assert type(linear) is nn.Linear
    with torch.no_grad():
        assert not can_attend(*[torch.zeros(1, 1, 1, 64)] * 3, None)
    (told,) = (record.getMessage() for record in caplog.records if "uses torch's own" in record.getMessage())
    assert sentence in told


def test_missing_compiler_is_reported(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert cpp_compiler() is None
    check_without(caplog, "there is no C++ compiler")
    assert not fresh.exists()


@needs_shell
def test_failing_compiler_is_reported(
    fresh: Path, compiler: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    script = compiler("#define __AVX2__ 1")
    check_without(caplog, f"{script} does not build cpu_kernels.cpp (here:1:1: fatal error: no such header)")
    assert not [entry for entry in fresh.iterdir() if entry.suffix != ".lock"]


@needs_shell
def test_library_is_built_once_for_each_set_of_instructions(
    fresh: Path, compiler: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again if it is cut or empty, without its sum, or others can write it: it is code that would run."""
    built = []

    def build(with_compiler: str, library: Path) -> None:
        built.append(with_compiler)
        library.write_bytes(b"library")

    monkeypatch.setattr(cpu_library, "_build", build)
    script = compiler("#define __AVX2__ 1")
    library = cpu_library._built(script)
    assert cpu_library._built(script) == library
    assert (library.parent, library.read_bytes(), built) == (fresh, b"library", [script])
    for spoil in (
        lambda: library.write_bytes(b"libr"),
        lambda: library.write_bytes(b""),
        lambda: library.with_suffix(".sha256").unlink(),
        lambda: library.chmod(0o770),
    ):
        spoil()
        del built[:]
        assert cpu_library._built(script) == library
        assert (library.read_bytes(), built, library.stat().st_mode & 0o777) == (b"library", [script], 0o700)
    assert cpu_library._built(compiler("#define __AVX512F__ 1")) != library
    assert len(list(fresh.glob("*.so"))) == 2
