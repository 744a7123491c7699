"""The `draftsmith` command: its group, the arguments that commands share, and the command to run next."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.console import JSON, PANELS, QUIET, WithTerminalOptions, console
from draftsmith.errors import masked
from draftsmith.provenance import versions
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="Recipe: a YAML file, or the name of a shipped recipe.")
]
RecipeOrShipped = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RECIPE]",
        help="Recipe of a trained drafter; default: SmolLM2 with the drafter that ships with draftsmith.",
    ),
]
OtherDrafter = Annotated[str | None, typer.Option(help="Drafter to use instead: a folder or a Hub id.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value ...]", help="Values that replace the recipe's, as train.max_steps=100."),
]


def _show_version(is_set: bool) -> None:
    if is_set:
        print("draftsmith", versions().get("draftsmith", "(not installed)"))
        raise typer.Exit


START, DATA, TRAIN, MEASURE, SHIP = PANELS
app = typer.Typer(
    cls=WithTerminalOptions,
    help="Train a drafter for your LLM and measure how much faster it generates.\n\nBegin with `draftsmith demo`.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
    json_place: Annotated[
        str | None,
        typer.Option(
            JSON,
            metavar="[FILE]",
            help="Write the results as JSON to FILE, or to stdout, which then holds nothing else.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option(*QUIET, help="Print errors and --json's output only.")] = False,
) -> None:
    pass


def print_next_steps(*measured: Recipe, source: Path | None = None, overrides: list[str] | None = None) -> None:
    """Print where the results of `eval` are, and the command that usually follows.

    Args:
        source: The recipe's file or name, for that command.
    """
    from draftsmith.eval.bench.measured_methods import drafter_folders

    for recipe in measured:
        root = RunFolder(recipe).root
        console.print(
            f"\nReport    {root / 'report.html'}  (by category, depth and round; and report.md)", markup=False
        )
        for folder in drafter_folders(recipe):
            console.print(f"Drafter   {folder}", markup=False)
    if any(recipe.target.model == "embedded" for recipe in measured):
        console.print(
            f"\nNext: {_program()} demo (a chat model that gains); docs/guides/train.md is the road for your own"
        )
    elif source is not None:
        from draftsmith.models.formats.exporting import EXPORTERS

        print_next_command("export" if (measured[0].drafter.kind, "vllm") in EXPORTERS else "tune", source, overrides)


def _program() -> str:
    """Return the name by which the shell finds this program, which `make` runs out of its environment's folder."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "draftsmith" and shutil.which("draftsmith") is None else "draftsmith"


def print_next_command(command: str, recipe: Path, overrides: list[str] | None) -> None:
    words = [_program(), command, str(recipe), *(overrides or [])]
    console.print(f"Next: {masked(shlex.join(words))}", markup=False)
