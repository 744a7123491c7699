"""Drafters by name: the class that `drafter.kind` stands for, and trained drafters from their folders."""

import importlib
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX, Drafter
from draftsmith.recipes.errors import UserError


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
    """A trained drafter from a folder or the Hub, in the target's dtype, on its device, attached, in eval mode."""
    folder = str(folder)
    try:
        values, _ = PreTrainedConfig.get_config_dict(folder)
    except (OSError, ValueError):
        values = {}
    model_type = str(values.get("model_type", ""))
    if not model_type.startswith(MODEL_TYPE_PREFIX):
        raise UserError(f"{folder} holds no trained drafter: run `draftsmith train RECIPE` first")
    drafter_class = load_drafter_class(model_type.removeprefix(MODEL_TYPE_PREFIX))
    drafter = drafter_class.from_pretrained(folder, dtype=target.dtype).to(target.device)
    drafter.attach(target)
    return drafter.freeze()
