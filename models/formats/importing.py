"""Import of published checkpoints: from a folder or a Hub repository to a drafter's folder.

The layout is recognised by the config and the tensors' names. Tensors that our drafters borrow from the target must
equal the target's; otherwise the import fails with a message, and nothing is dropped. For `drafter.init`, whose target
may be fine-tuned, they are the target's in any case. The written folder is like that of a training without steps, so
that every command for drafters accepts it.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.errors import UserError, reason
from draftsmith.files import cache_root, check_writable, expand_home, file_sha256, read_json, written_whole
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import check_drafter, fetch_drafter, load_drafter_class
from draftsmith.models.formats import causal_lm, dflash, eagle, heads, vllm_layout
from draftsmith.models.formats.reading import Checkpoint, Keys, Parameters, drafted_ids, with_own_head
from draftsmith.models.target.loading import load_target, weights_hash
from draftsmith.models.target.view import target_values
from draftsmith.models.weights import describe_differences, sampled_hash, some_of, weights_sha256
from draftsmith.recipes.removed import removal_of
from draftsmith.recipes.run_folder import TRAINING_FILE, RunFolder
from draftsmith.recipes.schema import Recipe

IMPORT_FILE = "import.json"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
NO_WEIGHTS = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LFS_POINTER = b"version https://git-lfs"
# A drafter's own tensors, where a trainer saved them under its model's name.
INSIDE_A_MODEL = re.compile(r"model\.(fc|midlayer|medusa_heads?|hydra_mlp|hidden_norm|mask_hidden)\b")


@dataclass
class Imported:
    """Content of `import.json`: the imported checkpoint, and what was assumed about it.

    files_sha256: Hashes of the checkpoint's weights files.
    assumed: Assumptions about facts that the checkpoint does not state.
    """

    source: str
    kind: str
    target: str
    files_sha256: dict[str, str]
    assumed: list[str] = field(default_factory=list)


def import_run(recipe: Recipe, location: str, folder: Path | None) -> tuple[Path, Imported]:
    """Import a published checkpoint for the recipe's target; return the drafter's folder and its import record.

    Args:
        location: As in `import_drafter`.
        folder: Folder to write; by default that of the run's own drafter.

    Raises:
        UserError: As `import_drafter`.
    """
    own = RunFolder(recipe).drafter if folder is None else None
    folder = own or expand_home(Path(folder or ""))
    check_writable(folder.parent)
    target, _ = load_target(recipe.target.model_copy(update={"device": "cpu"}))
    return folder, import_drafter(location, target, folder, None if own is None else recipe.drafter.kind)


def import_start(recipe: Recipe, location: str) -> Path:
    """Import a checkpoint for `drafter.init` into draftsmith's cache, unless it was done for these weights and target.

    Args:
        location: As in `import_drafter`.

    Returns:
        The drafter's folder.

    Raises:
        UserError: As `import_drafter`; an embedding or LM head that is not the target's is left out, with a note.
    """
    source = fetch_drafter(location, "checkpoint")
    checkpoint = sampled_hash([*source.glob("config.json"), *_weights_files(source)])
    folder = cache_root() / "imported" / f"{source.name}-{checkpoint}-{weights_hash(recipe.target)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):  # the other processes of a launch wait for it
        if not folder.is_dir():
            target, _ = load_target(recipe.target.model_copy(update={"device": "cpu"}))
            import_drafter(location, target, folder, for_start=True)
    return folder


def import_drafter(
    location: str, target: PreTrainedModel, folder: Path, kind: str | None = None, for_start: bool = False
) -> Imported:
    """Convert a published checkpoint to a drafter, written to `folder`.

    Args:
        location: A folder, or `user/repo[@revision]`.
        target: The target that the checkpoint was made for, with its weights.
        kind: The kind that is required, if `folder` is the run's own: the recipe's `drafter.kind`.
        for_start: Training continues from it, so that its embedding and LM head may be another target's.

    Raises:
        UserError: The checkpoint cannot be read, has no supported layout, does not fit the target, or is of another
            kind.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists: name another folder with --to")
    source = fetch_drafter(location, "checkpoint")
    drafter, assumed = _as_drafter(read_checkpoint(source), target, for_start)
    if kind not in (None, drafter.config.kind):
        raise UserError(
            f"{location} is a drafter of kind {drafter.config.kind}, and the recipe says drafter.kind={kind}: correct "
            f"it there, give drafter.kind={drafter.config.kind} to this command and those that follow, or import into "
            "another folder with --to"
        )
    with written_whole(folder) as partial:
        drafter.save_pretrained(partial)
        kind = drafter.config.kind
        files = {file.name: file_sha256(file) for file in _weights_files(source)}
        made = Imported(location, kind, target.config._name_or_path, files, list(assumed))
        (partial / IMPORT_FILE).write_text(json.dumps(asdict(made), indent=2) + "\n", encoding="utf-8")
        training = {
            "steps": 0,
            "history": [],
            "settings": {"drafter.kind": kind},
            "weights_sha256": weights_sha256(partial),
        }
        (partial / TRAINING_FILE).write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")
    return made


def _as_drafter(checkpoint: Checkpoint, target: PreTrainedModel, for_start: bool) -> tuple[Drafter, tuple[str, ...]]:
    """Build the drafter in the checkpoint's dtype, attached to the target; return it with the assumptions made.

    Raises:
        UserError: As `import_drafter`.
    """
    layout, read = _layout_of(checkpoint)
    found = read(checkpoint, target_values(target.config))
    head = found.borrowed.get("lm_head")
    if found.can_own_head and head is not None and head.ndim == 2:
        found = found if _is(head, target.get_output_embeddings().weight) else with_own_head(found)
    notes = _check_borrowed(found, target, for_start)
    options = dict(found.options)
    if "init" in load_drafter_class(found.kind).config_class.Options.model_fields:
        options["init"] = "random"
    empty = check_drafter(found.kind, target.config, options)  # without memory: sizes may be wild
    expected = empty.state_dict()
    mismatched = [
        name for name in expected.keys() & found.state.keys() if expected[name].shape != found.state[name].shape
    ]
    missing, unexpected = expected.keys() - found.state.keys(), found.state.keys() - expected.keys()
    differences = describe_differences(missing, unexpected, mismatched, f"not in a {found.kind} drafter")
    if differences:
        raise UserError(
            f"the checkpoint is in {layout}'s layout, but its tensors are not those of a {found.kind} drafter for this "
            f"target ({differences}): import one that was made for this target"
        )
    parameters = {name for name, _ in empty.named_parameters()}
    for name in sorted(parameters & found.state.keys()):
        if found.state[name].dtype not in DTYPES or not bool(found.state[name].isfinite().all()):
            raise UserError(
                f"the checkpoint's {name} ({found.state[name].dtype}) is quantised, or has infinite or NaN values: "
                "import the unquantised checkpoint of the same drafter, or fetch it again"
            )
    dtypes = {value.dtype for value in found.state.values() if value.is_floating_point()}
    drafter = load_drafter_class(found.kind).from_target(target, options)
    drafter = drafter.to(dtypes.pop() if len(dtypes) == 1 else torch.float32)
    drafter.config.dtype = drafter.dtype
    drafter.load_state_dict(found.state)
    return drafter.attach(target).freeze(), (*found.assumed, *notes)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint: its config, with the keys of sections moved to the top, and the tensors of all files.

    Raises:
        UserError: The folder has no weights files, or they are damaged or not all there.
    """
    config, files = folder / "config.json", _weights_files(folder)
    if not config.is_file() or not files:
        raise UserError(
            f"{folder} is no checkpoint: name a folder with config.json and weights in *.safetensors, *.bin or *.pt, "
            "or a Hub id"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        with file.open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise UserError(f"{file} is a git-lfs pointer, not the weights: run `git lfs pull` in its repository")
        try:
            # `weights_only`: of a pickle tensors are read, and no code is run.
            safe = file.suffix == ".safetensors"
            read = load_file(file) if safe else torch.load(file, "cpu", weights_only=True)
        except Exception as error:
            raise UserError(f"{file} cannot be read ({reason(error)}): fetch it again") from None
        if not isinstance(read, dict) or not all(isinstance(n, str) and isinstance(v, Tensor) for n, v in read.items()):
            raise UserError(f"{file} holds more than tensors by name: save the model's state dict alone")
        tensors |= read
    keys = Keys(read_json(config, dict[str, Any], "fetch it again"))
    if any(INSIDE_A_MODEL.match(name) for name in tensors):
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    return Checkpoint(keys, tensors)


def _layout_of(checkpoint: Checkpoint) -> tuple[str, Callable[[Checkpoint, Mapping[str, Any]], Parameters]]:
    """Return the name of the checkpoint's layout, and the function that reads it.

    Raises:
        UserError: The layout is not supported.
    """
    names, keys = checkpoint.tensors.keys(), checkpoint.keys
    fused = checkpoint.tensors.get("fc.weight")
    if not keys.flag("use_aux_hidden_state", True):
        raise UserError(
            "config.json: use_aux_hidden_state is false, so that this drafter reads the target's final hidden state "
            "and no fused layers, which EAGLE-3 drafters here cannot: import one that was trained on fused layers"
        )
    if "speculators_model_type" in keys:
        keys["transformer_layer_config"]  # its layers' keys, which must be there
    if "lilicorr.out_head.weight" in names:
        raise UserError(f"the checkpoint is a LiLiCorr drafter, whose kind {removal_of('drafter.kind', 'lilicorr')}")
    if any(re.match(r"(medusa_heads?\.)?\d+\.\d+\.linear\.|blocks\.\d+\.layers\.", name) for name in names):
        return "Medusa", heads.medusa_parameters
    if "hydra_mlp.0.0.linear.weight" in names:
        return "Hydra", heads.hydra_parameters
    if "context_proj.weight" in names:
        return "TorchSpec", dflash.parameters
    if fused is not None and "hidden_norm.weight" in names and "layers.0.self_attn.q_norm.weight" in names:
        return "DFlash", dflash.parameters
    if fused is not None and ("midlayer.hidden_norm.weight" in names or "layers.0.hidden_norm.weight" in names):
        return "EAGLE-3", eagle.parameters
    if fused is not None and fused.ndim == 2 and fused.shape[1] == 2 * fused.shape[0]:
        return "EAGLE", eagle.eagle_parameters
    if "layer_width" in keys:
        return "draftsmith's vLLM plugin", vllm_layout.parameters
    if "model.norm.weight" in names and "num_hidden_layers" in keys:
        return "transformers", causal_lm.parameters
    raise UserError(
        f"the checkpoint ({some_of(sorted(names))}) has none of the supported layouts: EAGLE, EAGLE-3, P-EAGLE, "
        "DFlash (also TorchSpec's), DFlash 2, DSpark, Medusa, Hydra, or a causal language model with the "
        "target's embedding"
    )


def _check_borrowed(found: Parameters, target: PreTrainedModel, for_start: bool) -> list[str]:
    """Check that borrowed parameters of the checkpoint are the target's; of a start they need its shape alone.

    Returns:
        A note on each that is left out.

    Raises:
        UserError: The checkpoint has another embedding or LM head than the target.
    """
    sources = {"embed_tokens": target.get_input_embeddings().weight, "lm_head": target.get_output_embeddings().weight}
    if found.options.get("draft_vocab_size") is not None:
        sources["lm_head"] = sources["lm_head"][drafted_ids(found.state["d2t"])]
    notes = list[str]()
    for name, theirs in found.borrowed.items():
        if _is(theirs, sources[name]):
            continue
        if not for_start or theirs.shape != sources[name].shape:
            raise UserError(
                f"the checkpoint's {name} is not the target's, and {found.kind} drafters here have no separate one: "
                "import one that was made for this target, or, if it is a whole model, name it as the model of a "
                "`kind: draft_model` in eval.methods; one for this target's base is a start (`drafter.init`)"
            )
        notes.append(f"its {name} is not this target's; the target's is used")
    return notes


def _is(theirs: Tensor, ours: Tensor) -> bool:
    """Return True if a checkpoint's tensor is the target's, apart from rounding to the coarser of both dtypes."""
    if theirs.shape != ours.shape or theirs.dtype not in DTYPES:
        return False
    return torch.equal(theirs.to(ours.dtype), ours) or torch.equal(theirs, ours.to(theirs.dtype))


def _weights_files(folder: Path) -> list[Path]:
    """List the checkpoint's safetensors, or its pickles if it has none.

    Raises:
        UserError: An index names a file that is missing.
    """
    for index in sorted(file for file in folder.glob("*.index.json") if file.is_file()):
        for name in sorted(set(read_json(index, dict[str, str], "fetch it again", "weight_map").values())):
            if not (folder / name).is_file():
                raise UserError(f"{folder / name} is missing, a part of the weights that {index.name} names: fetch it")
    found = [sorted(file for file in folder.glob(pattern) if file.is_file()) for pattern in WEIGHTS]
    return found[0] or [file for file in (*found[1], *found[2]) if file.name not in NO_WEIGHTS]
