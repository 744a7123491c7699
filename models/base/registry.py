"""Drafters by name: the class that `drafter.kind` stands for, and trained drafters from their folders or the Hub.

A drafter on the Hub is `user/repo` or `user/repo@revision`: its files are downloaded into the Hub's cache and used like
a folder. Subfolders of its repository (exports, pictures) are not downloaded.
"""

import importlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.files import expand_home, read_json
from draftsmith.hub import hub_errors, hub_id
from draftsmith.models.base.config import MODEL_TYPE_PREFIX
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.weights import load_weights, some_of, weights_sha256
from draftsmith.recipes.removed import removal_of
from draftsmith.recipes.run_folder import TRAINING_FILE

# The drafter for SmolLM2-135M-Instruct.
SHIPPED_DRAFTER = Path(__file__).resolve().parents[1] / "shipped_drafter"
# The drafters of `draftsmith demo`, by their target's name in `models/target/packaged.py`.
SHIPPED_DRAFTERS = {"smollm2": SHIPPED_DRAFTER, "qwen2.5-coder-0.5b": SHIPPED_DRAFTER / "qwen2.5-coder-0.5b"}
DRAFTERS = SHIPPED_DRAFTER.with_name("drafters")  # a file each
FILES = ["*.json", "*.safetensors", "*.bin", "*.pt"]
NOT_IN_FOLDERS = ["*/*"]


@dataclass
class Start:
    """The trained drafter that a training took its first weights from (`drafter.init`)."""

    source: str  # as the recipe names it
    kind: str
    weights_sha256: dict[str, str]
    fresh: list[str]  # parameters that the trained drafter lacks
    unused: list[str]  # parameters that only the trained drafter has
    draft_vocabulary: str | None = None  # how the draft vocabulary was carried over, in words; None without one
    imported: list[str] | None = None  # assumptions of its import from an engine's format; None if trained here


@dataclass
class Training:
    """Content of `training.json`, the record of a training."""

    steps: int
    history: list[dict[str, float]]
    settings: dict[str, Any] = field(default_factory=dict)
    epochs: float | None = None
    tokens: int = 0
    wall_time_s: float = 0.0
    waited_for_batches_s: float = 0.0
    batch_size: int = 0
    rows: int | None = None
    heldout_rows: int | None = None
    target_change: str | None = None
    draft_vocabulary_coverage: float | None = None  # share of the tokens with loss that a reduced one has
    weights_sha256: dict[str, str] | None = None
    start: Start | None = None
    best_step: int | None = None  # whose weights were kept, if not the last one's


def load_drafter_class(kind: str) -> type[Drafter]:
    """Return the class that `drafter.kind` names, the attribute `DRAFTER` of `models/drafters/<kind>.py`.

    Raises:
        UserError: The kind does not exist (the message lists those that do), or its config class has a `model_type`
            with which a trained drafter could not be loaded.
    """
    kinds, file = drafter_kinds(), f"models/drafters/{kind}.py"
    if kind not in kinds:
        if (DRAFTERS / f"{kind}.py").is_file():
            raise UserError(f"{file} has no line `DRAFTER = YourClass`: add it as the last one")
        if removal := removal_of("drafter.kind", kind):
            raise UserError(f"drafter.kind {removal}")
        raise UserError(f"drafter.kind `{kind}` does not exist: use one of {', '.join(kinds)}")
    drafter_class: type[Drafter] = importlib.import_module(f"draftsmith.models.drafters.{kind}").DRAFTER
    config_class = drafter_class.config_class
    if config_class.model_type != MODEL_TYPE_PREFIX + kind:
        raise UserError(
            f"{file}: {drafter_class.__name__}.config_class is {config_class.__name__}, whose model_type is "
            f"`{config_class.model_type}`: give it its own config, with `{MODEL_TYPE_PREFIX}{kind}`"
        )
    return drafter_class


def check_drafter(kind: str, target_config: PreTrainedConfig, options: dict[str, Any]) -> Drafter:
    """Check a target's config and a kind's options, before any weight is loaded; return a drafter without memory.

    Raises:
        UserError: There is no such kind, an option is wrong, or the target's architecture is not supported.
    """
    drafter_class = load_drafter_class(kind)
    with torch.device("meta"):
        return drafter_class(drafter_class.config_class.for_target(target_config, options))


def drafter_kinds() -> list[str]:
    """Return the kinds of drafters: the names of the files of `models/drafters/` that define a `DRAFTER`."""
    files = sorted(DRAFTERS.glob("*.py"))
    return [file.stem for file in files if "\nDRAFTER = " in file.read_text(encoding="utf-8")]


def load_drafter(folder: str | Path, target: PreTrainedModel) -> Drafter:
    """Load a trained drafter from a folder or the Hub, in the target's dtype, on its device, attached, in eval mode.

    Raises:
        UserError: The folder holds no drafter, its weights do not fit its kind, are not those that training wrote, or
            are not finite.
    """
    drafter = read_drafter(folder, target.dtype).to(target.device)
    drafter.attach(target)
    return drafter.freeze()


def read_drafter(folder: str | Path, dtype: torch.dtype | Literal["auto"]) -> Drafter:
    """Load a trained drafter on the CPU, attached to no target; `auto` is the dtype it was saved in.

    Raises:
        UserError: The folder holds no drafter, or its weights are damaged or not those that training wrote.
    """
    place = drafter_place(folder) if isinstance(folder, str) else folder
    kind = check_as_trained(place)
    drafter = load_weights("drafter", str(place), load_drafter_class(kind), dtype=dtype)
    wrong = [name for name, weight in drafter.named_parameters() if not bool(weight.isfinite().all())]
    if wrong:  # trees by confidence would break, and all drafts be rejected
        raise UserError(
            f"{place} has weights that are infinite or NaN ({some_of(wrong)}; in {drafter.dtype}): restore the "
            "folder, or train again"
        )
    return drafter


def read_training(folder: Path) -> Training:
    """Read a drafter folder's `training.json`.

    Raises:
        UserError: The file is damaged.
    """
    way_out = "delete it and run `draftsmith train` again, which resumes from the last checkpoint"
    return read_json(folder / TRAINING_FILE, Training, way_out)


def drafter_config(folder: Path) -> dict[str, Any]:
    """Read the values of a folder's `config.json`; an empty dict if the file does not exist.

    Raises:
        UserError: The file is damaged.
    """
    file = folder / "config.json"
    if file.is_file():
        return read_json(file, dict[str, Any], "restore it, or delete the folder and train again")
    return {}


def no_drafter(folder: Path) -> UserError:
    """Return the error for a folder that holds no trained drafter."""
    return UserError(f"{folder} holds no trained drafter: run `draftsmith train` with the same arguments first")


def check_as_trained(folder: Path) -> str:
    """Compare the weights with `training.json`, if it exists; return the kind.

    Raises:
        UserError: The weights differ from those that were trained, or the folder holds no trained drafter.
    """
    if not is_drafter(folder):
        raise no_drafter(folder)
    kind, file = drafter_config(folder)["model_type"].removeprefix(MODEL_TYPE_PREFIX), folder / TRAINING_FILE
    if not file.is_file():
        return kind
    weights = read_training(folder).weights_sha256
    if weights is not None and weights != weights_sha256(folder):
        raise UserError(
            f"the weights in {folder} are not those that training wrote ({file.name} has their hashes): restore them, "
            "or delete the folder and run `draftsmith train` again"
        )
    return kind


def drafter_place(location: str, what: str = "drafter") -> Path:
    """Return the folder of a drafter; a Hub repository is downloaded first, as by `fetch_drafter`.

    Raises:
        UserError: There is no such folder or Hub repository, or the repository holds no drafter.
    """
    folder = fetch_drafter(location, what)
    if is_published(location) and not is_drafter(folder):
        raise UserError(
            f"{what} {location}: this Hub repository holds no draftsmith drafter: name another; if it is published for "
            f"an engine, run `draftsmith import RECIPE --from {location} --to FOLDER`, then name FOLDER"
        )
    return folder


def fetch_drafter(location: str, what: str) -> Path:
    """Return the folder `location`, or download the Hub repository and return its folder; check no contents.

    Within one process a Hub id stands for one commit; without a connection, for the commit downloaded before.

    Args:
        what: Name of the drafter in messages, such as a key of the recipe.

    Raises:
        UserError: The folder does not exist and the Hub has no such repository.
    """
    folder, published = expand_home(location), hub_id(location)
    if folder.is_dir() or published is None:
        return folder
    with hub_errors(f"{what} {location} cannot be loaded (it is no folder, so it is read as a Hub id)", published[0]):
        return _fetched(*published)


def is_drafter(folder: Path) -> bool:
    """Return whether the folder's `config.json` is that of a drafter of draftsmith."""
    return str(drafter_config(folder).get("model_type", "")).startswith(MODEL_TYPE_PREFIX)


def is_published(location: str) -> bool:
    """Return True if the drafter is downloaded from the Hub, so that its folder must not be written to."""
    return hub_id(location) is not None and not expand_home(location).is_dir()


@lru_cache
def _fetched(repo: str, revision: str | None) -> Path:
    return Path(snapshot_download(repo, revision=revision, allow_patterns=FILES, ignore_patterns=NOT_IN_FOLDERS))
