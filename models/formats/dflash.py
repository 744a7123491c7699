"""DFlash's layout, and what DSpark (a Markov and a confidence head) and DFlash 2 (convolutions, a selector) add to it.

Ours is this layout, name by name. Its layers are Qwen 3's whatever the target's are, embedding and head are the
target's; of a draft vocabulary, which vLLM alone knows, the target's rows of the head go along. Engines count the
layers that are read from 0 by their *outputs*: their id is one less than ours. Whether a block is causal stands there
thrice: vLLM has looked for it in `dflash_config`, and takes layers with a window for causal ones where nothing says
otherwise, as SGLang does, which knows `is_causal` alone.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from draftsmith.models.base.drafter import Drafter, DrafterConfig
from draftsmith.models.formats.layout import (
    Checkpoint,
    Exporter,
    Parameters,
    drafted_of_all,
    dtype_name,
    kind_of_layers,
    llama_config,
    no_scaled_embeddings,
    only,
    take_borrowed,
)
from draftsmith.recipes.errors import UserError

OF_BLOCKS = (
    no_scaled_embeddings("and engines do not for a block"),
    only("mask_residual", False, "engines do not add the newest token to its masks"),
)
OF_DFLASH = (
    *OF_BLOCKS,
    only("markov_rank", 0, "DFlash has no Markov head", "drafter.kind=dspark"),
    only("sample_from_anchor", False, "engines draft from its masks, not the newest one's row", "drafter.kind=dspark"),
)
OF_DSPARK = (*OF_BLOCKS, only("sample_from_anchor", True, "engines draft its first token from the newest one's row"))
OF_DFLASH2 = (
    *OF_BLOCKS,
    only("sample_from_anchor", False, "engines draft from its masks, not the newest one's row"),
    only("draft_vocab_size", None, "its candidates are read off the target's whole head"),
)
# Of its block, whose values the drafters here have not.
PLAIN_LOGITS = {"output_multiplier": 1.0, "final_logit_softcapping": 0.0, "input_embedding_scale": 1.0}
OF_CONVOLUTION_AND_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
OF_SGLANG = (
    only("draft_vocab_size", None, "SGLang's blocks are read off the target's whole head"),
    only("causal", False, "in SGLang's blocks every row sees every row"),
)


def has_draft_vocabulary(config: DrafterConfig) -> bool:
    """Whether rows of the target's head are written too."""
    return config.draft_vocab_size is not None


# ---- ours to theirs ----


def to_dflash(drafter: Drafter) -> Checkpoint:
    """Write it for both engines."""
    return Checkpoint({**_config(drafter), "architectures": ["DFlashDraftModel"]}, _tensors(drafter))


def to_dflash2(drafter: Drafter) -> Checkpoint:
    """Write it for both engines, which look for its keys in `dflash_config`."""
    config = {**_config(drafter), "architectures": ["DFlash2DraftModel"]}
    config["dflash_config"] |= {key: getattr(drafter.config, key) for key in OF_CONVOLUTION_AND_SELECTOR}
    return Checkpoint(config, _tensors(drafter))


def to_dspark(drafter: Drafter) -> Checkpoint:
    """Write it for both engines, which look for its keys at the top of the config."""
    has_confidence = bool(drafter.config.confidence_weight)
    own = {
        "architectures": ["Qwen3DSparkModel"],
        "sample_from_anchor": True,
        "markov_head_type": "vanilla",
        "mask_token_id": drafter.config.mask_token_id,
        "markov_rank": drafter.config.markov_rank,
        "enable_confidence_head": has_confidence,
        "confidence_head_with_markov": has_confidence,
    }
    return Checkpoint({**_config(drafter), **own}, _tensors(drafter))


def _tensors(drafter: Drafter) -> dict[str, Tensor]:
    tensors = dict(drafter.state_dict())
    if has_draft_vocabulary(drafter.config):
        tensors["lm_head.weight"] = drafter.borrowed_head.weight.to(drafter.dtype)
    return tensors


def _config(drafter: Drafter) -> dict[str, Any]:
    ours = drafter.config
    config = llama_config(ours, ours.num_layers, dtype_name(drafter))
    reduced = {"draft_vocab_size": ours.draft_vocab_size} if has_draft_vocabulary(ours) else {}
    return {
        **config,
        **reduced,
        "model_type": "qwen3",
        "layer_types": [f"{'sliding' if ours.sliding_window else 'full'}_attention"] * ours.num_layers,
        "use_sliding_window": bool(ours.sliding_window),
        "sliding_window": ours.sliding_window,
        "is_causal": ours.causal,
        "block_size": ours.block_size,
        "num_target_layers": ours.target_config["num_hidden_layers"],
        "dflash_config": {
            "mask_token_id": ours.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in ours.feature_layers],
            "causal": ours.causal,
        },
    }


# ---- theirs to ours ----


def parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """Read either engine's.

    Raises:
        UserError: It was made for a target of another shape.
    """
    config, state = checkpoint.config, dict(checkpoint.tensors)
    kind_of_layers(checkpoint, target_config, ("qwen3",))
    known = {**config, **(config.get("dflash_config") or {})}
    window = _window(known)
    causal = config.get("is_causal", known.get("causal"))
    options = {
        "block_size": known["block_size"],
        "num_layers": known["num_hidden_layers"],
        "feature_layers": [layer + 1 for layer in known["target_layer_ids"]],
        "mask_token_id": known["mask_token_id"],
        "sliding_window": window,
        "causal": window is not None if causal is None else bool(causal),
    }
    borrowed = take_borrowed(state)
    if "d2t" in state:
        options["draft_vocab_size"] = len(state["d2t"])
        state["t2d"] = drafted_of_all(state["d2t"], target_config["vocab_size"])
    if "candidate_selector.hidden_projection.weight" in state:
        for key, plain in PLAIN_LOGITS.items():
            if (known.get(key) or plain) != plain:
                raise UserError(f"config.json: {key} is {known[key]}, which drafters here have not: only {plain}")
        return Parameters(
            "dflash2", options | {key: known[key] for key in OF_CONVOLUTION_AND_SELECTOR}, state, borrowed
        )
    if "markov_head.markov_w1.weight" not in state:
        return Parameters("dflash", options, state, borrowed)
    options["markov_rank"] = known["markov_rank"]
    options["sample_from_anchor"] = bool(known.get("sample_from_anchor", True))
    if "confidence_head.proj.weight" not in state:
        options["confidence_weight"] = 0.0
    return Parameters("dspark", options, state, borrowed)


def _window(known: Mapping[str, Any]) -> int | None:
    """
    Raises:
        UserError: Some layers have a window and some have none, or nothing says how wide it is.
    """
    kinds = set(known.get("layer_types") or ())
    slides = "sliding_attention" in kinds or bool(known.get("use_swa"))
    if not slides:
        return None
    if len(kinds) > 1:
        raise UserError(
            "config.json: some of `layer_types` slide and some do not: drafters here have one `sliding_window` in all "
            "layers, so import one that has"
        )
    width = known.get("swa_window_size") or known.get("sliding_window")
    if not width:
        raise UserError("config.json: the layers slide, but `sliding_window` does not say how many tokens they see")
    return int(width)


EXPORTERS = {
    ("dflash", "vllm"): Exporter(
        to_dflash, parameters, OF_DFLASH, "dflash", needs_target=has_draft_vocabulary, in_blocks=True
    ),
    ("dflash", "sglang"): Exporter(to_dflash, parameters, (*OF_DFLASH, *OF_SGLANG), "DFLASH", in_blocks=True),
    ("dflash2", "vllm"): Exporter(to_dflash2, parameters, OF_DFLASH2, "dflash", in_blocks=True),
    ("dflash2", "sglang"): Exporter(to_dflash2, parameters, (*OF_DFLASH2, *OF_SGLANG), "DFLASH", in_blocks=True),
    ("dspark", "vllm"): Exporter(
        to_dspark, parameters, OF_DSPARK, "dspark", needs_target=has_draft_vocabulary, in_blocks=True
    ),
    ("dspark", "sglang"): Exporter(to_dspark, parameters, (*OF_DSPARK, *OF_SGLANG), "DSPARK", in_blocks=True),
}
