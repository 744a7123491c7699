"""Choice of the checkpoint to resume from: the newest complete one. Incomplete ones are moved aside and reported.

A checkpoint's `manifest.json` is written last. It has the size or, for small files, the hash of each file, and the
number of processes. So a checkpoint is complete if its files match its manifest.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.files import read_json, write_atomically

# What `Manifest.launch` may say: earlier releases split the weights of others.
LAUNCHES = ("one process", "DDP")
STATE_FILE, MANIFEST = "trainer_state.json", "manifest.json"
DAMAGED = "damaged-"
# Larger files are checked by their size alone, as reading them again would keep training waiting.
HASHED_BYTES = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`. files: fingerprint of each file, by its path in the checkpoint."""

    processes: int
    files: dict[str, str]
    launch: str = "DDP"


def _fingerprint(file: Path) -> str:
    """Return the SHA-256 of a file, or of a large one its size."""
    size = file.stat().st_size
    return f"{size} bytes" if size > HASHED_BYTES else hashlib.sha256(file.read_bytes()).hexdigest()


def write_manifest(checkpoint: Path, processes: int) -> None:
    """Write `manifest.json` with the checkpoint's files; call it when all processes have written theirs."""
    files = {str(path.relative_to(checkpoint)): _fingerprint(path) for path in checkpoint.rglob("*") if path.is_file()}
    write_atomically(checkpoint / MANIFEST, json.dumps(asdict(Manifest(processes, files)), indent=1) + "\n")


def describe_damage(checkpoint: Path) -> str | None:
    """Describe the first missing or incomplete file of a checkpoint in words; None if it is complete."""
    try:
        files = read_json(checkpoint / MANIFEST, Manifest, "").files
    except UserError:
        return f"{MANIFEST} is missing or incomplete"
    for name, fingerprint in files.items():
        if not (checkpoint / name).is_file() or _fingerprint(checkpoint / name) != fingerprint:
            return f"{name} is missing or incomplete"
    return None


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest `checkpoint-N` without checking it; call `set_damaged_aside` first."""
    return next(iter(_newest_first(folder)), None)


def set_damaged_aside(folder: Path) -> list[str]:
    """Rename the damaged checkpoints newer than the newest complete one, so that the Trainer ignores them.

    Returns:
        A message for each renamed checkpoint.
    """
    sentences = []
    for checkpoint in _newest_first(folder):
        damage = describe_damage(checkpoint)
        if damage is None:
            break
        names = (f"{DAMAGED}{checkpoint.name}{f'-{number}' if number else ''}" for number in range(1000))
        aside = next(folder / name for name in names if not (folder / name).exists())
        checkpoint.rename(aside)
        sentences.append(f"{checkpoint} is damaged ({damage}): set aside as {aside.name}")
    return sentences


def check_same_launch(checkpoint: Path, processes: int) -> None:
    """Check that a checkpoint was written by this number of processes, so that resuming is exact.

    Raises:
        UserError: The checkpoint was written by another number of processes, or has a model that was split among them.
    """
    written = read_json(checkpoint / MANIFEST, Manifest, "")
    earlier, restart = written.processes, f"delete {checkpoint.parent} to train from scratch"
    if earlier != processes:
        are = f"are {processes}" if processes > 1 else "is one"
        raise UserError(
            f"{checkpoint} was written by {earlier} process{'es' * (earlier > 1)} and there {are} now: training "
            f"resumes exactly with the same number only, so launch {earlier} again, or {restart}"
        )
    if written.launch not in LAUNCHES:
        raise UserError(f"{checkpoint} was written under {written.launch}, which is not supported any more: {restart}")


def _newest_first(folder: Path) -> list[Path]:
    numbered = {
        int(match[1]): path
        for path in folder.glob("checkpoint-*")
        if path.is_dir() and (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    return [numbered[step] for step in sorted(numbered, reverse=True)]
