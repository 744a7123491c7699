"""What `draftsmith export` and `draftsmith import` do: drafters to other programs, and from them."""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import TRAINING_FILE, read_drafter
from draftsmith.models.formats.export import Export, export_drafter, refuse_inexpressible
from draftsmith.models.formats.reading import import_drafter
from draftsmith.models.formats.served import EXPORTERS, FORMATS, caveat, kind_of, loading_words
from draftsmith.models.target.loading import load_target, target_location
from draftsmith.recipes.errors import UserError, did_you_mean
from draftsmith.recipes.run_folder import RunFolder, check_writable
from draftsmith.recipes.schema import Recipe


@dataclass
class Exported:
    """A folder, and what to do with it."""

    folder: Path
    made: Export
    caveat: str | None

    def lines(self) -> list[str]:
        """For the terminal; the command stands alone on the last."""
        done = f"{self.made.kind} drafter, checked by name, shape and value: {self.folder}"
        warned = [] if self.caveat is None else [f"Mind: {self.caveat}"]
        return [done, *warned] if self.made.command is None else [done, *warned, "Serve it:", self.made.command]


@dataclass
class ImportedTo:
    """own: the folder is where the run's own drafter lies."""

    folder: Path
    kind: str
    own: bool

    def sentence(self) -> str:
        """For the terminal, with what to do with it."""
        named = f"a method of eval.methods with `drafter: {self.folder}`"
        return f"{self.kind} drafter: {self.folder} ({'`draftsmith eval` measures it' if self.own else named})"


def check_format(to: str) -> None:
    """
    Raises:
        UserError: There is no such format.
    """
    if to not in FORMATS:
        formats = ", ".join(FORMATS)
        raise UserError(f"there is no format {to}: {did_you_mean(to, FORMATS, f'use one of {formats}')}")


def trained_drafter(recipe: Recipe) -> Drafter:
    """The run's own, without its target.

    Raises:
        UserError: There is none.
    """
    folder = RunFolder(recipe).drafter
    if not (folder / TRAINING_FILE).is_file():
        raise UserError(f"{folder} holds no trained drafter: run `draftsmith train {recipe.name}` first")
    return read_drafter(folder, "auto")


def export_run(recipe: Recipe, to: str, folder: Path | None) -> Exported:
    """Export the run's own drafter.

    Raises:
        UserError: No such format, no trained drafter, or one that the format cannot express.
    """
    check_format(to)
    run = RunFolder(recipe)
    drafter = trained_drafter(recipe)
    folder = run.root / "export" / to if folder is None else folder.expanduser()
    check_writable(folder.parent)
    refuse_inexpressible(drafter, to)
    if EXPORTERS[kind_of(drafter.config), to].needs_target(drafter.config):
        on_cpu = recipe.target.model_copy(update={"device": "cpu"})
        drafter.attach(load_target(on_cpu)[0])
    target, loading = target_location(recipe.target), loading_words(recipe.target)
    made = export_drafter(drafter.freeze(), to, folder, target, run.drafter, loading)
    return Exported(folder, made, caveat(drafter.config, to))


def import_run(recipe: Recipe, location: str | None, folder: Path | None) -> ImportedTo:
    """Import a published checkpoint for the recipe's target.

    Raises:
        UserError: As `reading.import_drafter`, or no checkpoint is named.
    """
    if location is None:
        raise UserError("import needs a checkpoint: --from FOLDER, or --from user/repo")
    own = RunFolder(recipe).drafter
    folder = own if folder is None else folder.expanduser()
    check_writable(folder.parent)
    target, _ = load_target(recipe.target.model_copy(update={"device": "cpu"}))
    return ImportedTo(folder, import_drafter(location, target, folder).kind, folder == own)
