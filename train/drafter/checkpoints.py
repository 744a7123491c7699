"""Which checkpoint training goes on from: the newest one that is whole. A damaged one is set aside and named.

Every file is opened: weights by safetensors, which compares the file's size with its header, and what torch wrote (a
zip archive) by its own checksums.
"""

import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open

from draftsmith.train.monitoring.validation import EarlyStopping
from draftsmith.train.processes.layouts import layout_damage

STATE_FILE = "trainer_state.json"  # the Trainer writes it last
DAMAGED = "damaged-"


@dataclass
class _State:
    """What is read of the Trainer's state."""

    global_step: int
    max_steps: int
    epoch: float | None
    log_history: list[dict[str, Any]]
    stateful_callbacks: dict[str, dict[str, Any]]


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest `checkpoint-N`, unchecked: for where `set_damaged_aside` has looked."""
    return next(iter(_newest_first(folder)), None)


def newest_whole_checkpoint(folder: Path) -> Path | None:
    """The newest `checkpoint-N` in which no file is missing or damaged. Changes nothing."""
    return next((checkpoint for checkpoint in _newest_first(folder) if what_is_damaged(checkpoint) is None), None)


def is_last_checkpoint(checkpoint: Path) -> bool:
    """Whether all steps of the training were done when it was written, or validation had ended it."""
    state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    early = state["stateful_callbacks"].get(EarlyStopping.__name__, {}).get("attributes", {})
    return state["global_step"] >= state["max_steps"] or bool(early.get("stopped"))


def set_damaged_aside(folder: Path) -> list[str]:
    """Rename the checkpoints newer than the newest whole one, so that the Trainer counts and rotates without them.

    Returns:
        A sentence for each.
    """
    sentences = []
    for checkpoint in _newest_first(folder):
        damage = what_is_damaged(checkpoint)
        if damage is None:
            break
        aside = next(
            path
            for number in range(1000)
            if not (path := folder / f"{DAMAGED}{checkpoint.name}{f'-{number}' if number else ''}").exists()
        )
        checkpoint.rename(aside)
        sentences.append(f"{checkpoint} is damaged ({damage}): set aside as {aside.name}")
    return sentences


def what_is_damaged(checkpoint: Path) -> str | None:
    """The first damaged file and what is wrong with it; None where all are whole."""
    if not (checkpoint / STATE_FILE).exists():
        return f"{STATE_FILE} is missing, so it was not written to its end"
    if damage := layout_damage(checkpoint):
        return damage
    for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt"):
                    pass
            elif file.suffix == ".json":
                form = _State if file.name == STATE_FILE else dict[str, Any]
                TypeAdapter(form).validate_python(from_json(file.read_bytes()))
            elif file.suffix in (".pt", ".pth", ".bin"):
                with zipfile.ZipFile(file) as archive:
                    broken = archive.testzip()
                if broken is not None:
                    return f"{file.name}: {broken} has another checksum"
        except ValidationError:
            return f"{file.name} is not what the Trainer wrote"
        except (OSError, ValueError, SafetensorError, zipfile.BadZipFile) as error:
            return f"{file.name}: {error}"
    return None


def _newest_first(folder: Path) -> list[Path]:
    numbered = {
        int(match[1]): path
        for path in folder.glob("checkpoint-*")
        if path.is_dir() and (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    return [numbered[step] for step in sorted(numbered, reverse=True)]
