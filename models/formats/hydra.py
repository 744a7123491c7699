"""Hydra's layout (zankner/Hydra): `hydra_lm_head.pt` holds the heads, sequentially dependent ones of the kind `mlp`.

Block 0 of head i reads the feature and i + 1 embeddings; its `linear` and `res_connection` are our `linear` and
`residual`. All further blocks of a head are one block there, written as often as it is used. Its LM heads have biases.
Hydra++ (`prefix-mlp`) attends to the prefix from its first feature on, where ours has a row before it: not here.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from draftsmith.models.base.drafter import Drafter, DrafterConfig
from draftsmith.models.formats.checkpoint import Checkpoint, Parameters, Refusal, dtype_name
from draftsmith.models.formats.loader_rules import LoaderRules, TensorRule
from draftsmith.recipes.errors import UserError

HEADS, FURTHER = (0, "heads"), (1, "blocks")
RULES = LoaderRules(
    engine="zankner/Hydra",
    source="hydra/model/hydra_heads/mlp_head.py: ResBlock, HydraMLP; hydra_model.py: from_pretrained",
    tensors=(
        *(
            TensorRule(f"hydra_mlp.{{i}}.0.{part}.weight", ("H", "i+2*H"), (HEADS,))
            for part in ("linear", "res_connection")
        ),
        *(TensorRule(f"hydra_mlp.{{i}}.0.{part}.bias", ("H",), (HEADS,)) for part in ("linear", "res_connection")),
        TensorRule("hydra_mlp.{i}.{j}.linear.weight", ("H", "H"), (HEADS, FURTHER)),
        TensorRule("hydra_mlp.{i}.{j}.linear.bias", ("H",), (HEADS, FURTHER)),
        TensorRule("hydra_lm_head.{i}.weight", ("V", "H"), (HEADS,)),
        TensorRule("hydra_lm_head.{i}.bias", ("V",), (HEADS,)),
    ),
    config={"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0},
    weights_file="hydra_lm_head.pt",
)
# What a config may not say otherwise, and what it says where it is silent.
ASKED = {"hydra_head_arch": "mlp", "grounded_heads": False, "hidden_state_offset": 0}


def refusal(config: DrafterConfig) -> Refusal | None:
    if config.prefix_attention:
        return Refusal("our prefix attention has a row that theirs has not", "drafter.options.prefix_attention=false")
    if config.embedding_norm:
        return Refusal("their heads read embeddings as they are", "drafter.options.embedding_norm=false")
    if config.lm_heads == "shared":
        return Refusal("each of their heads has an LM head", "drafter.options.lm_heads=separate")
    if config.draft_vocab_size is not None:
        return Refusal("Hydra's layout has no draft vocabulary", "drafter.options.draft_vocab_size=null")
    if config.num_layers > 2:
        return Refusal("all blocks of a head but the first are one block there", "drafter.options.num_layers=2")
    return None


def to_hydra(drafter: Drafter) -> Checkpoint:
    config: dict[str, Any] = {
        "hydra_num_heads": drafter.config.num_heads,
        "hydra_num_layers": drafter.config.num_layers,
        "hydra_head_arch": "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": drafter.config.target_name_or_path,
        **{key: drafter.config.target_config[key] for key in ("hidden_size", "vocab_size")},
        "dtype": dtype_name(drafter),
    }
    tensors: dict[str, Tensor] = {}
    for name, value in drafter.state_dict().items():
        name = re.sub(r"^heads\.", "hydra_mlp.", name).replace(".residual.", ".res_connection.")
        tensors[re.sub(r"^lm_heads\.", "hydra_lm_head.", name)] = value
    for i in range(drafter.config.num_heads):
        weight = tensors[f"hydra_lm_head.{i}.weight"]
        tensors.setdefault(f"hydra_lm_head.{i}.bias", weight.new_zeros(len(weight)))
    return Checkpoint(config, tensors)


def parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """
    Raises:
        UserError: It is of another kind than ours, or was made for a target of another size.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    for key, default in ASKED.items():
        wanted = True if key == "grounded_heads" else default
        if config.get(key, default) != wanted:
            raise UserError(
                f"the checkpoint's config says {key}: {config.get(key, default)}, but of Hydra's heads only those with "
                f"{key}: {wanted} are among the drafters here: import one of these"
            )
    if tensors["hydra_mlp.0.0.linear.weight"].shape[0] != target_config["hidden_size"]:
        raise UserError(
            f"the checkpoint's heads have {tensors['hydra_mlp.0.0.linear.weight'].shape[0]} features, but the target "
            f"{target_config['hidden_size']}: import one that was made for this target"
        )
    biased = any(value.any() for name, value in tensors.items() if re.match(r"hydra_lm_head\.\d+\.bias", name))
    state: dict[str, Tensor] = {}
    for name, value in tensors.items():
        name = re.sub(r"^hydra_mlp\.", "heads.", name).replace(".res_connection.", ".residual.")
        name = re.sub(r"^hydra_lm_head\.", "lm_heads.", name)
        if biased or not re.match(r"lm_heads\.\d+\.bias", name):
            state[name] = value
    places = [match for name in state if (match := re.match(r"heads\.(\d+)\.(\d+)\.linear\.weight", name))]
    heads, layers = (1 + max(int(match[group]) for match in places) for group in (1, 2))
    options = {"num_heads": heads, "num_layers": layers, "embedding_norm": False, "lm_head_bias": biased}
    return Parameters("hydra", options, state)
