"""Random damage to a run's files, recipe, inputs or target: exit code 0, 1 or 2, and one sentence.

No traceback, no hang. The seed is fixed; try another one, and more cases, by hand:

    DRAFTSMITH_FUZZ="7 300" python -m pytest tests/cli/test_fuzz.py     # seed, times as many cases
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from support.finished_run import FinishedRun

SEED, TIMES = (int(part) for part in os.environ.get("DRAFTSMITH_FUZZ", "1 1").split())
ODD: list[Any] = [
    None, -1, 0, 1.5, 10**30, float("nan"), float("inf"), True, "", "x", "\0", "é\ud800", "../../x", [], [[]], {},
    ["a", None], {"a": 1},
]  # fmt: skip
GONE = object()


@pytest.fixture
def run(finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FinishedRun:
    monkeypatch.chdir(tmp_path)  # for paths in random recipes
    return finished


def error_line(result: Result) -> str:
    """Return the error sentence of a command that ended properly, empty if there is none."""
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 1, 2)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == (result.exit_code == 2), result.stderr
    return errors[0] if errors else ""


# ---- files that stages read from each other ----

FORM, NO_JSON = b'{"x": {}}', b"\x89PNG\xff"


@pytest.mark.parametrize(
    ("name", "command", "content"),
    [
        ("drafter/config.json", "prove", FORM), ("drafter/settings.json", "train", FORM),
        ("drafter/training.json", "eval", FORM), ("eval/settings.json", "report", FORM),
        ("eval/notes.json", "report", FORM), ("eval/proof.json", "eval", FORM),
        ("features/index.json", "features", FORM), ("provenance.json", "report", NO_JSON),
        ("drafter/training.json", "train", NO_JSON), ("eval/settings.json", "eval", NO_JSON),
    ],
)  # fmt: skip
def test_damaged_file_is_named(run: FinishedRun, name: str, command: str, content: bytes) -> None:
    file = run.root / name
    file.write_bytes(content)
    sentence = error_line(run.call(command))
    assert str(file) in sentence or f"{file.parent} " in sentence


# ---- random damage ----

# Commands with their options, and files removed first so that they have work to do.
WORK: dict[str, tuple[str, list[str], list[str]]] = {
    "distil again": ("distill", [], ["data"]),
    "train again": ("train", [], ["drafter"]),
    "train offline": ("train", ["data.features.source=offline"], ["drafter"]),
    "resume": ("train", [], ["drafter/training.json"]),
    "measure again": ("eval", [], ["eval"]),
    "features again": ("features", [], ["features"]),
}
# Commands that read a file, by the start of its path in the run.
COMMANDS = {
    "drafter/checkpoints": ["resume"],
    "drafter": ["train", "eval", "prove", "tune", "report"],
    "data": ["distill", "train again", "doctor", "plan", "run"],
    "eval": ["eval", "report", "prove"],
    "features": ["features", "train offline"],
    "": ["distill", "train", "features", "eval", "report", "run"],
}
BYTES: list[Callable[[bytes, random.Random], bytes]] = [
    lambda whole, rng: b"",
    lambda whole, rng: whole[: len(whole) // 2],
    lambda whole, rng: whole[:-1],
    lambda whole, rng: whole + b"\xe9\xff",
    lambda whole, rng: rng.randbytes(200),
    lambda whole, rng: b"[" * 100_000,
    lambda whole, rng: b"{}",
]


def run_command(run: FinishedRun, name: str) -> str:
    """Run a command, one of `WORK` or any other; return the defect of its outcome, or an empty string."""
    command, options, unwanted = WORK.get(name, (name, [], []))
    for place in unwanted:
        shutil.rmtree(run.root / place) if (run.root / place).is_dir() else (run.root / place).unlink(missing_ok=True)
    try:
        error_line(run.call(command, *options))
    except BaseException as error:  # also a hang
        return f"{name}: {type(error).__name__} {error}"[:600]
    return ""


def damage(file: Path, rng: random.Random, odd: list[Any]) -> str:
    """Change bytes, or a value if the file is JSON; return a description."""
    whole = file.read_bytes()
    if file.suffix in (".json", ".jsonl", ".yaml") and rng.random() < 0.6:
        lines = whole.splitlines() if file.suffix == ".jsonl" else [whole]
        place = rng.randrange(len(lines))
        load = yaml.safe_load if file.suffix == ".yaml" else json.loads
        values, how = with_odd_value(load(lines[place]), rng, odd)
        lines[place] = json.dumps(values).encode()
        file.write_bytes(b"\n".join(lines) + b"\n")
        return how
    number = rng.randrange(len(BYTES))
    file.write_bytes(BYTES[number](whole, rng))
    return f"bytes {number}"


def with_odd_value(values: Any, rng: random.Random, odds: list[Any]) -> tuple[Any, str]:
    """Replace or remove one random value."""
    places = list(list_places(values))
    if not places:
        return [], "no value"
    part, key = rng.choice(places)
    odd = rng.choice([*odds, GONE])
    if odd is GONE:
        del part[key]
    else:
        part[key] = odd
    return values, f"{key} = {'gone' if odd is GONE else repr(odd)}"


def list_places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Return every container with each of its keys."""
    parts = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else []
    for key, part in parts:
        yield values, key
        yield from list_places(part)


def list_run_files(run: FinishedRun) -> list[Path]:
    not_read = (".html", ".lock")
    return [file for file in sorted(run.root.rglob("*")) if file.is_file() and file.suffix not in not_read]


# Cases, the files of a run, and the commands that read a file.
FUZZED: dict[str, tuple[int, Callable[[FinishedRun], list[Path]], Callable[[str], list[str]]]] = {
    "files of a run": (
        12, list_run_files, lambda place: next(names for start, names in COMMANDS.items() if place.startswith(start)),
    ),
    "recipes": (
        16, lambda run: [Path(run.recipe)],
        lambda _: ["plan", "doctor", "report", "prove", *(name for name in WORK if name != "resume")],
    ),
    "conversations and questions": (
        8, lambda run: [run.folder / name for name in ("chats.jsonl", "questions.jsonl")],
        lambda place: ["distil again", "doctor"] if "chats" in place else ["measure again"],
    ),
    "targets": (
        8, lambda run: sorted((run.folder / "target").iterdir()), lambda _: ["plan", "doctor", "train again", "prove"],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZED)
def test_random_damage_ends_in_one_sentence(run: FinishedRun, name: str) -> None:
    count, files_of, commands = FUZZED[name]
    odd = [value for value in ODD if name != "targets" or value != 10**30]  # 10**30 layers never finish building
    rng, files, wrong = random.Random(SEED), files_of(run), []
    for _ in range(count * TIMES):
        run.restore()
        file = rng.choice(files)
        how, place = damage(file, rng, odd), file.relative_to(run.folder).as_posix()
        problem = run_command(run, rng.choice(commands(place.removeprefix("runs/run/"))))
        if problem:
            wrong.append(f"{place}, {how}: {problem}")
    assert not wrong, "\n".join(wrong)
