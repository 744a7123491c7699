"""What every command that reads one recipe takes from the command line."""

from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe's YAML file, or the name of a shipped one.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Values to use instead of the recipe's.")
]


def is_run(place: str) -> bool:
    """Whether an argument is the folder of a measured run, not a recipe."""
    return (Path(place) / "eval" / "records.jsonl").is_file()
