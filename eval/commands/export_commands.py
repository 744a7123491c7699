"""The commands `push`, `export` and `import`: a drafter to the Hub, to other programs, and from them."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.eval.commands.console import console, heading
from draftsmith.eval.commands.options import Overrides, RecipePath, tell
from draftsmith.recipes.errors import exit_with_one_sentence
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import RunFolder


@exit_with_one_sentence()
def push(
    recipe: RecipePath,
    overrides: Overrides = None,
    repo: Annotated[
        str | None, typer.Option(help="name or user/name; by default the target's name and the method's.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, made if it is not there; by default main.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Open to everybody; by default it is private.")] = False,
    base_model: Annotated[str | None, typer.Option(help="The target's Hub id, if the recipe names a folder.")] = None,
    license_id: Annotated[
        str | None, typer.Option("--license", help="As the Hub spells it: apache-2.0, ...; by default the target's.")
    ] = None,
    exports: Annotated[str, typer.Option(help="Formats to export to first: vllm,sglang,...")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write what would go up to runs/NAME/hub, and send nothing.")
    ] = False,
) -> None:
    """Publish the drafter on the Hub, with its recipe, figures, proof and model card."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.eval.commands.push import PushOptions
    from draftsmith.eval.commands.push import push as send

    heading("push", f"{loaded.name}: {loaded.drafter.kind} drafter for {loaded.target.model}")
    formats = tuple(filter(None, exports.split(",")))
    options = PushOptions(repo, revision, public, base_model, license_id, formats, dry_run)
    tell(asdict(send(loaded, options, console)))


@exit_with_one_sentence()
def export(
    recipe: RecipePath,
    overrides: Overrides = None,
    to: Annotated[str, typer.Option("--to", help="vllm, sglang, speculators, eagle, medusa, hydra.")] = "vllm",
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where to; by default export/FORMAT in the run's folder.")
    ] = None,
) -> None:
    """Write the trained drafter as another program loads it, check it, and print the command that serves it."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.models.formats.exporting import export_run

    heading("export", f"{loaded.name}: --to {to}")
    exported = export_run(loaded, to, folder)
    for line in exported.lines():
        console.print(line, markup=False, soft_wrap=True)
    tell({**asdict(exported.made), "folder": str(exported.folder), "caveat": exported.caveat})


@exit_with_one_sentence()
def import_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--from", help="A folder or `user/repo`: EAGLE, EAGLE-3, P-EAGLE, DFlash, DSpark, Medusa, Hydra."),
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help="By default the run's own drafter's folder.")] = None,
) -> None:
    """Make a published checkpoint for the recipe's target a drafter of ours, to be measured, proved and tuned."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.models.formats.importing import import_run

    heading("import", f"{checkpoint} for {loaded.target.model}")
    folder, kind = import_run(loaded, checkpoint, to)
    named = f"a method of eval.methods with `drafter: {folder}`"
    own = folder == RunFolder(loaded).drafter
    console.print(f"{kind} drafter: {folder} ({'`draftsmith eval` measures it' if own else named})", markup=False)
    tell({"kind": kind, "folder": str(folder)})
