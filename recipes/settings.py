"""What a run's folder was begun with, as JSON beside what it holds: one folder never mixes two settings."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import read_json, write_atomically


def write_settings(file: Path, settings: dict[str, Any]) -> None:
    write_atomically(file, json.dumps(settings, indent=2) + "\n")


def check_settings(file: Path, settings: dict[str, Any], again: str, may_fall: Collection[str] = ()) -> None:
    """Compare with what `write_settings` wrote, if anything.

    Raises:
        UserError: The file is damaged, or as `refuse_other_settings`, of the file's folder.
    """
    if not file.is_file():
        return
    earlier = read_json(file, dict[str, Any], f"delete the folder {file.parent} to {again}")
    refuse_other_settings(file.parent, earlier, settings, again, may_fall)


def refuse_other_settings(
    folder: Path, earlier: dict[str, Any], settings: dict[str, Any], again: str, may_fall: Collection[str] = ()
) -> None:
    """Compare what a folder was begun with and what it is to be continued with.

    Args:
        folder: For the message.
        earlier: As JSON gave it.
        settings: By recipe key, or sections of them.
        again: What is to be done once the folder is deleted: `train anew`.
        may_fall: Keys of numbers that may be lower now than they were.

    Raises:
        UserError: They differ; names the first such key with both values, and the other keys.
    """
    old, new = _flat(earlier), _flat(json.loads(json.dumps(settings)))
    fallen = {key for key in may_fall if key in old and key in new and new[key] < old[key]}
    other = [key for key in {**new, **old} if old.get(key) != new.get(key) and key not in fallen]
    if other:
        first, *more = other
        too = f" ({', '.join(more)} changed too)" if more else ""
        raise UserError(
            f"{folder} was begun with {first} = {old.get(first)!r}, now it is {new.get(first)!r}{too}: restore the "
            f"key, give the recipe another `name`, or delete that folder to {again}"
        )


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """{"eval": {"methods": [{"paths": [[0], [1]]}]}} to {"eval.methods.0.paths": [[0], [1]]}."""
    has_sections = isinstance(value, list) and all(isinstance(part, dict) for part in value)
    sections = dict(enumerate(value)) if has_sections else value
    if not isinstance(sections, dict) or not sections:
        return {key: value}
    parts = (_flat(part, f"{key}.{name}".removeprefix(".")) for name, part in sections.items())
    return {name: leaf for flat in parts for name, leaf in flat.items()}
