"""Errors of disks and paths are one sentence, come before the work where possible, and lose nothing."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets.arrow_writer import ArrowWriter
from safetensors.torch import save_file
from typer.testing import CliRunner

from draftsmith.cli import main as cli
from draftsmith.errors import exit_with_one_sentence, os_error_message
from draftsmith.files import write_atomically

RUNNER = CliRunner()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def to_arrow(file: Path) -> None:
    with ArrowWriter(path=str(file)) as writer:
        writer.write_batch({"a": list(range(40_000))})
        writer.finalize()


@pytest.mark.parametrize(
    "write",
    [
        lambda file: save_file({"a": torch.zeros(40_000)}, file),
        lambda file: write_atomically(file, "x" * 100_000),
        to_arrow,
    ],
)
def test_full_disk_is_reported_through_every_library(
    tiny_disk: Path, capsys: pytest.CaptureFixture[str], write: Any
) -> None:
    with pytest.raises(SystemExit) as caught, exit_with_one_sentence():
        write(tiny_disk / "file")
    assert caught.value.code == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said.startswith("error: no space left on device")
    assert said.endswith("then run the same command again to continue")
    assert not list(tiny_disk.glob("*.partial"))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(28, "No space left on device", "a"), "no space left on device: a: free some space"),
        (PermissionError(13, "Permission denied", "a"), "permission denied: a: "),
        (RuntimeError("unable to write to file </torch_1>: No space left on device (28)"), "no space left on"),
        (
            RuntimeError("[enforce fail at inline_container.cc:664] . PytorchStreamWriter failed"),
            "input/output error: ",
        ),
        # Not about files, or a bug in draftsmith.
        (PermissionError(13, "Permission denied"), None),
        (ConnectionRefusedError(111, "Connection refused"), None),
        (FileNotFoundError(2, "No such file or directory", "a"), None),
        (RuntimeError("a bug"), None),
    ],
)
def test_os_error_message(error: Exception, sentence: str | None) -> None:
    said = os_error_message(error)
    assert said is None if sentence is None else said is not None and said.startswith(sentence)


def test_unexpected_error_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), exit_with_one_sentence():
        raise ZeroDivisionError


def test_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(tmp_path / "a", "text")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["distill", "features", "train", "eval", "run", "tune", "prove"])
def test_runs_dir_that_is_a_file_is_reported_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def fail_if_reached(*_: Any, **__: Any) -> None:
        raise AssertionError("the work has started")

    for loaded in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        monkeypatch.setattr(loaded, "from_pretrained", fail_if_reached)
    in_the_way = tmp_path / "runs"
    in_the_way.write_text("no folder")
    result = RUNNER.invoke(cli.app, [command, "quickstart", f"runs_dir={in_the_way / 'below'}"])
    assert result.exit_code == 2, result.exception
    assert result.stderr.startswith(f"error: not a directory: {in_the_way}: free some space or correct the cause")
    assert result.stderr.count("\n") == 1
