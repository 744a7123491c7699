"""Drafters on the Hub: `user/repo` or `user/repo@revision`, fetched into the Hub's cache and used like a folder.

What else lies in their repository, in folders of its own (exports, pictures), is not fetched.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.hub import hub_id, told_in_one_sentence
from draftsmith.recipes.run_folder import read_json

FILES = ["*.json", "*.safetensors"]
NOT_IN_FOLDERS = ["*/*"]


def drafter_place(location: str, what: str = "drafter") -> Path:
    """The folder that a drafter lies in: the one that is named, or that the Hub's repository is fetched to.

    Within one process an id stands for one commit. Without a connection, for what was fetched before.

    Args:
        what: How a sentence calls it: a key of the recipe, say.

    Raises:
        UserError: There is no such folder and the Hub does not give it, or what it gives is no drafter.
    """
    folder, published = Path(location).expanduser(), hub_id(location)
    if folder.is_dir() or published is None:
        return folder
    with told_in_one_sentence(f"{what} {location} cannot be loaded (it is no folder here, so a Hub id)", published[0]):
        folder = _fetched(*published)
    config = folder / "config.json"
    values = read_json(config, dict[str, Any], f"look at {location} on the Hub") if config.is_file() else {}
    if not str(values.get("model_type", "")).startswith(MODEL_TYPE_PREFIX):
        raise UserError(f"{what} {location}: that repository of the Hub holds no drafter that draftsmith trained")
    return folder


def is_published(location: str) -> bool:
    """Whether it is fetched from the Hub, and so nothing to write to."""
    return hub_id(location) is not None and not Path(location).expanduser().is_dir()


@lru_cache
def _fetched(repo: str, revision: str | None) -> Path:
    return Path(snapshot_download(repo, revision=revision, allow_patterns=FILES, ignore_patterns=NOT_IN_FOLDERS))
