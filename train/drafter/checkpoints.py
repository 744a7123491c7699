"""Which checkpoint training goes on from: the newest one that is complete. Others are set aside and named.

A checkpoint's `manifest.json` names its files with their sizes, and how many processes wrote it under which launch; the
Trainer's state is written after it. So a checkpoint is complete if its state can be read and all files of its manifest
are there at their size, whatever wrote them: the Trainer itself, FSDP2 or DeepSpeed.
"""

import json
import re
from pathlib import Path
from typing import Any

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import read_json, write_atomically
from draftsmith.train.processes.launch import Launch

STATE_FILE, MANIFEST = "trainer_state.json", "manifest.json"
DAMAGED = "damaged-"


def write_manifest(checkpoint: Path, launch: Launch) -> None:
    """Write down which files a checkpoint has, once all processes have written theirs."""
    files = {str(path.relative_to(checkpoint)): path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()}
    values = {"launch": launch.name, "processes": launch.processes, "files": files}
    write_atomically(checkpoint / MANIFEST, json.dumps(values, indent=1) + "\n")


def what_is_damaged(checkpoint: Path) -> str | None:
    """The first file that is missing or not whole; None if the checkpoint is complete.

    Weights alone (`train.save_only_model`) have no manifest.
    """
    for name in (STATE_FILE, MANIFEST):
        if name == STATE_FILE or (checkpoint / name).exists():
            try:
                read_json(checkpoint / name, dict[str, Any], "")
            except UserError:
                return f"{name} is missing or not whole"
    for name, size in _manifest(checkpoint)["files"].items():
        file = checkpoint / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or not whole"
    return None


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest `checkpoint-N`, unchecked: for where `set_damaged_aside` has looked."""
    return next(iter(_newest_first(folder)), None)


def set_damaged_aside(folder: Path) -> list[str]:
    """Rename the checkpoints newer than the newest complete one, so that the Trainer rotates without them.

    Returns:
        A sentence for each.
    """
    sentences = []
    for checkpoint in _newest_first(folder):
        damage = what_is_damaged(checkpoint)
        if damage is None:
            break
        names = (f"{DAMAGED}{checkpoint.name}{f'-{number}' if number else ''}" for number in range(1000))
        aside = next(folder / name for name in names if not (folder / name).exists())
        checkpoint.rename(aside)
        sentences.append(f"{checkpoint} is damaged ({damage}): set aside as {aside.name}")
    return sentences


def is_last_checkpoint(checkpoint: Path) -> bool:
    """Whether all steps of the training were done when it was written, or validation had ended it."""
    state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    early = state["stateful_callbacks"].get("EarlyStoppingCallback")
    stopped = early is not None and (
        early["attributes"]["early_stopping_patience_counter"] >= early["args"]["early_stopping_patience"]
    )
    return stopped or state["global_step"] >= state["max_steps"]


def refuse_other_launch(checkpoint: Path, launch: Launch) -> None:
    """Refuse to go on from another launch's checkpoint, which would not be exact.

    Raises:
        UserError: It was written by another number of processes, or under another way of splitting.
    """
    written: dict[str, Any] = {"processes": launch.processes, "launch": launch.name} | _manifest(checkpoint)
    processes, anew = written["processes"], f"or delete {checkpoint.parent} to train anew"
    if processes != launch.processes:
        are = f"are {launch.processes}" if launch.processes > 1 else "is one"
        raise UserError(
            f"{checkpoint} was written by {processes} process{'es' * (processes > 1)} and there {are} now: training "
            f"goes on exactly with as many only, so launch {processes} again, {anew}"
        )
    if written["launch"] != launch.name:
        raise UserError(
            f"{checkpoint} was written under {written['launch']}, which {launch.name} cannot read: launch it as "
            f"before, {anew}"
        )


def _manifest(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / MANIFEST
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"files": {}}


def _newest_first(folder: Path) -> list[Path]:
    numbered = {
        int(match[1]): path
        for path in folder.glob("checkpoint-*")
        if path.is_dir() and (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    return [numbered[step] for step in sorted(numbered, reverse=True)]
