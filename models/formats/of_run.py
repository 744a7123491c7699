"""What `draftsmith export` does: a run's drafter in the format of another program."""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.models.base.registry import TRAINING_FILE, read_drafter
from draftsmith.models.formats.export import Export, export_drafter, refuse_inexpressible
from draftsmith.models.formats.served import FORMATS, WAYS, kind_of
from draftsmith.models.target.loading import load_target, target_location
from draftsmith.recipes.errors import UserError, did_you_mean
from draftsmith.recipes.run_folder import RunFolder, check_writable
from draftsmith.recipes.schema import Recipe


@dataclass
class Exported:
    """A folder, and what to do with it."""

    folder: Path
    made: Export

    def lines(self) -> list[str]:
        """For the terminal; the command stands alone on the last."""
        done = f"{self.made.kind} drafter, checked by name, shape and value: {self.folder}"
        return [done] if self.made.command is None else [done, "Serve it:", self.made.command]


def export_run(recipe: Recipe, to: str, folder: Path | None) -> Exported:
    """Export the run's own drafter.

    Raises:
        UserError: No such format, no trained drafter, or one that the format cannot express.
    """
    if to not in FORMATS:
        formats = ", ".join(FORMATS)
        raise UserError(f"option --to {to}: {did_you_mean(to, FORMATS, f'use one of {formats}')}")
    run = RunFolder(recipe)
    if not (run.drafter / TRAINING_FILE).is_file():
        raise UserError(f"{run.drafter} holds no trained drafter: run `draftsmith train {recipe.name}` first")
    folder = run.root / "export" / to if folder is None else folder.expanduser()
    check_writable(folder.parent)
    drafter = read_drafter(run.drafter, "auto")
    refuse_inexpressible(drafter, to)
    if WAYS[kind_of(drafter.config), to].needs_target:
        on_cpu = recipe.target.model_copy(update={"device": "cpu"})
        drafter.attach(load_target(on_cpu)[0])
    made = export_drafter(drafter.freeze(), to, folder, target_location(recipe.target), run.drafter)
    return Exported(folder, made)
