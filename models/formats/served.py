"""Which kind of drafter goes into which format, how it is served there, or why it cannot be.

A kind that has no entry in `EXPORTERS` for a format is refused by it; the table in the documents is made of the same.
What depends on a drafter's options and target is asked of its config, so it can be said before any training.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.models.base.drafter import Drafter, DrafterConfig
from draftsmith.models.formats import causal_lm, dflash, eagle, eagle3, hydra, medusa, speculators
from draftsmith.models.formats.checkpoint import Checkpoint, Parameters, Refusal
from draftsmith.models.formats.loader_rules import LoaderRules
from draftsmith.models.groups.layers import LayersConfig, layers_config, qwen3_layers_config
from draftsmith.recipes.schema import TargetRecipe

FORMATS = {
    "vllm": "vLLM 0.32 (0.33 but for Medusa)",
    "sglang": "SGLang 0.5.23",
    "speculators": "speculators, read by vLLM 0.32",
    "eagle": "SafeAILab/EAGLE",
    "medusa": "FasterDecoding/Medusa",
    "hydra": "zankner/Hydra",
}


def _never(config: DrafterConfig) -> bool:
    return False


def _always(config: DrafterConfig) -> bool:
    return True


@dataclass(frozen=True)
class Exporter:
    """One kind in one format.

    Args:
        rules: Its loader's; None where that is transformers' own, which is asked itself.
        refusal: Why this drafter cannot be expressed, from its config.
        write, read: The layout, both ways.
        method: What the engine calls it; empty where there is no server.
        parallel: Whether all depths come from one forward.
        needs_target: Whether tensors of the target go into the folder, of a drafter of this config.
        in_blocks: Whether its config says how many tokens are drafted, always all of them.
        layers: What its layers are made as.
    """

    rules: LoaderRules | None
    refusal: Callable[[DrafterConfig], Refusal | None]
    write: Callable[[Drafter], Checkpoint]
    read: Callable[[Checkpoint, Mapping[str, Any]], Parameters]
    method: str = ""
    parallel: bool = False
    needs_target: Callable[[DrafterConfig], bool] = _never
    in_blocks: bool = False
    layers: LayersConfig = layers_config


def _to_speculators(drafter: Drafter) -> Checkpoint:
    return speculators.to_speculators(drafter, drafted_tokens(drafter.config))


EXPORTERS: dict[tuple[str, str], Exporter] = {
    ("eagle3", "vllm"): Exporter(eagle3.VLLM, eagle3.refusal_vllm, eagle3.to_vllm, eagle3.parameters, "eagle3"),
    ("peagle", "vllm"): Exporter(
        eagle3.VLLM, eagle3.refusal_vllm, eagle3.to_vllm, eagle3.parameters, "eagle3", parallel=True
    ),
    ("eagle", "vllm"): Exporter(eagle.VLLM, eagle.refusal_vllm, eagle.to_vllm, eagle.parameters, "eagle"),
    ("medusa", "vllm"): Exporter(
        medusa.VLLM, medusa.refusal, medusa.to_vllm, medusa.parameters, "medusa", needs_target=_always
    ),
    ("draft_model", "vllm"): Exporter(
        None, causal_lm.refusal_draft_model, causal_lm.to_draft_model, causal_lm.parameters, "draft_model",
        needs_target=_always,
    ),
    ("parallel", "vllm"): Exporter(
        None, causal_lm.refusal_pard, causal_lm.to_pard, causal_lm.parameters, "draft_model", parallel=True,
        needs_target=_always,
    ),
    ("eagle3", "sglang"): Exporter(eagle3.SGLANG, eagle3.refusal_sglang, eagle3.to_sglang, eagle3.parameters, "EAGLE3"),
    ("eagle", "sglang"): Exporter(
        eagle.SGLANG, eagle.refusal_without_attention_bias, eagle.to_sglang, eagle.parameters, "EAGLE"
    ),
    ("draft_model", "sglang"): Exporter(
        None, causal_lm.refusal_draft_model, causal_lm.to_draft_model, causal_lm.parameters, "STANDALONE",
        needs_target=_always,
    ),
    ("eagle3", "speculators"): Exporter(
        speculators.RULES, speculators.refusal, _to_speculators, eagle3.parameters, "eagle3", needs_target=_always
    ),
    ("peagle", "speculators"): Exporter(
        speculators.RULES, speculators.refusal, _to_speculators, eagle3.parameters, "eagle3", parallel=True,
        needs_target=_always,
    ),
    ("eagle3", "eagle"): Exporter(
        eagle3.AUTHORS, eagle3.refusal_authors, eagle3.to_authors, eagle3.parameters, needs_target=_always
    ),
    ("eagle", "eagle"): Exporter(
        eagle.AUTHORS, eagle.refusal_without_attention_bias, eagle.to_authors, eagle.parameters
    ),
    ("medusa", "medusa"): Exporter(
        medusa.FASTER_DECODING, medusa.refusal_faster_decoding, medusa.to_faster_decoding, medusa.parameters
    ),
    ("hydra", "hydra"): Exporter(hydra.RULES, hydra.refusal, hydra.to_hydra, hydra.parameters),
    ("dflash", "vllm"): Exporter(
        dflash.VLLM, dflash.refusal_vllm, dflash.to_dflash, dflash.parameters, "dflash",
        needs_target=dflash.has_draft_vocabulary, in_blocks=True, layers=qwen3_layers_config,
    ),
    ("dflash", "sglang"): Exporter(
        dflash.SGLANG, dflash.refusal_sglang, dflash.to_dflash, dflash.parameters, "DFLASH", in_blocks=True,
        layers=qwen3_layers_config,
    ),
    ("dspark", "vllm"): Exporter(
        dflash.DSPARK_VLLM, dflash.refusal_dspark_vllm, dflash.to_dspark, dflash.parameters, "dspark",
        needs_target=dflash.has_draft_vocabulary, in_blocks=True, layers=qwen3_layers_config,
    ),
    ("dspark", "sglang"): Exporter(
        dflash.DSPARK_SGLANG, dflash.refusal_dspark_sglang, dflash.to_dspark, dflash.parameters, "DSPARK",
        in_blocks=True, layers=qwen3_layers_config,
    ),
}  # fmt: skip

# Of these, what real vLLM loads and accepts in `tests/models/formats/test_vllm_serves.py`.
# DSpark runs on vLLM's newer runner alone, which needs Triton.
LOADED_IN_VLLM = {place for place in EXPORTERS if place[1] in ("vllm", "speculators")} - {("dspark", "vllm")}
# Why no format has a place for a kind, where more can be said than which kinds have one.
NO_PLACE = {
    "medusa2": Refusal("it changes the target itself, by a LoRA that no format carries", "drafter.kind=medusa"),
    "eagle_parallel": Refusal(
        "no engine has K distinct masks, and none has masks in EAGLE's first shape", "drafter.kind=peagle"
    ),
    "pass_embeddings": Refusal(
        "no engine drafts with the target's own layers and K distinct masks", "drafter.kind=peagle"
    ),
}


def kind_of(config: DrafterConfig) -> str:
    """`drafter.kind`."""
    return config.model_type.removeprefix("draftsmith-")


def refusal(config: DrafterConfig, to: str) -> Refusal | None:
    """Why this drafter cannot go into this format; None if it can."""
    exporter = EXPORTERS.get((kind_of(config), to))
    return no_place(kind_of(config), to) if exporter is None else exporter.refusal(config)


def no_place(kind: str, to: str) -> Refusal:
    """Why a format takes no drafter of a kind that has no exporter for it, whatever kind that is."""
    kinds = [each for each, format_ in EXPORTERS if format_ == to]
    return NO_PLACE.get(kind) or Refusal(
        f"it takes {', '.join(kinds)} and has no place for {kind}", f"drafter.kind={kinds[0]}"
    )


def drafted_tokens(config: DrafterConfig) -> int:
    """How many tokens a chain of it drafts."""
    return getattr(config, "draft_depth", None) or config.num_depths


def caveat(config: DrafterConfig, to: str) -> str | None:
    """What a server will do otherwise than training did, though it can serve the drafter."""
    if to in ("vllm", "sglang", "speculators") and getattr(config, "first_token", False):
        return (
            "it has a row for a conversation's first token, which engines have not, so that a few drafts will differ: "
            "drafter.options.first_token=false trains it as it is served"
        )
    return None


def speculative_config(config: DrafterConfig, folder: str) -> dict[str, Any]:
    """vLLM's argument of that name, for this folder."""
    exporter = EXPORTERS[kind_of(config), "vllm"]
    values = {"method": exporter.method, "model": folder, "num_speculative_tokens": drafted_tokens(config)}
    return {**values, "parallel_drafting": True} if exporter.parallel else values


def loading_words(recipe: TargetRecipe) -> list[str]:
    """How the recipe loads its target, in options that vLLM and SGLang share; their own choice of dtype may differ."""
    words = ["--dtype", recipe.dtype] if recipe.dtype in ("float32", "bfloat16", "float16") else []
    words += [] if recipe.revision is None else ["--revision", recipe.revision]
    return [*words, "--trust-remote-code"] if recipe.trust_remote_code else words


def serving_command(
    config: DrafterConfig, to: str, target: str, folder: str, loading: Sequence[str] = ()
) -> str | None:
    """What starts a server with this folder, or None where the format has none. `loading`: of `loading_words`."""
    exporter, tokens = EXPORTERS[kind_of(config), to], drafted_tokens(config)
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
    return None
