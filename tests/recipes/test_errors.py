"""What a disk or a path refuses is one sentence, before the work where that can be known, and costs nothing."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from support.places import ROOT
from support.tiny_runs import tiny_run
from typer.testing import CliRunner

from draftsmith.eval.commands import cli
from draftsmith.eval.commands.terminal.output import write_json
from draftsmith.recipes.errors import exit_with_one_sentence, what_the_system_refused
from draftsmith.recipes.run_folder import write_atomically

RUNNER = CliRunner()
# As libraries word it; each writes more than it may, in a process of its own.
WRITERS = """
import resource, sys
from pathlib import Path
import torch
from draftsmith.recipes.errors import exit_with_one_sentence
from draftsmith.recipes.run_folder import write_atomically

def safetensors(file):
    from safetensors.torch import save_file
    save_file({"a": torch.zeros(10_000)}, file)

def pytorch(file):
    torch.save({"a": torch.zeros(10_000)}, file)

def arrow(file):
    import datasets
    from datasets.arrow_writer import ArrowWriter
    with ArrowWriter(path=str(file)) as writer:
        writer.write_batch({"a": list(range(10_000))})
        writer.finalize()

def picture(file):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.plot([1, 2])
    plt.savefig(file, dpi=300, format="png")

def text(file):
    write_atomically(file, "x" * 100_000)

folder = Path(sys.argv[1])
warm_up = folder / "fonts"
picture(warm_up)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
for write in (safetensors, pytorch, arrow, picture, text):
    try:
        with exit_with_one_sentence():
            write(folder / write.__name__)
        print(write.__name__, "was written")
    except SystemExit as ending:
        print(write.__name__, ending.code)
"""


def test_no_library_hides_a_full_disk(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITERS, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    names = ("safetensors", "pytorch", "arrow", "picture", "text")
    assert result.stdout.splitlines() == [f"{name} 2" for name in names], result.stderr
    limit = "error: a file would grow beyond the limit that is set here: raise it (`ulimit -f`), then run"
    unknown = "see whether the disk is full, at a limit (`ulimit -f`) or failing, then run the same command again"
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == len(names)
    for name, sentence in zip(names, said, strict=True):
        assert (unknown if name == "pytorch" else limit) in sentence, name
    assert not list(tmp_path.glob("text*"))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(28, "No space left on device", "a"), "no space left on the device for a: free some, then run"),
        (OSError(122, "Disk quota exceeded"), "the quota of this disk is used up: free some space"),
        (PermissionError(13, "Permission denied", "a"), "permission denied for a: change its permissions, or name"),
        (NotADirectoryError(20, "Not a directory", "a/b"), "there is a file where a folder should be for a/b: move"),
        (OSError(30, "Read-only file system", "a"), "the disk can only be read for a"),
        (RuntimeError("unable to write to file </torch_1>: No space left on device (28)"), "no space left on the"),
        # Nothing to do with files, or a bug of ours.
        (PermissionError(13, "Permission denied"), None),
        (ConnectionRefusedError(111, "Connection refused"), None),
        (FileNotFoundError(2, "No such file or directory", "a"), None),
        (RuntimeError("a bug"), None),
    ],
)
def test_which_errors_are_the_systems(error: Exception, sentence: str | None) -> None:
    said = what_the_system_refused(error)
    assert said is None if sentence is None else said is not None and said.startswith(sentence)


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), exit_with_one_sentence():
        raise ZeroDivisionError


def test_a_write_that_failed_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(tmp_path / "a", "text")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["distill", "features", "train", "eval", "run", "tune", "prove"])
def test_a_runs_dir_that_is_a_file_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("the work has begun")

    for loaded in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        monkeypatch.setattr(loaded, "from_pretrained", too_late)
    in_the_way = tmp_path / "runs"
    in_the_way.write_text("no folder")
    result = RUNNER.invoke(cli.app, [command, "quickstart", f"runs_dir={in_the_way / 'below'}"])
    assert result.exit_code == 2, result.exception
    sentence = f"error: there is a file where a folder should be for {in_the_way}: move out of the way what is there"
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["doctor", "tune", "prove", "plan", "compare"])
def test_a_json_file_that_cannot_be_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(cli, "heading", lambda *_: pytest.fail("the work has begun"))
    (tmp_path / "file").write_text("")
    for place, sentence in (
        (tmp_path, f"option --json: {tmp_path} is a folder: name a file"),
        (tmp_path / "file" / "a.json", f"there is a file where a folder should be for {tmp_path / 'file'}:"),
        (tmp_path / ("x" * 300), "a name is too long for"),
    ):
        result = RUNNER.invoke(cli.app, [command, "quickstart", f"runs_dir={tmp_path / 'runs'}", f"--json={place}"])
        assert result.exit_code == 2, result.exception
        assert result.stderr.startswith(f"error: {sentence}")
        assert result.stderr.count("\n") == 1


def test_json_to_a_device_does_not_replace_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "real").write_text("old")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    write_json(link, [1])
    assert link.is_symlink()
    assert (tmp_path / "real").read_text() == "[\n  1\n]\n"
    write_json(Path("/dev/null"), [1])
    assert Path("/dev/null").is_char_device()


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv[1:] = sys.argv[2:]
from draftsmith.eval.commands.cli import main
main()
"""


def test_training_within_a_limit_is_one_sentence_and_goes_on_without_it(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text(yaml.safe_dump(tiny_run(tmp_path).model_dump()))

    def train(limit: str) -> Any:
        command = [sys.executable, "-c", LIMITED, limit, "train", str(recipe)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)

    for limit in ("100", "9000", "40000"):  # provenance, weights, the optimizer's state
        result = train(limit)
        assert result.returncode == 2, result.stderr
        assert "Traceback" not in result.stderr
        assert result.stderr.splitlines()[-1].startswith("error: a file ")
        assert "(`ulimit -f`)" in result.stderr.splitlines()[-1]
    assert train("-1").returncode == 0


def test_a_disk_that_does_not_hold_the_weights_is_told_before_the_first_step(tmp_path: Path, tiny_disk: Path) -> None:
    values = tiny_run(tmp_path).model_dump()
    root = tiny_disk / "run"
    (root / "data").mkdir(parents=True)
    (root / "data" / "tokens").symlink_to(tmp_path / "runs" / "run" / "data" / "tokens")
    recipe = tmp_path / "a.yaml"
    recipe.write_text(yaml.safe_dump(values | {"runs_dir": str(tiny_disk)}))
    result = RUNNER.invoke(cli.app, ["train", str(recipe)])
    assert result.exit_code == 2, result.exception
    assert "needs" in result.stderr
    assert "at least, for a checkpoint and the trained weights, but only" in result.stderr
    assert not list((root / "drafter").glob("checkpoints/*"))
