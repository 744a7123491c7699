"""`draftsmith doctor`: a checklist of everything about a recipe that can be checked before hours of training.

Data: a sample of the source's conversations is tokenised as for training; after distillation every example of
`data/tokens` is checked too. Target: can it run draft trees? Drafter: does training compute the same logits as decoding
(`draftsmith.train.drafter.parity`)? Of a target that servers run, embedding, final norm and LM head alone are loaded,
and what its layers decide is not checked. The run's folder is only read, so this may run during a distillation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.cli.data_checks import (
    Diagnosis,
    Finding,
    check_distilled,
    check_engine_options,
    check_source,
    check_template,
)
from draftsmith.data.tokens.loss_mask import TokenizedConversation
from draftsmith.errors import UserError
from draftsmith.eval.bench.measured_methods import check_trees
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.decoding.recurrent import chains_only
from draftsmith.models.formats import exporting
from draftsmith.models.kernels.cpu_library import has_kernels
from draftsmith.models.target.checks import check_logits
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
from draftsmith.train.drafter.parity import TOLERANCE, check_parity
from draftsmith.train.drafter.start import start_folder, start_from, start_sentence
from draftsmith.train.drafter.training_arguments import recipe_arguments
from draftsmith.train.features.stored import check_offline_support
from draftsmith.train.processes.frozen_target import options_without_layers

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
    add, trained = diagnosis.add, f"drafter ({recipe.drafter.kind})"
    add("chat template", "chat template", check_template(target, tokenizer))
    if not diagnosis.count("defect"):  # else no conversation can be tokenised
        add("distillation", "engine", check_engine_options(recipe))
        add("source conversations", "source", check_source(recipe, target, tokenizer, diagnosis.rows))
        if (RunFolder(recipe).data / "tokens").is_dir():
            add("tokens to train on", "tokens", check_distilled(recipe, target, diagnosis.rows))
    add("target", "logits", _check_target(target, served))
    add("target", "draft trees", _check_draft_trees(recipe, target, served))
    add(trained, "train section", _check_training_arguments(recipe))
    add(trained, "drafter.init", _check_start(recipe, target))
    add(trained, "drafter", _check_parity(recipe, target, diagnosis.rows))
    add(trained, "engines", _check_engines(recipe, target, serve))
    return diagnosis


def _load_served(recipe: Recipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the target without its layers, on its device, and its tokenizer."""
    load_generation_config(recipe.target)
    return load_ends(recipe.target).to(target_device(recipe.target)), load_tokenizer(recipe.target)


def _check_target(target: PreTrainedModel, served: bool) -> Iterator[Finding]:
    yield Finding("device", "ok", device_sentence(target.device))
    yield Finding("attention", "ok", running_sentence(target))
    if not served:
        yield Finding("logits", "ok", f"the logits are the LM head's output, {check_logits(target)}")
        yield from _check_dtype(target)


def _check_draft_trees(recipe: Recipe, target: PreTrainedModel, served: bool) -> Iterator[Finding]:
    """Check that the target verifies the trees of the recipe's methods."""
    check_trees(recipe)
    if not served:
        TargetSession(target, max_length_tokens=8).close()
        sentence = chains_only(target) or "the target obeys 4-D attention masks and position ids"
        yield Finding("draft trees", "ok", sentence)


def _check_dtype(target: PreTrainedModel) -> Iterator[Finding]:
    """Name the dtype in which a large target decodes fastest on a CPU, if it has another one.

    A decoding step is bound by reading the weights: bf16, whose kernels sum in fp32, has half the bytes.
    """
    if target.device.type != "cpu":
        return
    fastest = "bfloat16, with half as many bytes" if has_kernels() else "float32, as no C++ compiler was found"
    dtype = str(target.dtype).removeprefix("torch.")
    if not fastest.startswith(dtype):
        yield Finding("dtype", "ok", f"{dtype}; on this CPU large targets decode faster by target.dtype={fastest}")


def _check_training_arguments(recipe: Recipe) -> Iterator[Finding]:
    recipe_arguments(recipe)
    yield Finding("train section", "ok", "transformers.TrainingArguments accepts it")


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


def _check_engines(recipe: Recipe, target: PreTrainedModel, serve: str | None) -> Iterator[Finding]:
    """List the engines that load this drafter once it is trained; a warning if none does, a defect if `serve` does not.

    Args:
        serve: A format of exports.
    """
    try:
        config = load_drafter_class(recipe.drafter.kind).make_config(target, recipe.drafter.options)
    except UserError:  # reported as the drafter's defect
        return
    refused = {to: exporting.refusal(config, to) for to in ENGINES}
    loading = [name for to, name in ENGINES.items() if refused[to] is None]
    others = [f"not {name}: {refused[to]}" for to, name in ENGINES.items() if refused[to] is not None]
    none = (
        f"no engine can load this drafter, only draftsmith's own loop and server ({refused['vllm']}): for vLLM, SGLang "
        "and llama.cpp set drafter.kind to dflash2 or eagle3, with options of that kind"
    )
    sentence = "; ".join([f"{', '.join(loading)} can load this drafter", *others]) if loading else none
    yield Finding("engines", "ok" if loading else "warning", sentence)
    if serve is None:
        return
    if (why := exporting.refusal(config, serve)) is not None:
        yield Finding(serve, "defect", f"{config.kind}: {why}")
    else:
        versions = exporting.version_sentence(config, serve)
        yield Finding(serve, "ok", f"`draftsmith export --to {serve}` can write this drafter, {versions}")
        if (warned := exporting.caveat(config, serve)) is not None:
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
    fine = f"{kind}, {parity.parameters:,} parameters: {agrees}, {measured}"
    is_wrong = not worst.size <= TOLERANCE  # NaN is wrong too
    yield Finding(check, "defect" if is_wrong else "ok", differs if is_wrong else fine)
