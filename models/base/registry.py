"""Drafters by name: the class that `drafter.kind` stands for, and trained drafters from their folders."""

import importlib
import json
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX, Drafter
from draftsmith.models.weights import load_weights, weights_sha256
from draftsmith.recipes.errors import UserError

TRAINING_FILE = "training.json"  # in a drafter's folder: what training did; written last


def load_drafter_class(kind: str) -> type[Drafter]:
    """The class that `drafter.kind` names: the attribute `DRAFTER` of `models/drafters/<kind>.py`.

    Raises:
        UserError: There is no such drafter; lists those that there are.
    """
    kinds = drafter_kinds()
    if kind not in kinds:
        raise UserError(f"drafter.kind `{kind}` does not exist: use one of {', '.join(kinds)}")
    return importlib.import_module(f"draftsmith.models.drafters.{kind}").DRAFTER


def drafter_kinds() -> list[str]:
    """Files of `models/drafters/` that define a `DRAFTER`."""
    files = sorted((Path(__file__).parents[1] / "drafters").glob("*.py"))
    return [file.stem for file in files if "\nDRAFTER = " in file.read_text(encoding="utf-8")]


def load_drafter(folder: str | Path, target: PreTrainedModel) -> Drafter:
    """A trained drafter from a folder or the Hub, in the target's dtype, on its device, attached, in eval mode.

    Raises:
        UserError: There is none, its weights are not those of its kind, or not those that training wrote.
    """
    folder = str(folder)
    try:
        values, _ = PreTrainedConfig.get_config_dict(folder)
    except (OSError, ValueError):
        values = {}
    model_type = str(values.get("model_type", ""))
    if not model_type.startswith(MODEL_TYPE_PREFIX):
        raise UserError(f"{folder} holds no trained drafter: run `draftsmith train RECIPE` first")
    kind = model_type.removeprefix(MODEL_TYPE_PREFIX)
    _check_as_trained(Path(folder), kind)
    drafter = load_weights("drafter", folder, load_drafter_class(kind), dtype=target.dtype).to(target.device)
    drafter.attach(target)
    return drafter.freeze()


def _check_as_trained(folder: Path, kind: str) -> None:
    """Whether kind and weights are those that training noted down in `training.json`, where that is."""
    file = folder / TRAINING_FILE
    if not file.is_file():
        return
    noted = json.loads(file.read_text(encoding="utf-8"))
    trained_kind = noted["settings"]["drafter.kind"]
    if kind != trained_kind:
        raise UserError(f"{folder / 'config.json'} says {kind}, but a {trained_kind} drafter was trained: restore it")
    weights = noted.get("weights_sha256")  # none in folders of earlier versions
    if weights is not None and weights != weights_sha256(folder):
        raise UserError(
            f"the weights in {folder} are not those that training wrote ({file.name} has their hashes): restore them, "
            "or delete the folder and run `draftsmith train` again"
        )
