"""What a command found, as JSON for programs, beside or instead of the text for people."""

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.eval.commands.terminal.console import console
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.progress import bars_where_they_can_be
from draftsmith.recipes.run_folder import check_writable, write_atomically

STDOUT = "-"
STDOUT_DESCRIPTOR, STDERR_DESCRIPTOR = 1, 2


@dataclass
class Output:
    """json: where to, `-` for stdout, None for nowhere; found: what the command has told so far."""

    json: str | None = None
    found: Any = None


_output: ContextVar[Output] = ContextVar("output")


@contextmanager
def output_to(json_place: str | None, quiet: bool) -> Iterator[None]:
    """In here stdout is for what was asked for: text for people, or JSON alone, and the text goes to stderr.

    The JSON on stdout is written at the end, whatever the end is, if there was something to tell.
    """
    output = Output(json_place)
    token = _output.set(output)
    stdout = sys.stdout
    with ExitStack() as stack:
        stack.callback(_output.reset, token)
        stack.callback(_write_found, output, stdout)
        stack.enter_context(bars_where_they_can_be(quiet))
        stack.callback(console.look_again)
        if quiet:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(_past_python(nowhere.fileno()))
        elif json_place == STDOUT:
            stack.enter_context(redirect_stdout(sys.stderr))
            stack.enter_context(_past_python(STDERR_DESCRIPTOR))
        console.look_again()
        yield


@contextmanager
def _past_python(descriptor: int) -> Iterator[None]:
    """What other processes and libraries in C write to stdout goes to this descriptor."""
    try:
        kept = os.dup(STDOUT_DESCRIPTOR)
        os.dup2(descriptor, STDOUT_DESCRIPTOR)
    except OSError:  # one of them is closed
        yield
        return
    try:
        yield
    finally:
        os.dup2(kept, STDOUT_DESCRIPTOR)
        os.close(kept)


def _write_found(output: Output, stdout: Any) -> None:
    if output.json == STDOUT and output.found is not None:
        stdout.write(_text_of(output.found))
        stdout.flush()


def check_json_place() -> None:
    """Whether the file of `--json` can be written, before the work begins.

    Raises:
        UserError, OSError: It cannot.
    """
    place = _file()
    if place is None:
        return
    if place.is_dir():
        raise UserError(f"option --json: {place} is a folder: name a file")
    check_writable(place.parent)


def tell(values: Any) -> None:
    """What a command found, for `--json`; may be called again with more."""
    output = _output.get(None)
    if output is not None:
        output.found = values
        write_json(_file(), values)


def _file() -> Path | None:
    output = _output.get(None)
    return None if output is None or output.json in (None, STDOUT) else Path(str(output.json)).expanduser()


def write_json(file: Path | None, values: Any) -> None:
    """Write them there, if anywhere."""
    if file is None:
        return
    if file.is_symlink() or (file.exists() and not file.is_file()):  # /dev/stdout
        file.write_text(_text_of(values), encoding="utf-8")
    else:
        write_atomically(file, _text_of(values))


def _text_of(values: Any) -> str:
    return json.dumps(_strict(values), indent=2, allow_nan=False, default=str) + "\n"


def _strict(value: Any) -> Any:
    """JSON has no NaN: null stands for it, as for any number that is none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return value
