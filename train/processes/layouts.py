"""How a checkpoint is laid out: by the Trainer itself, by FSDP2, or by DeepSpeed; and by how many processes.

The Trainer (one process, DDP): `model.safetensors`, `optimizer.pt`. FSDP2: folders of torch's distributed checkpoints,
whose `.metadata` is written last. DeepSpeed: `global_step<N>` and `latest`, which names it. All of them have the random
generators' states beside it, a file for each process.
"""

from pathlib import Path
from typing import Literal

from torch.distributed.checkpoint import FileSystemReader

from draftsmith.recipes.errors import UserError
from draftsmith.train.processes.launch import Launch

Layout = Literal["whole", "fsdp", "zero"]
OF_FSDP = {"pytorch_model_fsdp_0": "optimizer_0", "pytorch_model_fsdp.bin": "optimizer.bin"}
OF_DEEPSPEED, METADATA = "latest", ".metadata"
# What exact resumption takes beside the weights; without one of them the Trainer would start it anew, silently.
OF_TRAINER = ("optimizer.pt", "scheduler.pt")


def layout_of(checkpoint: Path) -> Layout:
    if any((checkpoint / name).exists() for name in OF_FSDP):
        return "fsdp"
    if (checkpoint / OF_DEEPSPEED).exists() or any(checkpoint.glob("global_step*")):
        return "zero"
    return "whole"


def layout_damage(checkpoint: Path) -> str | None:
    """What of the layout is not there; None where all is. What single files hold is not looked at."""
    layout = layout_of(checkpoint)
    if layout == "fsdp":
        (weights, optimizer), *_ = ((w, o) for w, o in OF_FSDP.items() if (checkpoint / w).exists())
        return next(filter(None, (_distributed_damage(checkpoint / name) for name in (weights, optimizer))), None)
    if layout == "zero":
        named = checkpoint / OF_DEEPSPEED
        folder = checkpoint / named.read_text(encoding="utf-8").strip() if named.is_file() else None
        return None if folder is not None and folder.is_dir() else f"{OF_DEEPSPEED} names no folder that is there"
    there = {name for name in OF_TRAINER if (checkpoint / name).exists()}
    # All of them missing: the recipe saves weights alone.
    return f"{min(set(OF_TRAINER) - there)} is missing" if len(there) == 1 else None


def _distributed_damage(place: Path) -> str | None:
    if not place.exists():
        return f"{place.name} is missing"
    if place.is_file():
        return None
    if not (place / METADATA).is_file():
        return f"{place.name} was not written to its end"
    try:
        parts = FileSystemReader(place).read_metadata().storage_data or {}
    except Exception as error:  # of any kind: it is a pickle
        return f"{place.name}/{METADATA}: {error or type(error).__name__}"
    for part in parts.values():
        file = place / part.relative_path
        if not file.is_file() or file.stat().st_size < part.offset + part.length:
            return f"{place.name}/{part.relative_path} is not whole"
    return None


def refuse_other_launch(checkpoint: Path, launch: Launch) -> None:
    """
    Raises:
        UserError: The checkpoint was written by another number of processes, or under another way of splitting.
    """
    anew = f"or delete {checkpoint.parent} to train anew"
    written_by = max(1, len(list(checkpoint.glob("rng_state_*.pth"))))
    if written_by != launch.processes:
        raise UserError(
            f"{checkpoint} was written by {written_by} process{'es' * (written_by > 1)} and there {_are(launch)} now: "
            f"training goes on exactly with as many only, so launch {written_by} again, {anew}"
        )
    layout = layout_of(checkpoint)
    wanted: Layout = launch.strategy if launch.strategy in ("fsdp", "zero") else "whole"
    if layout != wanted:
        names = {"fsdp": "FSDP2", "zero": "DeepSpeed", "whole": "DDP or one process"}
        raise UserError(
            f"{checkpoint} was written under {names[layout]}, which {launch.name} cannot read: launch it as before, "
            f"{anew}"
        )


def _are(launch: Launch) -> str:
    return f"are {launch.processes}" if launch.processes > 1 else "is one"
