"""`draftsmith doctor`: a checklist of everything about a recipe that can be checked before hours of training.

Data: a sample of the source's conversations is tokenised as for training; after distillation every example of
`data/tokens` is checked too. Target: can it run draft trees? Drafter: does training compute the same logits as decoding
(`draftsmith.train.drafter.parity`)? Of a target that servers run, embedding, final norm and LM head alone are loaded,
and what its layers decide is not checked. The run's folder is only read, so this may run during a distillation.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.cli.data_checks import (
    Diagnosis,
    Finding,
    check_engine_options,
    check_source,
    check_template,
    check_tokens,
    get_expected,
)
from draftsmith.data.engines.vllm_engine import gives_hidden_states
from draftsmith.data.tokens.loss_mask import TokenizedConversation
from draftsmith.errors import UserError
from draftsmith.eval.bench.measured_methods import check_trees
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.models.base.config import DrafterConfig
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.decoding.recurrent import chains_only
from draftsmith.models.formats import exporting
from draftsmith.models.formats.importing import IMPORT_FILE
from draftsmith.models.kernels.cpu_library import has_kernels
from draftsmith.models.target.checks import check_logits
from draftsmith.models.target.gguf_file import get_gguf_file
from draftsmith.models.target.loading import (
    device_sentence,
    load_ends,
    load_generation_config,
    load_target,
    load_tokenizer,
    target_device,
)
from draftsmith.models.target.text_model import running_sentence
from draftsmith.recipes.loading import first_stage
from draftsmith.recipes.run_folder import TRAINING_FILE, RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.optimizer import multiplies_bf16_fast
from draftsmith.train.drafter.parity import TOLERANCE, check_parity
from draftsmith.train.drafter.start import start_folder, start_from, start_sentence
from draftsmith.train.drafter.training_arguments import recipe_arguments
from draftsmith.train.features.stored import check_offline_support
from draftsmith.train.processes.frozen_target import options_without_layers

LARGE_BYTES = 2**27  # of weights; from this size on a decoding step is bound by reading them
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "gguf": "llama.cpp"}  # by export format


def examine(recipe: Recipe, serve: str | None = None) -> Diagnosis:
    """Check a recipe's data, target and drafter, and return the findings. Writes nothing into the run's folder.

    Args:
        serve: Also check whether the drafter can be exported to this format or engine (`models/formats/exporting.py`).

    Raises:
        UserError: The target cannot be loaded, so that nothing can be checked, or `serve` is no known format.
    """
    if serve is not None:
        serve = exporting.FORMAT_OF_ENGINE.get(serve, serve)
        exporting.check_format(serve)
    served = recipe.data.features.source == "server"
    target, tokenizer = _load_served(recipe) if served else load_target(recipe.target)
    diagnosis = Diagnosis(recipe.name, tokenizer)
    add, run, trained = diagnosis.add, RunFolder(recipe), f"drafter ({recipe.drafter.kind})"
    try:
        expected = get_expected(target, tokenizer)
    except UserError as error:
        diagnosis.parts["chat template"] = [Finding("chat template", "defect", str(error))]
    else:
        add("chat template", "chat template", check_template(tokenizer))
        add("distillation", "engine", check_engine_options(recipe))
        add("source conversations", "source", check_source(recipe, expected, diagnosis))
        if (run.data / "tokens").is_dir():
            add("tokens to train on", "tokens", check_tokens(recipe, run.data, expected, diagnosis))
    add("target", "logits", _check_target(target, served))
    add("target", "draft trees", _check_draft_trees(recipe, target, served))
    if not served:
        add("target", "dtype", _check_dtype(target))
    add(trained, "train section", _check_training_arguments(recipe))
    add(trained, "drafter.init", _check_start(recipe, target))
    add(trained, "drafter", _check_parity(recipe, target, diagnosis.rows))
    add(trained, "engines", _check_engines(recipe, target))
    add(trained, "features from vLLM", _check_served_features(recipe, target))
    if serve is not None:
        add(f"served by {serve}", "export", _check_export(recipe, target, serve))
    return diagnosis


def _load_served(recipe: Recipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the target without its layers, on its device, and its tokenizer."""
    load_generation_config(recipe.target)
    return load_ends(recipe.target).to(target_device(recipe.target)), load_tokenizer(recipe.target)


def _check_target(target: PreTrainedModel, served: bool) -> Iterator[Finding]:
    yield Finding("device", "ok", device_sentence(target.device))
    yield Finding("attention", "ok", running_sentence(target))
    if served:
        yield Finding("logits", "ok", "not checked: the target is served, and each server is checked before training")
        return
    yield Finding("logits", "ok", f"the logits are the LM head's output, {check_logits(target)}")


def _check_draft_trees(recipe: Recipe, target: PreTrainedModel, served: bool) -> Iterator[Finding]:
    """Check that the target verifies the trees of the recipe's methods."""
    check_trees(recipe)
    if served:
        yield Finding("draft trees", "ok", "not checked: the target is served")
        return
    TargetSession(target, max_length_tokens=8).close()
    sentence = chains_only(target) or "the target obeys 4-D attention masks and position ids"
    yield Finding("draft trees", "ok", sentence)


def _check_dtype(target: PreTrainedModel) -> Iterator[Finding]:
    """Check, for a CPU, whether another dtype would be faster.

    A decoding step is bound by reading the weights: bf16, whose kernels sum in fp32, has half the bytes.
    """
    if target.device.type != "cpu":
        return
    is_large = sum(weight.nbytes for weight in target.parameters()) > LARGE_BYTES
    if target.dtype == torch.float16:
        faster = "bfloat16" if has_kernels() else "float32"
        yield Finding("dtype", "warning", f"CPUs are slow in float16: set target.dtype={faster}")
    elif target.dtype == torch.bfloat16 and not has_kernels():
        sentence = (
            "without the kernels that a C++ compiler would build, CPUs may be slow in bfloat16: install g++ or "
            "clang++, or set target.dtype=float32"
        )
        yield Finding("dtype", "warning", sentence)
    elif target.dtype == torch.float32 and has_kernels() and is_large:
        yield Finding("dtype", "ok", "float32; with target.dtype=bfloat16 decoding reads half as many bytes a step")


def _check_training_arguments(recipe: Recipe) -> Iterator[Finding]:
    slow = recipe_arguments(recipe).bf16 and not multiplies_bf16_fast(target_device(recipe.target))
    without = "train.bf16 is true, and this CPU has no bf16 instructions: set it to false, which trains faster"
    fine = "transformers.TrainingArguments accepts it"
    yield Finding.of("train section", fine, {}, (slow, "warning", without))


def _check_start(recipe: Recipe, target: PreTrainedModel) -> Iterator[Finding]:
    """Check that the drafter named by `drafter.init` exists and fits; no finding without `drafter.init`."""
    init, first = str(recipe.drafter.init), first_stage(recipe)
    if first is not None and not (RunFolder(first).drafter / TRAINING_FILE).is_file():
        yield Finding("drafter.init", "ok", f"`draftsmith run` trains the drafter of {init} first")
    elif (folder := start_folder(recipe)) is not None:
        drafter = load_drafter_class(recipe.drafter.kind).from_target(target, _new_options(recipe))
        yield Finding("drafter.init", "ok", start_sentence(start_from(drafter, folder, init)))


def _new_options(recipe: Recipe) -> dict[str, Any]:
    """Return the options to build a new drafter with for the loaded target, which has no layers if it is served.

    Raises:
        UserError: The kind needs the layers of a target that is served.
    """
    if recipe.data.features.source != "server":
        return recipe.drafter.options
    check_offline_support(recipe)
    return options_without_layers(recipe)


def _drafter_config(recipe: Recipe, target: PreTrainedModel) -> DrafterConfig:
    """Return the config of the run's imported drafter, or of the drafter that the recipe describes.

    Raises:
        UserError: The recipe's options do not fit the target, or the imported drafter is damaged.
    """
    if (RunFolder(recipe).drafter / IMPORT_FILE).is_file():
        return exporting.trained_drafter(recipe).config
    return load_drafter_class(recipe.drafter.kind).make_config(target, recipe.drafter.options)


def _check_engines(recipe: Recipe, target: PreTrainedModel) -> Iterator[Finding]:
    """List the engines that load this drafter once it is trained; a warning if none does."""
    try:
        config = _drafter_config(recipe, target)
    except UserError:  # reported as the drafter's defect
        return
    refused = {to: exporting.refusal(config, to) for to in ENGINES}
    loading = [name for to, name in ENGINES.items() if refused[to] is None]
    others = [f"not {name}: {refused[to]}" for to, name in ENGINES.items() if refused[to] is not None]
    fine = "; ".join([f"{', '.join(loading)} can load this drafter", *others])
    none = (
        f"no engine can load this drafter, only draftsmith's own loop and server ({refused['vllm']}): for vLLM, SGLang "
        "and llama.cpp set drafter.kind to dflash2 or eagle3, with options of that kind"
    )
    yield Finding.of("engines", fine, {"loading": loading}, (not loading, "warning", none))


def _check_served_features(recipe: Recipe, target: PreTrainedModel) -> Iterator[Finding]:
    """Check that vLLM's model of this target gives hidden states, where features come from servers."""
    if recipe.data.features.source != "server":
        return
    name, check = type(target).__name__, "features from vLLM"
    gives = gives_hidden_states(name)
    unknown = "not checked, as vLLM is not installed here: its class for this target needs the EAGLE-3 interface"
    online = "set data.features.source=online"
    lacking = f"vLLM's {name} has no EAGLE-3 interface, so it gives no hidden states: {online}"
    latent = getattr(target.config.get_text_config(), "kv_lora_rank", None) is not None
    of_latent = f"vLLM extracts no hidden states from multi-head latent attention (MLA): {online}"
    fine = f"vLLM's {name} has the EAGLE-3 interface"
    refused = of_latent if latent else lacking
    is_refused = latent or gives is False
    yield Finding.of(check, fine, {}, (is_refused, "defect", refused), (gives is None, "warning", unknown))


def _check_export(recipe: Recipe, target: PreTrainedModel, to: str) -> Iterator[Finding]:
    """Check whether this drafter could be exported, before it is trained."""
    config = _drafter_config(recipe, target)
    if (refused := exporting.refusal(config, to)) is not None:
        yield Finding("export", "defect", f"{config.kind}: {refused}")
        return
    warned = exporting.caveat(config, to)
    target_place = exporting.served_target(recipe)
    if to == "gguf":
        target_place = "TARGET.gguf" if recipe.target.gguf_file is None else str(get_gguf_file(recipe.target))
    command = exporting.serving_command(config, to, target_place, "FOLDER", exporting.loading_words(recipe, to))
    versions = exporting.version_sentence(config, to)
    yield Finding("export", "ok", f"`draftsmith export --to {to}` can write this drafter, {versions}")
    if command is not None:
        yield Finding("command", "ok", command)
    if warned is not None:
        yield Finding("first token", "warning", warned)


def _check_parity(recipe: Recipe, target: PreTrainedModel, rows: list[TokenizedConversation]) -> Iterator[Finding]:
    """Check that training and decoding give equal logits, for a new drafter on one of the examples."""
    kind, check = recipe.drafter.kind, "train = decode"
    served = recipe.data.features.source == "server"
    parity = check_parity(kind, _new_options(recipe), target, rows, has_layers=not served)
    worst = parity.worst
    measured = f"largest difference {worst.size:.1e} of the logits' spread (tolerance {TOLERANCE:.0e})"
    agrees = f"training and decoding agree after {parity.drafts} prefixes"
    differs = (
        f"{kind} computes other logits in decoding than in training: {measured}, at depth {worst.depth} after "
        f"{worst.prefix_tokens} tokens; compare group_logits with its decoder (models/drafters/{kind}.py, "
        "models/decoding/decoders.py): group t reads x_t and the feature at t-1, and depth d predicts x_(t+d)"
    )
    figures = {
        "kind": kind,
        "largest_difference": worst.size if isfinite(worst.size) else None,
        "tolerance": TOLERANCE,
        "prefix_tokens": worst.prefix_tokens,
        "depth": worst.depth,
        "drafts": parity.drafts,
        "row_tokens": parity.row_tokens,
        "trainable_parameters": parity.parameters,
    }
    fine = f"{kind}, {parity.parameters:,} parameters: {agrees}, {measured}"
    yield Finding.of(check, fine, figures, (not worst.size <= TOLERANCE, "defect", differs))
