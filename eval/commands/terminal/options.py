"""The options of all commands: `--json` and `--quiet`, before the command's name or behind it.

They belong to the group of the commands, which moves them in front of the name, so that no command has them itself.
"""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from draftsmith.eval.commands.terminal.output import STDOUT, check_json_place, output_to
from draftsmith.recipes.errors import exit_with_one_sentence

JSON, QUIET = "--json", ("--quiet", "-q")
OF_ALL_COMMANDS = (
    "Every command also takes `--json` (what it found as JSON on stdout, and text for people on stderr; `--json=FILE`: "
    "to a file, and text on stdout) and `--quiet` (nothing but errors, and what `--json` asks for)."
)

JsonPlace = Annotated[
    str | None,
    typer.Option(
        JSON, metavar="[FILE]", help="What the command found, as JSON: on stdout, and nothing else there; or to FILE."
    ),
]
Quiet = Annotated[bool, typer.Option(*QUIET, help="Say nothing but errors, and what --json asks for.")]


class WithTerminalOptions(TyperGroup):
    """The group of all commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for command in self.commands.values():
            command.epilog = OF_ALL_COMMANDS

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Help and mistakes in frames of box characters on a terminal only."""
        if not (sys.stdout.isatty() and sys.stderr.isatty()):
            for each in (self, *self.commands.values()):
                each.rich_markup_mode = None  # type: ignore[attr-defined]
        return super().main(*arguments, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, moved_to_front(args))

    def invoke(self, ctx: Any) -> Any:
        with output_to(ctx.params.get("json_place"), ctx.params.get("quiet", False)):
            with exit_with_one_sentence():
                check_json_place()
            return super().invoke(ctx)


def moved_to_front(arguments: list[str]) -> list[str]:
    """`--json` alone becomes `--json=-`, stdout. Its file is told by `=`, or by its ending: `--json figures.json`."""
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
