"""What commands take from the command line and tell: a recipe with overrides, `--json` and `--quiet`, and figures.

`--json` and `--quiet` stand before the command's name or after it: they belong to the group of the commands, which
moves them in front of the name, so that no command has them itself.
"""

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from draftsmith.eval.commands.console import console
from draftsmith.recipes.errors import UserError, exit_with_one_sentence
from draftsmith.recipes.progress import bars_where_they_can_be
from draftsmith.recipes.run_folder import check_writable, write_atomically

JSON, QUIET, STDOUT = "--json", ("--quiet", "-q"), "-"
STDOUT_DESCRIPTOR, STDERR_DESCRIPTOR = 1, 2
OF_ALL_COMMANDS = (
    "Every command also takes `--json` (what it found as JSON on stdout, and text for people on stderr; `--json=FILE`: "
    "to a file, and text on stdout) and `--quiet` (nothing but errors, and what `--json` asks for)."
)

RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe's YAML file, or the name of a shipped one.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Values to use instead of the recipe's.")
]
JsonPlace = Annotated[
    str | None,
    typer.Option(
        JSON, metavar="[FILE]", help="What the command found, as JSON: on stdout, and nothing else there; or to FILE."
    ),
]
Quiet = Annotated[bool, typer.Option(*QUIET, help="Say nothing but errors, and what --json asks for.")]


class WithTerminalOptions(TyperGroup):
    """The group of all commands, which obeys `--json` and `--quiet` for them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for command in self.commands.values():
            command.epilog = OF_ALL_COMMANDS

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Show help and mistakes in frames of box characters on a terminal only."""
        if not (sys.stdout.isatty() and sys.stderr.isatty()):
            for each in (self, *self.commands.values()):
                each.rich_markup_mode = None  # type: ignore[attr-defined]
        return super().main(*arguments, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, moved_to_front(args))

    def invoke(self, ctx: Any) -> Any:
        with output_to(ctx.params.get("json_place"), ctx.params.get("quiet", False)):
            with exit_with_one_sentence():
                place = _output.get().file
                if place is not None and place.is_dir():
                    raise UserError(f"option --json: {place} is a folder: name a file")
                if place is not None:  # before the work begins
                    check_writable(place.parent)
            return super().invoke(ctx)


def moved_to_front(arguments: list[str]) -> list[str]:
    """Turn `--json` alone into `--json=-`, stdout. Its file is told by `=`, or by its ending: `--json figures.json`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own: list[str] = []
    others: list[str] = []
    words = arguments[:end]
    while words:
        word = words.pop(0)
        if word == JSON:
            is_file = bool(words) and words[0].endswith(".json") and not words[0].startswith("-")
            own.append(f"{JSON}={words.pop(0) if is_file else STDOUT}")
        elif word.startswith(f"{JSON}=") or word in QUIET:
            own.append(word)
        else:
            others.append(word)
    return [*own, *others, *arguments[end:]]


@dataclass
class Output:
    """Hold where `--json` leads, `-` to stdout and None to nowhere, and what the command has told so far."""

    json: str | None = None
    found: Any = None

    @property
    def file(self) -> Path | None:
        return None if self.json in (None, STDOUT) else Path(str(self.json)).expanduser()


_output: ContextVar[Output] = ContextVar("output")


@contextmanager
def output_to(json_place: str | None, quiet: bool) -> Iterator[None]:
    """Keep stdout for what was asked for: text for people, or JSON alone, and the text goes to stderr.

    The JSON on stdout is written at the end, whatever the end is, if there was something to tell.
    """
    output, stdout = Output(json_place), sys.stdout
    token = _output.set(output)

    def write_found() -> None:
        if output.json == STDOUT and output.found is not None:
            stdout.write(_text_of(output.found))
            stdout.flush()

    with ExitStack() as stack:
        stack.callback(_output.reset, token)
        stack.callback(write_found)
        stack.enter_context(bars_where_they_can_be(quiet))
        stack.callback(console.look_again)
        if quiet:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(_redirected_descriptor(nowhere.fileno()))
        elif json_place == STDOUT:
            stack.enter_context(redirect_stdout(sys.stderr))
            stack.enter_context(_redirected_descriptor(STDERR_DESCRIPTOR))
        console.look_again()
        yield


@contextmanager
def _redirected_descriptor(descriptor: int) -> Iterator[None]:
    """Send what other processes and libraries in C write to stdout to this descriptor."""
    try:
        before = os.dup(STDOUT_DESCRIPTOR)
        os.dup2(descriptor, STDOUT_DESCRIPTOR)
    except OSError:  # one of them is closed
        yield
        return
    try:
        yield
    finally:
        os.dup2(before, STDOUT_DESCRIPTOR)
        os.close(before)


def tell(values: Any) -> None:
    """Give `--json` what a command found; may be called again with more."""
    output = _output.get(None)
    if output is not None:
        output.found = values
        write_json(output.file, values)


def write_json(file: Path | None, values: Any) -> None:
    """Write values to a file, if there is one."""
    if file is None:
        return
    if file.is_symlink() or (file.exists() and not file.is_file()):  # /dev/stdout
        file.write_text(_text_of(values), encoding="utf-8")
    else:
        write_atomically(file, _text_of(values))


def _text_of(values: Any) -> str:
    return json.dumps(_strict(values), indent=2, allow_nan=False, default=str) + "\n"


def _strict(value: Any) -> Any:
    """Put null in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return value
