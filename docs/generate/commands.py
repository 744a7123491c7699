"""The command reference, docs/reference/commands.md: what `draftsmith COMMAND --help` says, from the same declarations.

make reference      # writes the page; a test keeps it so
"""

import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from generate.markdown import cell
from typer.models import ArgumentInfo, OptionInfo

from draftsmith.eval.commands.cli import app

PAGE = Path(__file__).parents[1] / "reference" / "commands.md"
HEAD = """# Every command

To look up a command: what it does, what it takes, and what its options are if you leave them out.

Made by `make reference` from the command line itself; a test keeps it so. `draftsmith COMMAND --help`
says the same. RECIPE is a YAML file, or the name of a shipped recipe (`quickstart`); behind it any key may be given
another value, as `train.learning_rate=1e-4` ([every key](recipes.md)). All commands may be interrupted and go on where
they stopped. The exit code is 0 if all went well, 2 for a mistake in what was asked, which is told in one sentence.

Training over several processes is `accelerate launch train/train_parallel.py RECIPE [section.key=value ...]`:
[scaling](../guides/scaling.md).
"""


TYPES = {bool: "", str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}


def pages() -> dict[Path, str]:
    """The page and its text."""
    lines = [HEAD, "## `draftsmith`\n", "Before the command's name or behind it:\n", *_table(_callback()), ""]
    for name, function in commands().items():
        words = [info.metavar or argument.upper() for argument, info, *_ in _parameters(function, ArgumentInfo)]
        table = _table(function)
        lines += [f"## `draftsmith {name}`\n", f"{cell(inspect.getdoc(function) or '')}\n"]
        lines.append(f"    draftsmith {' '.join([name, *words, *(['[OPTIONS]'] if table else [])])}\n")
        lines += [*table, ""] if table else []
    return {PAGE: "\n".join(lines)}


def commands() -> dict[str, Callable[..., Any]]:
    """The function behind each command."""
    found = {}
    for command in app.registered_commands:
        assert command.callback is not None
        found[command.name or command.callback.__name__.replace("_", "-")] = command.callback
    return found


def undescribed() -> list[str]:
    """Commands and options that do not say what they do."""
    functions = {"draftsmith": _callback(), **commands()}
    options = [
        f"{name} {option}"
        for name, function in functions.items()
        for option, info, *_ in _parameters(function, OptionInfo)
        if not info.help
    ]
    return options + [name for name, function in commands().items() if not inspect.getdoc(function)]


def _callback() -> Callable[..., Any]:
    assert app.registered_callback is not None
    assert app.registered_callback.callback is not None
    return app.registered_callback.callback


def _parameters(
    function: Callable[..., Any], kind: type[OptionInfo] | type[ArgumentInfo]
) -> Iterator[tuple[str, Any, str, Any]]:
    """The options or arguments that a command declares: the name, what is declared, what a value is, the default."""
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        annotation, info, *_ = typing.get_args(hints[name])
        if isinstance(info, kind):
            inner = [each for each in typing.get_args(annotation) if each is not NoneType]
            # In `Annotated` the first name stands where a default would: typer sorts that out later.
            first = [info.default] if isinstance(info.default, str) else []
            shown = [*first, *(info.param_decls or []), f"--{name.replace('_', '-')}"][0]
            value = (info.metavar or TYPES[inner[0] if inner else annotation]) if kind is OptionInfo else ""
            yield shown if kind is OptionInfo else name, info, value, parameter.default


def _table(function: Callable[..., Any]) -> list[str]:
    rows = []
    for option, info, value, default in _parameters(function, OptionInfo):
        shown = "" if default in (None, False, "") else f"`{default}`"
        rows.append(f"| `{f'{option} {value}'.strip()}` | {shown} | {cell(info.help or '')} |")
    return ["| option | default | what it does |", "|---|---|---|", *rows] if rows else []


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
