"""The target, the drafters and the methods that a recipe measures, each method at each temperature."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.eval.decoding.generate import AnswerRecord, Round, generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.decoding.stop_strings import StopMatcher
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.eval.methods.registry import DecodingSetting, load_method_class, make_method
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import drafter_place, load_drafter
from draftsmith.models.compiling import compiles_by_default
from draftsmith.models.decoding.decoders import Compilable, SequenceDecoder
from draftsmith.models.decoding.recurrent import chains_only
from draftsmith.models.kernels.cpu_kernels import pack_linears
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.features import FINAL_FEATURES
from draftsmith.models.target.loading import load_target, load_target_config, target_device
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import DRAFTER_KIND, MethodConfig, Recipe


@dataclass
class Arm:
    """One measured configuration, a method at one temperature; a row of the result table.

    feature_layers: layers of the target that its drafter reads. lenience: below 1 the method is not lossless.
    """

    method: Method
    sampling: Sampling
    generator: torch.Generator
    feature_layers: tuple[int, ...] = (FINAL_FEATURES,)
    lenience: float = 1.0

    @property
    def key(self) -> str:
        return f"{self.method.name}@{self.sampling.temperature:g}"

    def answer(
        self,
        session: TargetSession,
        prompt_ids: list[int],
        new_tokens: int,
        end_ids: Collection[int],
        stop: StopMatcher | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> AnswerRecord:
        """Set the session's feature layers and answer a prompt of token ids; arguments as in `generate`."""
        session.read_layers(self.feature_layers)
        how = (self.sampling, new_tokens, end_ids, self.generator, stop, self.lenience, on_round)
        return generate(session, self.method, prompt_ids, *how)


def load_models(recipe: Recipe) -> tuple[PreTrainedModel, Any, dict[Path, Drafter]]:
    """Load the target, its tokenizer and the recipe's trained drafters by folder, ready to decode.

    Raises:
        UserError: A model cannot be loaded, the target cannot verify a method's trees, or one of several drafters
            changes the target for which the others were trained.
    """
    check_trees(recipe)
    target, tokenizer = load_target(recipe.target)
    drafters = {folder: load_drafter(folder, target) for folder in drafter_folders(recipe)}
    for folder, drafter in drafters.items():
        if hasattr(drafter, "target_change") and len(drafters) > 1:
            raise UserError(f"drafter {folder} changes the target: measure it in a run without other drafters")
    for model in (target, *drafters.values()):  # after adapters were merged into the target
        pack_linears(model)
    return target, tokenizer, drafters


def check_trees(recipe: Recipe) -> None:
    """Check by the target's config that it can verify the draft trees of all methods.

    Raises:
        UserError: The target verifies chains only, and a method drafts trees.
    """
    if (why := chains_only(load_target_config(recipe.target))) is None:
        return
    for method in recipe.eval.methods:
        if method.tree != "chain":
            raise UserError(f"eval.methods, {method.name}: {why}: use tree: chain instead of {method.tree}")
        if method.kind != DRAFTER_KIND and getattr(load_method_class(method)[0], "drafts_trees", False):
            raise UserError(f"eval.methods, {method.name}: {why}: use a method that drafts a chain, with tree: chain")


def compiles(recipe: Recipe) -> bool:
    """Return whether decoding is compiled: as the recipe says, or by default if there is a C++ compiler."""
    chosen = recipe.eval.compile
    return compiles_by_default(target_device(recipe.target)) if chosen is None else chosen


def compile_decoder(decoder: SequenceDecoder, device: torch.device, compiles: bool | None) -> SequenceDecoder:
    """Return a drafter's decoder, compiled if the device is a GPU on which the target is compiled too.

    `compiles` is the recipe's `eval.compile`; None: as `compiles_by_default` says.

    On a CPU a compiled draft takes longer: 1.4 ms instead of 1.0 for one layer of SmolLM2-135M, which has few
    operations, and whose inputs are built in every round.
    """
    is_compiled = compiles_by_default(device) if compiles is None else compiles
    if device.type == "cuda" and is_compiled and isinstance(decoder, Compilable):
        decoder.compile()
    return decoder


def measured_methods(
    recipe: Recipe, drafters: dict[Path, Drafter], target: PreTrainedModel, tokenizer: Any, max_length_tokens: int
) -> list[Arm]:
    """Build an `Arm` for the baseline and each method, at every temperature. Methods of one drafter share a decoder.

    Raises:
        UserError: Two methods have the same name, or a method's kind or options are wrong.
    """
    decoders = {
        folder: compile_decoder(drafter.decoder(max_length_tokens), target.device, recipe.eval.compile)
        for folder, drafter in drafters.items()
    }
    methods = []
    for temperature in recipe.eval.temperatures:
        sampling = Sampling(temperature, recipe.eval.top_k, recipe.eval.top_p)
        methods.append(Arm(Autoregressive(), sampling, torch.Generator(target.device)))
        for method in recipe.eval.methods:
            generator, folder = torch.Generator(target.device), drafter_folder(recipe, method)
            if method.kind == DRAFTER_KIND:
                decoder = decoders[folder]
                drafting = build_tree_drafter(method, decoder, sampling, generator)
                methods.append(Arm(drafting, sampling, generator, drafters[folder].feature_layers, method.lenience))
            else:
                tokens = folder.parent / "data" / "tokens"
                setting = DecodingSetting(method, target, tokenizer, tokens, max_length_tokens, sampling, generator)
                methods.append(Arm(make_method(setting), sampling, generator, lenience=method.lenience))
    keys = [measured.key for measured in methods]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"eval.methods and eval.temperatures give {key} twice: give each method a different name")
    return methods


def drafter_folder(recipe: Recipe, method: MethodConfig) -> Path:
    """Return the folder of the method's drafter: the run's own, unless it names another folder or a Hub id.

    Raises:
        UserError: The drafter cannot be downloaded from the Hub.
    """
    if method.drafter is None:
        return RunFolder(recipe).drafter
    return drafter_place(method.drafter, f"drafter of method {method.name},")


def drafter_folders(recipe: Recipe) -> list[Path]:
    """Return the folders of all measured drafters, without duplicates, in the order of the methods."""
    drafted = (method for method in recipe.eval.methods if method.kind == DRAFTER_KIND)
    return list(dict.fromkeys(drafter_folder(recipe, method) for method in drafted))
