"""`drafter.init`: warm start of a new drafter from the weights of a trained one, of the same kind or another.

Tensors with the same name and shape are copied; parameters are named by their function, so that `layers` and `fc` of an
EAGLE drafter correspond to those of a parallel one. All others keep the initial values of the new drafter's kind.

The trained drafter's draft vocabulary is used only if it has trained rows for these tokens (its own heads, or a Markov
head's W2). If its head is the target's, no such rows were trained. The draft vocabulary then has the most frequent
tokens of this run's answers, as for a new drafter, and then those of the trained drafter, if the answers have too few.

A checkpoint that was published for an engine is imported first, automatically.
"""

from pathlib import Path

import torch

from draftsmith.errors import UserError
from draftsmith.files import expand_home, read_json
from draftsmith.hub import hub_id
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import Start, fetch_drafter, is_drafter, read_drafter
from draftsmith.models.formats.importing import IMPORT_FILE, Imported, import_start
from draftsmith.models.weights import some_of, weights_sha256
from draftsmith.recipes.loading import first_stage
from draftsmith.recipes.run_folder import TRAINING_FILE, RunFolder
from draftsmith.recipes.schema import Recipe


def start_folder(recipe: Recipe) -> Path | None:
    """Return the folder of the trained drafter that `drafter.init` names; None if the recipe does not set it.

    Raises:
        UserError: The folder does not exist, its drafter is not trained yet, or it cannot be imported.
    """
    init = recipe.drafter.init
    if init is None:
        return None
    first = first_stage(recipe)
    if first is not None:
        folder = RunFolder(first).drafter
        if not (folder / TRAINING_FILE).is_file():
            raise UserError(
                f"key `drafter.init`: the drafter of {init} is not trained yet ({folder}): `draftsmith run` with this "
                "recipe trains it first"
            )
        return folder
    if not expand_home(init).is_dir() and hub_id(init) is None:
        raise UserError(f"key `drafter.init`: {init} is not a folder: give a drafter's folder, a recipe or a Hub id")
    folder = fetch_drafter(init, "key `drafter.init`:")
    if is_drafter(folder):
        return folder
    try:
        return import_start(recipe, init)
    except UserError as error:
        raise UserError(f"key `drafter.init`: {init} is no trained drafter, and cannot be imported: {error}") from None


@torch.no_grad()
def start_from(drafter: Drafter, folder: Path, source: str) -> Start:
    """Copy the tensors of the trained drafter in `folder` that a new drafter has too; return a record of it.

    Args:
        drafter: The new drafter, attached to its target, with its draft vocabulary prepared.
        folder: Folder of the trained drafter.
        source: Name of the trained drafter in messages.

    Raises:
        UserError: The weights were changed after training, the drafter was trained for another target, it shares no
            tensor with this one, or it is of the same kind with other options.
    """
    trained = read_drafter(folder, drafter.dtype)
    trained.config.check_same_target(drafter.attached.target)
    own, kind = (each.config.kind for each in (drafter, trained))
    theirs, mine = trained.state_dict(), drafter.state_dict()
    other_shapes = [name for name in mine if name in theirs and mine[name].shape != theirs[name].shape]
    if other_shapes and own == kind:
        name, keys = other_shapes[0], drafter.config.Options.model_fields
        values = {key: (getattr(trained.config, key), getattr(drafter.config, key)) for key in keys}
        options = ", ".join(f"{key}={old}" for key, (old, new) in values.items() if old != new and key != "init")
        raise UserError(
            f"key `drafter.init`: {some_of(other_shapes)} of {source} has another shape ({name} "
            f"{list(theirs[name].shape)}, here {list(mine[name].shape)}): give this recipe the trained "
            f"drafter's `drafter.options` that decide the shape, of those that differ: {options}"
        )
    taken = {name for name in mine if name in theirs and name not in other_shapes}
    vocabulary, its_rows = drafter.vocab_names, drafter.vocab_row_names
    if not (vocabulary <= taken and its_rows & taken):
        taken -= vocabulary | its_rows  # as a whole or not at all
    parameters = dict(drafter.named_parameters())
    if not taken & parameters.keys():
        raise UserError(
            f"key `drafter.init`: a drafter of kind {own} has no parameter in common with {source}, which is of kind "
            f"{kind}: leave it out, or start from another kind"
        )
    read, theirs_read = drafter.feature_layers, trained.feature_layers
    if len(read) == len(theirs_read) and read != theirs_read:
        raise UserError(
            f"key `drafter.init`: {source} was trained on features of the target's layers {list(theirs_read)}, not "
            f"{list(read)}: set drafter.options.feature_layers to the former"
        )
    anew = drafter.vocab_coverage
    for name in taken:
        mine[name].copy_(theirs[name])
    extends = bool(vocabulary) and not its_rows and trained.draft_ids is not None
    if extends:
        drafter.extend_draft_vocab(trained.t2d)
    drafter.gather_head_rows()
    maps = {"d2t", "t2d"}  # no parameters: described in words below
    fresh, unused = sorted(mine.keys() - taken - maps), sorted(theirs.keys() - taken - maps)
    words = None
    if vocabulary and not maps <= taken:
        words = "its draft vocabulary is chosen from this run's answers"
        words += ", and then from the trained drafter's" if extends else ""
    elif vocabulary:
        words = f"its draft vocabulary of {len(drafter.d2t):,} tokens is that of the trained rows"
        if anew is not None and (now := drafter.vocab_coverage) is not None:
            words += f", which cover {now.coverage:.2%} of this run's answer tokens (a new one: {anew.coverage:.2%})"
    file = folder / IMPORT_FILE
    notes = read_json(file, Imported, "delete the folder and import again").assumed if file.is_file() else None
    return Start(source, kind, weights_sha256(folder), fresh, unused, words, notes)


def start_sentence(start: Start) -> str:
    """Describe a drafter's warm start in one sentence, for the terminal and the model card."""
    digest = " ".join(start.weights_sha256.values())[:12]
    rest = f"; new here: {some_of(start.fresh)}" if start.fresh else ""
    rest += f"; left out: {some_of(start.unused)}" if start.unused else ""
    rest += "" if start.draft_vocabulary is None else f"; {start.draft_vocabulary}"
    rest += "".join(f"; note: {note}" for note in start.imported or ())
    origin = "trained" if start.imported is None else "published"
    return f"started from the weights of a {origin} {start.kind} drafter (SHA-256 {digest}...){rest}"
