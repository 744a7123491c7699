"""Output of all commands: colours on a terminal, plain text elsewhere, `--json` and `--quiet`.

`--json` and `--quiet` may stand before or after the command's name: they belong to the group of all commands, which
moves them in front of the name, so that no command has to define them.
"""

import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Any

from pydantic_core import to_jsonable_python
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleDimensions
from rich.markup import escape
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperGroup

from draftsmith.errors import UserError, exit_with_one_sentence
from draftsmith.progress import configure_progress_bars
from draftsmith.recipes.removed import removal_of
from draftsmith.recipes.run_folder import MPI_WORLD_SIZES, RANKS, is_first_process

ENDLESS_COLUMNS, RULE_COLUMNS = 100_000, 80
JSON, QUIET = "--json", ("--quiet", "-q")
STDOUT_DESCRIPTOR, STDERR_DESCRIPTOR = 1, 2
COMMON_OPTIONS = "Every command also takes `--json` and `--quiet`: see `draftsmith --help`."
SHARED = ("distill", "train", "run")  # commands whose work the processes of a launch share
PANELS = ("Start", "Data", "Train", "Measure", "Ship")  # groups of commands in `draftsmith --help`


class PlainConsole(Console):
    """Console that prints to the current `sys.stdout`, also after a redirection; obeys `NO_COLOR` and `TERM`.

    Long lines are printed unbroken, so that they can be copied. Without a terminal a table is as wide as its content,
    unless `COLUMNS` limits it.
    """

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True)

    @property
    def encoding(self) -> str:
        """Return "ascii" without a terminal, so that rich draws no box characters; the text itself is not changed."""
        return super().encoding if self.is_terminal else "ascii"

    @property  # type: ignore[misc]  # nobody sets it
    def size(self) -> ConsoleDimensions:
        size = super().size
        limited = self.is_terminal or self.is_jupyter or self._environ.get("COLUMNS", "").isdigit()
        return size if limited else ConsoleDimensions(ENDLESS_COLUMNS, size.height)

    def refresh(self) -> None:
        """Read stdout's properties and the environment again, after a redirection."""
        PlainConsole.__init__(self)


console = PlainConsole()


def heading(stage: str, what: str) -> None:
    """Print a stage's heading as a rule across the terminal; `what`, its description, is printed without markup."""
    rule = Rule(f"[bold]{stage}[/bold]  {escape(what)}")
    console.print(rule, width=RULE_COLUMNS if console.width == ENDLESS_COLUMNS else None)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print a table; long cells are folded, and cells other than `rich.text.Text` are printed without markup."""
    columns = [Column(name, overflow="fold") for name in headings]
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    console.print(table)


def read_message() -> str | None:
    """Read one message from the terminal; a pasted text of several lines is one message. None if it is not UTF-8.

    Raises:
        EOFError: The input has ended.
    """
    console.print()
    try:
        message = input("> ").strip()
        message.encode()  # Python keeps bytes that are not UTF-8 as lone surrogates, which no tokenizer accepts
    except UnicodeError:
        return None
    return message


# ---- --json and --quiet ----


class WithTerminalOptions(TyperGroup):
    """Group of all commands: handles `--json` and `--quiet` for them, and reports a failure in one sentence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        order = {panel: [name for name, each in self.commands.items() if _panel(each) == panel] for panel in PANELS}
        self.commands = {name: self.commands[name] for names in order.values() for name in names}
        for command in self.commands.values():
            command.epilog = COMMON_OPTIONS

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by group with their full summaries."""
        for panel in PANELS:
            with formatter.section(panel):
                rows = [(name, each.short_help) for name, each in self.commands.items() if _panel(each) == panel]
                formatter.write_dl(rows)

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run the command line; characters that the output's encoding lacks, as ASCII or Latin-1, become escapes."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().main(*arguments, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = move_to_front(args)
        if next((word for word in words if not word.startswith("-")), "") not in SHARED:
            for name in (*RANKS, *MPI_WORLD_SIZES):  # the command is one process, whatever these say
                os.environ.pop(name, None)
        return super().parse_args(ctx, words)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command and its arguments.

        Raises:
            UserError: A command or option was removed in this release.
        """
        for word in args[1:]:
            if sentence := removal_of(f"{args[0]} {word.partition('=')[0]}"):
                raise UserError(sentence)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        as_json, quiet = (ctx.params.get(name, False) for name in ("as_json", "quiet"))
        with exit_with_one_sentence():
            is_later = not is_first_process()
            with output_to(as_json and not is_later, is_later or quiet):
                return super().invoke(ctx)


def _panel(command: Any) -> str:
    return str(command.rich_help_panel)


def move_to_front(arguments: list[str]) -> list[str]:
    """Move `--json` and `--quiet` in front of the other arguments."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own = [word for word in arguments[:end] if word.partition("=")[0] in (JSON, *QUIET)]
    return [*own, *(word for word in arguments[:end] if word not in own), *arguments[end:]]


# Results that the command has passed to `tell`, of which the last is written.
_results: ContextVar[list[Any]] = ContextVar("results")


@contextmanager
def output_to(as_json: bool, quiet: bool) -> Iterator[None]:
    """Redirect output in this context as the options `--json` and `--quiet` require.

    The last result passed to `tell` is written when the context ends, also by an error.

    Args:
        as_json: Write the JSON to stdout, and all other text to stderr.
        quiet: Print nothing but the JSON to stdout, and show no progress bars.
    """
    stdout, results = sys.stdout, list[Any]()
    token = _results.set(results)

    def write_result() -> None:
        if as_json and results:
            # NaN and infinities, which JSON cannot express, become null.
            text = json.dumps(to_jsonable_python(results[-1], inf_nan_mode="null", fallback=str), indent=2)
            print(text, file=stdout, flush=True)

    with ExitStack() as stack:
        stack.callback(_results.reset, token)
        stack.callback(write_result)
        stack.enter_context(configure_progress_bars(quiet))
        stack.callback(console.refresh)
        if quiet:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(_redirected_descriptor(nowhere.fileno()))
        elif as_json:
            stack.enter_context(redirect_stdout(sys.stderr))
            stack.enter_context(_redirected_descriptor(STDERR_DESCRIPTOR))
        console.refresh()
        yield


@contextmanager
def _redirected_descriptor(descriptor: int) -> Iterator[None]:
    """Redirect the stdout of child processes and of C libraries to this file descriptor."""
    try:
        before = os.dup(STDOUT_DESCRIPTOR)
        os.dup2(descriptor, STDOUT_DESCRIPTOR)
    except OSError:  # one of the two descriptors is closed
        yield
        return
    try:
        yield
    finally:
        os.dup2(before, STDOUT_DESCRIPTOR)
        os.close(before)


def tell(values: Any) -> None:
    """Store a command's results, which `--json` then writes; a later call replaces them."""
    _results.get([]).append(values)
