"""Medusa's layouts: vLLM's, and FasterDecoding's, which vLLM 0.32 reads too (vLLM 0.33 has no Medusa any more).

Block j of head i is `blocks.{i}.layers.{j}` here and in vLLM, `{i}.{j}.linear` in FasterDecoding's; the LM head behind
n blocks is `lm_heads.{i}` or `{i}.{n}`. With `lm_heads: shared` the target's head is written out for vLLM;
FasterDecoding's code knows no shared head.
"""

import re
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from draftsmith.models.base.drafter import Drafter, DrafterConfig
from draftsmith.models.formats.checkpoint import Checkpoint, Parameters, Refusal, dtype_name, take_borrowed
from draftsmith.models.formats.loader_rules import LoaderRules, TensorRule
from draftsmith.recipes.errors import UserError

HEADS = (0, "heads")
VLLM = LoaderRules(
    engine="vLLM 0.32 medusa",
    source="model_executor/models/medusa.py:20-193, transformers_utils/configs/medusa.py:45-58",
    tensors=(
        TensorRule("blocks.{i}.layers.{j}.weight", ("H", "H"), (HEADS, (0, "layers"))),
        TensorRule("blocks.{i}.layers.{j}.bias", ("H",), (HEADS, (0, "layers")), "head bias"),
        TensorRule("lm_heads.{i}.weight", ("V", "H"), (HEADS,), "not one head"),
        TensorRule("lm_head.weight", ("V", "H"), when="one head"),
    ),
    config={"model_type": "medusa", "architectures": ["MedusaModel"]},
)
FASTER_DECODING = LoaderRules(
    engine="FasterDecoding/Medusa",
    source="medusa/model/medusa_model.py: MedusaModel",
    tensors=(
        TensorRule("{i}.{j}.linear.weight", ("H", "H"), (HEADS, (0, "blocks"))),
        TensorRule("{i}.{j}.linear.bias", ("H",), (HEADS, (0, "blocks"))),
        TensorRule("{i}.{j}.weight", ("V", "H"), (HEADS, ("blocks", "behind blocks"))),
    ),
    weights_file="medusa_lm_head.safetensors",
)


def refusal_faster_decoding(config: DrafterConfig) -> Refusal | None:
    if config.lm_heads == "shared":
        return Refusal("every head of FasterDecoding's has an LM head", "drafter.options.lm_heads=separate")
    return refusal(config)


def refusal(config: DrafterConfig) -> Refusal | None:
    """Of both layouts."""
    if config.draft_vocab_size is not None:
        return Refusal(
            "Medusa's layout has no draft vocabulary (vLLM's token_map is read with a shared head only)",
            "drafter.options.draft_vocab_size=null",
        )
    return None


def to_vllm(drafter: Drafter) -> Checkpoint:
    config = _common(drafter)
    # Any other key with both "num" and "heads" in it would replace this one, and "num" with "layers" the next.
    config |= {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": drafter.config.num_heads,
        "num_hidden_layers": drafter.config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": drafter.config.lm_heads == "shared",
    }
    tensors = dict(drafter.state_dict())
    if config["original_lm_head"]:
        tensors["lm_head.weight"] = _target_head(drafter)
    return Checkpoint(config, tensors)


def to_faster_decoding(drafter: Drafter) -> Checkpoint:
    heads, blocks = drafter.config.num_heads, drafter.config.num_layers
    config = _common(drafter) | {
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
        "base_model_name_or_path": drafter.config.target_name_or_path,
    }
    tensors = {
        re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name): value
        for name, value in drafter.state_dict().items()
        if name.startswith("blocks.")
    }
    tensors |= {f"{i}.{blocks}.weight": drafter.state_dict()[f"lm_heads.{i}.weight"] for i in range(heads)}
    return Checkpoint(config, tensors)


def _common(drafter: Drafter) -> dict[str, Any]:
    sizes = {key: drafter.config.target_config[key] for key in ("hidden_size", "vocab_size")}
    return {**sizes, "dtype": dtype_name(drafter), "torch_dtype": dtype_name(drafter)}


def _target_head(drafter: Drafter) -> Tensor:
    head = cast(nn.Linear, drafter.attached.lm_head)
    if head.bias is not None:
        raise UserError(
            "the target's LM head has a bias, which Medusa's layout cannot hold: train with "
            "drafter.options.lm_heads=separate"
        )
    return head.weight.detach().to(drafter.dtype)


def parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """Of both layouts, with or without FasterDecoding's prefix.

    Raises:
        UserError: It was made for a target of another size.
    """
    state: dict[str, Tensor] = {}
    for name, value in checkpoint.tensors.items():
        name = re.sub(r"^medusa_heads?\.", "", name)
        renamed = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        state[re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", renamed)] = value
    borrowed = take_borrowed(state)
    of_blocks = [match for name in state if (match := re.match(r"blocks\.(\d+)\.layers\.(\d+)\.weight", name))]
    if not of_blocks:
        raise UserError("the checkpoint has no Medusa blocks: give one in vLLM's or FasterDecoding's layout")
    heads, layers = (1 + max(int(match[group]) for match in of_blocks) for group in (1, 2))
    hidden = state["blocks.0.layers.0.weight"].shape[0]
    if hidden != target_config["hidden_size"]:
        raise UserError(
            f"the checkpoint's heads read {hidden} features, but the target has {target_config['hidden_size']}: import "
            "one that was made for this target"
        )
    for i in range(heads):
        for j in range(layers):
            weight = state[f"blocks.{i}.layers.{j}.weight"]
            state.setdefault(f"blocks.{i}.layers.{j}.bias", weight.new_zeros(len(weight)))
    separate = any(name.startswith("lm_heads.") for name in state)
    options = {"num_heads": heads, "num_layers": layers, "lm_heads": "separate" if separate else "shared"}
    return Parameters("medusa", options, state, borrowed)
