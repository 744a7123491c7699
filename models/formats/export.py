"""A drafter's folder into another format's: written whole or not at all, then read back and compared.

What was written is held against three things that do not know how it was written: the loader's rules (names, shapes,
config), the target's config (RoPE, norms, vocabulary, positions), and, read back into our names, the drafter's values.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.formats.checkpoint import Checkpoint, Parameters, config_differences
from draftsmith.models.formats.eagle3 import with_own_head
from draftsmith.models.formats.served import EXPORTERS, Exporter, drafted_tokens, kind_of, refusal, serving_command
from draftsmith.models.formats.speculators import flattened
from draftsmith.models.weights import load_weights, some_of, weights_sha256
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import read_json, share_as_usual

EXPORT_FILE = "export.json"  # written last: marks a folder as ours, which a later export may replace
# By these in a folder's path vLLM takes it for something else, whatever `method` says: config/speculative.py:1326-1349.
NAMES_OF_METHODS = ("eagle-", "eagle3", "dflash", "dspark")
# Options that say nothing of the weights: a loss, and whether a single mask is called shared.
UNCOMPARED = ("loss", "shared_mask")
NAMED_METHODS = ("eagle", "eagle3", "dflash", "dspark")


@dataclass
class Export:
    """`export.json`: what was exported, and how it is served.

    drafter_sha256: Of the drafter's weights files, as they were when it was exported.
    """

    to: str
    kind: str
    target: str
    num_speculative_tokens: int
    command: str | None
    drafter_sha256: dict[str, str]


def refuse_inexpressible(drafter: Drafter, to: str) -> None:
    """
    Raises:
        UserError: The format cannot express it: says why, and with which recipe line it could.
    """
    refused = refusal(drafter.config, to)
    if refused is not None:
        raise UserError(f"this {kind_of(drafter.config)} drafter cannot go `--to {to}`: {refused.sentence()}")


def export_drafter(
    drafter: Drafter, to: str, folder: Path, target: str, drafter_folder: Path, loading: Sequence[str] = ()
) -> Export:
    """Write `folder` in this format.

    Args:
        drafter: Attached to its target, where the way asks for it (`needs_target`).
        target: Where the target is, for the command.
        drafter_folder: Where it was read from.
        loading: How the target is loaded, for the command: of `served.loading_words`.

    Raises:
        UserError: The format cannot express it, or the folder holds something else.
    """
    refuse_inexpressible(drafter, to)
    config, exporter = drafter.config, EXPORTERS[kind_of(drafter.config), to]
    _refuse_folder(folder, to, exporter)
    made = Export(
        to=to,
        kind=kind_of(config),
        target=target,
        num_speculative_tokens=drafted_tokens(config),
        command=serving_command(config, to, target, str(folder.absolute()), loading),
        drafter_sha256=weights_sha256(drafter_folder),
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{what}") for what in ("partial", "old"))
    try:
        write_checkpoint(exporter.write(drafter), partial, _weights_file(exporter))
        check_written(partial, drafter, exporter)
        (partial / EXPORT_FILE).write_text(json.dumps(asdict(made), indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    finally:
        for rest in (partial, old):
            shutil.rmtree(rest, ignore_errors=True)
    return made


def write_checkpoint(checkpoint: Checkpoint, folder: Path, weights_file: str = "model.safetensors") -> None:
    """`config.json` and the weights."""
    folder.mkdir(parents=True)
    text = json.dumps(checkpoint.config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    # Copies: safetensors refuses tensors that share memory.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in checkpoint.tensors.items()}
    if weights_file.endswith(".safetensors"):
        save_file(tensors, folder / weights_file, {"format": "pt"})
    else:
        torch.save(tensors, folder / weights_file)
    share_as_usual(folder)


def read_checkpoint(folder: Path, weights_file: str = "model.safetensors") -> Checkpoint:
    """What `write_checkpoint` wrote, in one flat config."""
    config = read_json(folder / "config.json", dict[str, Any], "export it again")
    file = folder / weights_file
    tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    return Checkpoint(flattened(config), tensors)


def check_written(folder: Path, drafter: Drafter, exporter: Exporter) -> None:
    """
    Raises:
        RuntimeError: What lies there is not what its reader asks for, or not the drafter: a bug of ours.
    """
    read = read_checkpoint(folder, _weights_file(exporter))
    target_config = drafter.config.target_config
    if exporter.rules is None:
        load_weights("export", str(folder), AutoModelForCausalLM, dtype="auto")
        wrong = []
    else:
        shapes = {name: tuple(value.shape) for name, value in read.tensors.items()}
        wrong = exporter.rules.complaints(read.config, shapes)
    if "num_attention_heads" in read.config:
        differences = config_differences(read.config, target_config, exactly=True, layers=exporter.layers)
        wrong += [f"config: {sentence}" for sentence in differences]
    wrong = wrong or _read_back_wrong(exporter.read(read, target_config), drafter)
    if wrong:
        raise RuntimeError(f"the export is not what it should be: {'; '.join(wrong)}")


def _read_back_wrong(back: Parameters, drafter: Drafter) -> list[str]:
    """Where what is read back is not the drafter."""
    if getattr(drafter.config, "draft_vocab_size", None) == drafter.config.target_config["vocab_size"]:
        back = with_own_head(back)
    wrong = [] if back.kind == kind_of(drafter.config) else [f"it would be read as {back.kind}"]
    wrong += [
        f"option {key} would be read as {value!r}"
        for key, value in back.options.items()
        if key not in UNCOMPARED and getattr(drafter.config, key) != value
    ]
    state = drafter.state_dict()
    names = [
        name
        for name in sorted(state.keys() | back.state.keys())
        if name not in state or name not in back.state or not _same(state[name], back.state[name])
    ]
    return wrong + ([f"read back, {some_of(names)} differ"] if names else [])


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs)


def _weights_file(exporter: Exporter) -> str:
    return "model.safetensors" if exporter.rules is None else exporter.rules.weights_file


def _refuse_folder(folder: Path, to: str, exporter: Exporter) -> None:
    if folder.exists() and not (folder / EXPORT_FILE).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there and is no export: name another place with --folder")
    taken = next((name for name in NAMES_OF_METHODS if name in str(folder.absolute()).lower()), None)
    if to == "vllm" and exporter.method not in NAMED_METHODS and taken is not None:
        raise UserError(
            f"vLLM takes every folder with `{taken}` in its path for another method: export this drafter to a path "
            "without it, with --folder"
        )
