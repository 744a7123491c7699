"""DFlash's layout, and the additions of DSpark and DFlash 2.

DSpark adds a Markov and a confidence head, DFlash 2 convolutions and a selector.

Our tensor names are this layout's. Its layers are Qwen 3's for every target; embedding and head are the target's. With
a draft vocabulary, which only vLLM supports, the target's rows of the head are written too. Engines number feature
layers from 0 by their *outputs*: their id is one less than ours. Whether a block is causal is written in three places:
vLLM has read it from `dflash_config`, and by default takes layers with a window to be causal, as does SGLang, which
reads only `is_causal`. TorchSpec and AngelSpec have other names and keys: `_from_torchspec`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.models.base.config import DrafterConfig
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.formats.layout import (
    Exporter,
    borrowed_head,
    dtype_name,
    llama_config,
    no_scaled_embeddings,
    only,
    renamed,
    speculators_keys,
    window_keys,
)
from draftsmith.models.formats.reading import (
    Checkpoint,
    Keys,
    Parameters,
    read_draft_vocabulary,
    read_layers,
    take_borrowed,
    window_of,
)

BLOCK_RULES = (
    no_scaled_embeddings("and engines do not scale those of a block"),
    only("mask_residual", False, "engines do not add the newest token's input to the masks"),
)
DFLASH_RULES = (
    *BLOCK_RULES,
    only("markov_rank", 0, "DFlash has no Markov head", "drafter.kind=dspark"),
    only("sample_from_anchor", False, "engines draft from its masks, not the newest one's row", "drafter.kind=dspark"),
)
DSPARK_RULES = (*BLOCK_RULES, only("sample_from_anchor", True, "engines draft token 1 from the newest one's row"))
DFLASH2_RULES = (
    *BLOCK_RULES,
    only("sample_from_anchor", False, "engines draft from its masks, not the newest one's row"),
    only("draft_vocab_size", None, "its candidates are taken from the target's whole LM head"),
)
# Config keys that our drafters do not implement, with the values at which they change nothing.
PLAIN_LOGITS = {"output_multiplier": 1.0, "final_logit_softcapping": 0.0, "input_embedding_scale": 1.0}
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# TorchSpec's and AngelSpec's names by ours (torchspec/models/draft/dflash.py, angelspec/models/draft/dflash.py).
TORCHSPEC_NAMES = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
# Their trainers take the size of a block as an argument, and write it nowhere: the values of their configs.
TORCHSPEC_BLOCK, ANGELSPEC_DSPARK_BLOCK = 16, 7
SPECULATORS_RULES = (only("causal", False, "in the library's blocks every row sees every row"),)
SGLANG_RULES = (
    only("draft_vocab_size", None, "SGLang reads blocks through the target's whole LM head"),
    only("causal", False, "in SGLang's blocks every row sees every row"),
)


def has_draft_vocabulary(config: DrafterConfig) -> bool:
    """Return True if the drafter has a draft vocabulary, so that its rows of the target's LM head are exported."""
    return config.draft_vocab_size is not None


# ---- ours to theirs ----


def to_dflash(drafter: Drafter) -> Checkpoint:
    """Convert a DFlash drafter to the layout of vLLM and SGLang."""
    return Checkpoint({**_config(drafter), "architectures": ["DFlashDraftModel"]}, _tensors(drafter))


def to_dflash2(drafter: Drafter) -> Checkpoint:
    """Convert a DFlash 2 drafter for vLLM and SGLang, which read its keys from `dflash_config`."""
    config = {**_config(drafter), "architectures": ["DFlash2DraftModel"]}
    config["dflash_config"] |= {key: getattr(drafter.config, key) for key in DFLASH2_KEYS}
    return Checkpoint(config, _tensors(drafter))


def to_speculators(drafter: Drafter, write: Callable[[Drafter], Checkpoint], architecture: str) -> Checkpoint:
    """Convert a drafter for the speculators library, with the same tensors; vLLM reads this config too."""
    ours, written = drafter.config, write(drafter)
    layers = dict(written.config)
    own = layers.pop("dflash_config")
    for key in ("is_causal", "block_size", "num_target_layers", "architectures"):
        del layers[key]
    config = {
        "architectures": [architecture],
        **speculators_keys(drafter, layers),
        "draft_vocab_size": layers.pop("draft_vocab_size", layers["vocab_size"]),
        "block_size": ours.block_size,
        "aux_hidden_state_layer_ids": list(ours.feature_layers),
        "mask_token_id": ours.mask_token_id,
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        **{key: own[key] for key in DFLASH2_KEYS if key in own},
    }
    return Checkpoint(config, written.tensors)


def to_dspark(drafter: Drafter) -> Checkpoint:
    """Convert a DSpark drafter for vLLM and SGLang, which read its keys from the top level of the config."""
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
    """Return the drafter's tensors, with the target's head rows of a draft vocabulary."""
    tensors = dict(drafter.state_dict())
    if has_draft_vocabulary(drafter.config):
        tensors["lm_head.weight"] = borrowed_head(drafter, "drafter.options.draft_vocab_size=null")
    return tensors


def _config(drafter: Drafter) -> dict[str, Any]:
    """Return the part of the config that all DFlash layouts share."""
    ours = drafter.config
    config = llama_config(ours, ours.num_layers, dtype_name(drafter))
    reduced = {"draft_vocab_size": ours.draft_vocab_size} if has_draft_vocabulary(ours) else {}
    return {
        **config,
        **reduced,
        "model_type": "qwen3",
        **window_keys(ours, ours.num_layers),
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
    """Convert a checkpoint of DFlash, DFlash 2 or DSpark into our parameters.

    Raises:
        UserError: The checkpoint was made for a target of other sizes, or its config lacks a key.
    """
    checkpoint, block_assumed = _from_torchspec(checkpoint)
    _, rope, assumed = read_layers(checkpoint, target_config, ("qwen3",))
    keys, state = checkpoint.keys, dict(checkpoint.tensors)
    drafted = read_draft_vocabulary(state, keys, target_config["vocab_size"])
    layers, window = _feature_layers(keys), window_of(keys)
    causal = keys.flag("is_causal", keys.flag("causal", window is not None))
    if "speculators_model_type" in keys:  # its layers without a window are never causal
        causal = window is not None and not keys.flag("sliding_window_non_causal", True)
    options = {
        "block_size": keys.whole("block_size", 1),
        "num_layers": keys.whole("num_hidden_layers", 1),
        "feature_layers": layers,
        "mask_token_id": keys.whole("mask_token_id"),
        "sliding_window": window,
        "causal": causal,
        **({} if drafted is None else {"draft_vocab_size": drafted}),
        **rope,
    }
    read = Parameters("dflash", options, state, take_borrowed(state), assumed=(*block_assumed, *assumed))
    if "candidate_selector.hidden_projection.weight" in state:
        for key, plain in PLAIN_LOGITS.items():
            if (keys.get(key) or plain) != plain:
                raise UserError(f"config.json: {key} is {keys[key]}, which is not supported here, only {plain}")
        return replace(read, kind="dflash2", options=options | {key: keys.whole(key, 1) for key in DFLASH2_KEYS})
    if "markov_head.markov_w1.weight" not in state:
        return read
    options["markov_rank"] = keys.whole("markov_rank", 1)
    options["sample_from_anchor"] = keys.flag("sample_from_anchor", True)
    if "confidence_head.proj.weight" not in state:
        options["confidence_weight"] = 0.0
    return replace(read, kind="dspark")


def _feature_layers(keys: Keys) -> list[int]:
    """Return the feature layers, which engines count from 0 and speculators as we do."""
    if "speculators_model_type" in keys:
        return keys.wholes("aux_hidden_state_layer_ids")
    return [layer + 1 for layer in keys.wholes("target_layer_ids")]


def _from_torchspec(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """Convert a checkpoint of TorchSpec or AngelSpec to DFlash's names and keys. Returns it with the assumptions made.

    Their layers are Qwen 3's, with plain RoPE. A row predicts the token at its position, also with a Markov head.
    """
    if "context_proj.weight" not in checkpoint.tensors:
        return checkpoint, ()
    config, assumed = Keys({"rope_theta": 10_000.0, **checkpoint.config}), tuple[str, ...]()
    config |= {"model_type": "qwen3", "is_causal": False, "sample_from_anchor": False}
    config["head_dim"] = config.get("head_dim") or config.whole("hidden_size") // config.whole("num_attention_heads", 1)
    if config.get("block_size") is None:
        has_markov_head = "markov_head.markov_w1.weight" in checkpoint.tensors
        config["block_size"] = ANGELSPEC_DSPARK_BLOCK if has_markov_head else TORCHSPEC_BLOCK
        sentence = f"its config names no block_size: {config['block_size']} was taken, as in its trainer's own configs"
        assumed = (f"{sentence}; if it was trained with another, it drafts badly: add it to its config.json",)
    return Checkpoint(config, renamed(checkpoint.tensors, TORCHSPEC_NAMES, back=True)), assumed


_to_library = partial(to_speculators, write=to_dflash, architecture="DFlashSpeculator")
_to_library2 = partial(to_speculators, write=to_dflash2, architecture="DFlash2DraftModel")
EXPORTERS = {
    (kind, to): Exporter(write, parameters, rules, method, needs_target=has_draft_vocabulary, in_blocks=True)
    for kind, to, write, rules, method in (
        ("dflash", "vllm", to_dflash, DFLASH_RULES, "dflash"),
        ("dflash", "sglang", to_dflash, (*DFLASH_RULES, *SGLANG_RULES), "DFLASH"),
        ("dflash2", "vllm", to_dflash2, DFLASH2_RULES, "dflash"),
        ("dflash2", "sglang", to_dflash2, (*DFLASH2_RULES, *SGLANG_RULES), "DFLASH"),
        ("dflash", "speculators", _to_library, (*DFLASH_RULES, *SPECULATORS_RULES), "dflash"),
        ("dflash2", "speculators", _to_library2, (*DFLASH2_RULES, *SPECULATORS_RULES), "dflash"),
        ("dspark", "vllm", to_dspark, DSPARK_RULES, "dspark"),
        ("dspark", "sglang", to_dspark, (*DSPARK_RULES, *SGLANG_RULES), "DSPARK"),
    )
}
