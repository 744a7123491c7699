"""Export of trained drafters to other programs: supported formats, serving commands, and the exported folder.

A folder is written completely or not at all. Its config is compared with the target's (RoPE, norms, vocabulary,
positions), and its tensors, converted back to our names, with the drafter's. Whether a format can express a drafter
depends on its config only, so that this can be checked before training. A format refuses kinds without an exporter.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.errors import UserError, did_you_mean
from draftsmith.files import check_writable, expand_home, written_whole
from draftsmith.models.base.config import DrafterConfig
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import no_drafter, read_drafter
from draftsmith.models.formats import causal_lm, dflash, eagle, heads, llamacpp, vllm_layout
from draftsmith.models.formats.importing import read_checkpoint
from draftsmith.models.formats.layout import Exporter, drafted_tokens
from draftsmith.models.formats.reading import Checkpoint, config_differences, with_own_head
from draftsmith.models.target.gguf_file import get_gguf_file
from draftsmith.models.target.loading import load_target, target_location
from draftsmith.models.weights import some_of, weights_sha256
from draftsmith.recipes.removed import removal_of
from draftsmith.recipes.run_folder import TRAINING_FILE, RunFolder
from draftsmith.recipes.schema import Recipe, TargetRecipe

FORMATS = {
    "vllm": "vLLM 0.32 and 0.33",
    "sglang": "SGLang 0.5.23",
    "speculators": "speculators, read by vLLM 0.32",
    "gguf": "llama.cpp, as in llama-cpp-python 0.3.36",
}
FORMAT_OF_ENGINE = {"llamacpp": "gguf"}  # engines whose format has another name
EXPORTERS: dict[tuple[str, str], Exporter] = {
    **eagle.EXPORTERS, **heads.EXPORTERS, **causal_lm.EXPORTERS, **dflash.EXPORTERS, **llamacpp.EXPORTERS,
    **vllm_layout.EXPORTERS,
}  # fmt: skip
EXPORT_FILE = "export.json"  # written last: marks a folder as ours, which a later export may replace
# With one of these in a folder's path vLLM ignores `method`: config/speculative.py:1326-1349.
NAMES_OF_METHODS = ("eagle-", "eagle3", "dflash", "dspark")
NAMED_METHODS = ("eagle", "eagle3", "dflash", "dspark")
# Options that do not affect the weights, and `layers`, whose kinds may be the same layers: config and names tell.
UNCOMPARED = ("loss", "shared_mask", "first_token", "layers")


@dataclass
class Export:
    """Content of `export.json`: the exported drafter and its serving command.

    drafter_sha256: SHA-256 of the drafter's weights files at the time of the export.
    """

    to: str
    kind: str
    target: str
    num_speculative_tokens: int
    command: str
    drafter_sha256: dict[str, str]


@dataclass
class Exported:
    """Result of `export_run`: the exported folder and its `export.json`."""

    folder: Path
    made: Export
    versions: str
    caveat: str | None

    def lines(self) -> list[str]:
        """Return the lines to print; the last one is the serving command."""
        done = f"{self.made.kind} drafter, checked by name, shape and value: {self.folder}"
        warned = [] if self.caveat is None else [f"Note: {self.caveat}"]
        return [done, *warned, f"Serve it ({self.versions}):", self.made.command]


# ---- where a drafter can go ----


def check_format(to: str) -> None:
    """Check that `to` names a format of exports.

    Raises:
        UserError: The format does not exist.
    """
    if to not in FORMATS:
        formats = ", ".join(FORMATS)
        if removal := removal_of("export.to", to):
            raise UserError(f"the format {removal}")
        raise UserError(f"there is no format {to}: {did_you_mean(to, FORMATS, f'use one of {formats}')}")


def refusal(config: DrafterConfig, to: str) -> str | None:
    """Return why the format `to` cannot express this drafter, with a recipe line that helps; None if it can."""
    if (config.kind, to) in EXPORTERS:
        return EXPORTERS[config.kind, to].refusal(config)
    kinds = [each for each, format_ in EXPORTERS if format_ == to]
    advice = f"{to} takes {', '.join(kinds)} and has no place for {config.kind}: train with drafter.kind={kinds[0]}"
    return config.not_exported or advice


def check_expressible(config: DrafterConfig, to: str) -> None:
    """Check that a format can express the drafter.

    Raises:
        UserError: The format cannot express the drafter; the message says why, and which recipe line helps.
    """
    if refused := refusal(config, to):
        raise UserError(f"this {config.kind} drafter cannot be exported `--to {to}`: {refused}")


# ---- how it is served there ----


def lacks_first_row(config: DrafterConfig, to: str) -> bool:
    """Return whether the drafter has a row for a conversation's first token that serving in this format lacks."""
    has_place = config.first_token and (config.kind, to) in EXPORTERS and to != "gguf"
    return has_place and not EXPORTERS[config.kind, to].first_token


def caveat(config: DrafterConfig, to: str) -> str | None:
    """Return how serving differs from training, for a drafter that can be served; None if it does not."""
    if lacks_first_row(config, to):
        return (
            "it has a row for a conversation's first token, which engines have not, so that a few drafts will differ: "
            "drafter.options.first_token=false trains it as it is served"
        )
    return None


def version_sentence(config: DrafterConfig, to: str) -> str:
    """Return, in words, the engine version that an exported folder is for, and what this drafter needs there."""
    exporter = EXPORTERS[config.kind, to]
    plugin = " with draftsmith in its environment (`pip install -e .` in a checkout)" if exporter.by_plugin else ""
    return f"for {exporter.versions or FORMATS[to]}{plugin}"


def speculative_config(config: DrafterConfig, folder: str) -> dict[str, Any]:
    """Return vLLM's argument `speculative_config` for an exported folder."""
    exporter = EXPORTERS[config.kind, "vllm"]
    values = {"method": exporter.method, "model": folder, "num_speculative_tokens": drafted_tokens(config)}
    return {**values, "parallel_drafting": True} if exporter.parallel else values


def loading_words(recipe: Recipe, to: str) -> list[str]:
    """Return options that make an engine load the target as the recipe does: dtype, revision, devices, chat template.

    The number of devices is that of distillation. SGLang has no option for variables of the chat template: each request
    must send them. llama.cpp's dtype is that of the file.
    """
    target, distill = recipe.answering_target, recipe.data.distill
    if to == "gguf":
        kwargs = target.chat_template_kwargs
        return ["--jinja", *(["--chat-template-kwargs", json.dumps(kwargs)] if kwargs else [])]
    words = ["--dtype", target.dtype] if target.dtype in ("float32", "bfloat16", "float16") else []
    words += [] if target.revision is None else ["--revision", target.revision]
    devices = distill.options.get("tensor_parallel_size", 1) if distill.engine == "vllm" else 1
    words += ["--tensor-parallel-size", str(devices)] if devices > 1 else []
    if target.chat_template_kwargs and to != "sglang":
        words += ["--default-chat-template-kwargs", json.dumps(target.chat_template_kwargs)]
    return [*words, "--trust-remote-code"] if target.trust_remote_code else words


def served_target(recipe: Recipe) -> str:
    """Return the target's Hub id or absolute folder, for a command that may run in any folder."""
    location = target_location(recipe.answering_target)
    return str(Path(location).absolute()) if Path(location).is_dir() else location


def serving_command(config: DrafterConfig, to: str, target: str, folder: str, loading: Sequence[str] = ()) -> str:
    """Return the shell command that starts the engine's server with an exported folder.

    Args:
        loading: Options from `loading_words`.
    """
    exporter, tokens = EXPORTERS[config.kind, to], drafted_tokens(config)
    if to in ("vllm", "speculators"):
        values = speculative_config(config, folder)
        words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", target, *loading]
        return shlex.join([*words, "--speculative-config", json.dumps(values)])
    if to == "sglang":
        words = ["python", "-m", "sglang.launch_server", "--model-path", target, *loading]
        words += ["--speculative-algorithm", exporter.method, "--speculative-draft-model-path", folder]
        if not exporter.in_blocks:
            words += ["--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1"]
            words += ["--speculative-num-draft-tokens", str(tokens + 1)]
        return shlex.join(words)
    words = ["llama-server", "--model", target, "--model-draft", str(Path(folder) / llamacpp.FILE)]
    return shlex.join([*words, "--spec-type", exporter.method, "--spec-draft-n-max", str(tokens), *loading])


# ---- the folder ----


def trained_drafter(recipe: Recipe) -> Drafter:
    """Load the drafter that this run trained, without its target.

    Raises:
        UserError: The run has no trained drafter.
    """
    folder = RunFolder(recipe).drafter
    if not (folder / TRAINING_FILE).is_file():
        raise no_drafter(folder)
    return read_drafter(folder, "auto")


def export_run(
    recipe: Recipe, to: str, folder: Path | None, target_gguf: Path | None = None, dtype: str | None = None
) -> Exported:
    """Export the drafter that this run trained.

    Args:
        target_gguf: For `gguf`: the target's GGUF file; default: the recipe's `target.gguf_file`.
        dtype: For `gguf`: dtype of the weights, one of `llamacpp.DTYPES`; default: bf16.

    Raises:
        UserError: The format does not exist or cannot express the drafter, or there is no trained drafter.
    """
    check_format(to)
    if to != "gguf" and (target_gguf is not None or dtype is not None):
        raise UserError(f"options --target-gguf and --dtype go with --to gguf, not {to}")
    run = RunFolder(recipe)
    drafter = trained_drafter(recipe)
    folder = run.root / "export" / to if folder is None else expand_home(folder)
    check_writable(folder.parent)
    check_expressible(drafter.config, to)
    gguf = None
    if to == "gguf":  # before the target is loaded
        if dtype not in (None, *llamacpp.DTYPES):
            raise UserError(f"option --dtype: {did_you_mean(str(dtype), llamacpp.DTYPES, 'use bf16')}")
        gguf = GgufTarget(get_target_gguf(recipe.target, target_gguf), dtype or "bf16")
    if EXPORTERS[drafter.config.kind, to].needs_target(drafter.config):
        on_cpu = recipe.target.model_copy(update={"device": "cpu"})
        drafter.attach(load_target(on_cpu)[0])
    target = served_target(recipe) if gguf is None else str(gguf.file.absolute())
    loading = loading_words(recipe, to)
    made = export_drafter(drafter.freeze(), to, folder, target, run.drafter, loading, gguf)
    return Exported(folder, made, version_sentence(drafter.config, to), caveat(drafter.config, to))


@dataclass(frozen=True)
class GgufTarget:
    """The target's GGUF file, and the dtype of the weights in the drafter's GGUF file."""

    file: Path
    dtype: str


def get_target_gguf(recipe: TargetRecipe, file: Path | None) -> Path:
    """Return the target's GGUF file: `file`, or by default the recipe's.

    Raises:
        UserError: The file does not exist, or neither is given.
    """
    if file is None and recipe.gguf_file is not None:
        return get_gguf_file(recipe)
    if file is None or not expand_home(file).is_file():
        why = "" if file is None else f"{file} is no file: "
        raise UserError(
            f"{why}--to gguf needs the target's GGUF file, whose tokenizer is copied into the drafter's file: give "
            "--target-gguf FILE"
        )
    return expand_home(file)


def export_drafter(
    drafter: Drafter,
    to: str,
    folder: Path,
    target: str,
    drafter_folder: Path,
    loading: Sequence[str] = (),
    gguf: GgufTarget | None = None,
) -> Export:
    """Write the drafter into a folder, in the format `to`; return what it holds, and the command that serves it.

    Args:
        drafter: Attached to its target if the exporter needs it (`needs_target`).
        target: Location of the target, as the serving command names it.
        drafter_folder: Folder that the drafter was loaded from.
        loading: Options of the serving command that load the target, from `loading_words`.
        gguf: Only for the format `gguf`.

    Raises:
        UserError: The format cannot express the drafter, or the folder exists and holds no export.
    """
    config = drafter.config
    check_expressible(config, to)
    exporter = EXPORTERS[config.kind, to]
    if folder.exists() and not (folder / EXPORT_FILE).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an export: name another folder with --folder")
    reserved = next((name for name in NAMES_OF_METHODS if name in str(folder.absolute()).lower()), None)
    if to == "vllm" and exporter.method not in NAMED_METHODS and reserved is not None:
        raise UserError(
            f"vLLM takes every folder with `{reserved}` in its path for another method: export this drafter to a path "
            "without it, with --folder"
        )
    made = Export(
        to=to,
        kind=config.kind,
        target=target,
        num_speculative_tokens=drafted_tokens(config),
        command=serving_command(config, to, target, str(folder.absolute()), loading),
        drafter_sha256=weights_sha256(drafter_folder),
    )
    tokenizer = [] if gguf is None else llamacpp.tokenizer_of(gguf.file, config.target_config)
    written = exporter.write(drafter)
    # Copies: safetensors refuses tensors that share memory.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in written.tensors.items()}
    with written_whole(folder) as partial:
        (partial / "config.json").write_text(json.dumps(written.config, indent=2) + "\n", encoding="utf-8")
        if gguf is not None:
            whole = Checkpoint(written.config, tensors)
            check_written(whole, drafter, exporter)
            architecture = llamacpp.architecture_of(exporter.method, config.layers_of)
            llamacpp.write_gguf(partial / llamacpp.FILE, whole, architecture, config.layers_of, tokenizer, gguf.dtype)
        else:
            save_file(tensors, partial / "model.safetensors", {"format": "pt"})
            check_written(read_checkpoint(partial), drafter, exporter)
        (partial / EXPORT_FILE).write_text(json.dumps(asdict(made), indent=2) + "\n", encoding="utf-8")
    return made


def check_written(read: Checkpoint, drafter: Drafter, exporter: Exporter) -> None:
    """Compare an exported checkpoint, read back, with the drafter; of a GGUF file the checkpoint that it is made of.

    Raises:
        RuntimeError: The tensors differ, which is a bug of ours.
    """
    config, wrong = drafter.config, list[str]()
    if "num_attention_heads" in read.config:
        differences = config_differences(read.config, config.layers_of, exactly=True)
        wrong = [f"config: {sentence}" for sentence in differences.values()]
    if not wrong:
        back, state = exporter.read(read, config.target_config), drafter.state_dict()
        if back.can_own_head and config.draft_vocab_size == config.target_config["vocab_size"]:
            back = with_own_head(back)
        wrong += [] if back.kind == config.kind else [f"it would be read as {back.kind}"]
        wrong += [
            f"option {key} would be read as {value!r}"
            for key, value in back.options.items()
            if key not in UNCOMPARED and getattr(config, key) != value
        ]
        names = [
            name
            for name in sorted(state.keys() | back.state.keys())
            if name not in state or name not in back.state or not _same(state[name].cpu(), back.state[name])
        ]
        wrong += [f"the tensors {some_of(names)} differ when they are read back"] if names else []
    if wrong:
        raise RuntimeError(f"the export differs from the drafter, a bug of draftsmith: {'; '.join(wrong)}")


def _same(ours: Tensor, read: Tensor) -> bool:
    return ours.dtype == read.dtype and torch.equal(ours, read)
