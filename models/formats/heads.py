"""Medusa's layouts and Hydra's: heads that each predict one depth.

Medusa: vLLM's layout, and FasterDecoding's, which is only imported (vLLM 0.33 dropped Medusa). Block j of head i is
`blocks.{i}.layers.{j}` here and in vLLM, `{i}.{j}.linear` in FasterDecoding's; the LM head after n blocks is
`lm_heads.{i}` or `{i}.{n}`. With `lm_heads: shared` the target's head is written for vLLM.

Hydra (zankner/Hydra), which is only imported: `hydra_lm_head.pt` holds the sequentially dependent heads of the kind
`mlp`. Block 0 of head i reads the feature and i + 1 embeddings; its `linear` and `res_connection` are our `linear` and
`residual`. Its LM heads have biases. Hydra++ (`prefix-mlp`) is not supported: it attends to the prefix from the first
feature on, ours from a row before it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.formats.layout import Exporter, always, borrowed_head, dtype_name, only, renamed
from draftsmith.models.formats.reading import Checkpoint, Parameters, take_borrowed

HYDRA_NAMES = {
    "heads.#.#.residual.": "hydra_mlp.#.#.res_connection.",
    "heads.": "hydra_mlp.",
    "lm_heads.": "hydra_lm_head.",
}


# Config values of the heads that we implement, and the defaults of missing keys (hydra_heads/mlp_head.py,
# hydra_model.py).
HYDRA_KEYS = {"hydra_head_arch": ("mlp", "mlp"), "grounded_heads": (True, False), "hidden_state_offset": (0, 0)}

# ---- what can be expressed ----

DRAFT_VOCABULARY = only(
    "draft_vocab_size", None, "it has no draft vocabulary (vLLM's token_map for Medusa is read with a shared head only)"
)


# ---- ours to theirs ----


def to_vllm(drafter: Drafter) -> Checkpoint:
    """Convert a Medusa drafter to vLLM's layout."""
    # Any other key with both "num" and "heads" in it would replace `num_heads`, and "num" with "layers" the next.
    config = {
        **{key: drafter.config.target_config[key] for key in ("hidden_size", "vocab_size")},
        "dtype": dtype_name(drafter),
        "torch_dtype": dtype_name(drafter),
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": drafter.config.num_heads,
        "num_hidden_layers": drafter.config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": drafter.config.lm_heads == "shared",
    }
    tensors = dict(drafter.state_dict())
    if config["original_lm_head"]:
        tensors["lm_head.weight"] = borrowed_head(drafter, "drafter.options.lm_heads=separate")
    return Checkpoint(config, tensors)


# ---- theirs to ours ----


def medusa_parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """Convert a Medusa checkpoint of either layout, with or without FasterDecoding's prefix, into our parameters.

    Raises:
        UserError: The checkpoint was made for a target of another hidden size.
    """
    state = {re.sub(r"^medusa_heads?\.", "", name): value for name, value in checkpoint.tensors.items()}
    _, blocks = _counts(state, r"(\d{1,4})\.(\d{1,4})\.linear\.")
    names = {"blocks.#.layers.#.": "#.#.linear.", "lm_heads.#.": f"#.{max(blocks, 1)}."}
    state = renamed(state, names, back=True)
    borrowed = take_borrowed(state)
    heads, layers = _counts(state, r"blocks\.(\d{1,4})\.layers\.(\d{1,4})\.weight")
    weights = {name: value for name, value in state.items() if re.match(r"blocks\..*\.weight$", name)}
    _check_size(weights.values(), target_config)
    for name, weight in weights.items():
        state.setdefault(name.removesuffix("weight") + "bias", weight.new_zeros(len(weight)))
    separate = any(name.startswith("lm_heads.") for name in state)
    options = {"num_heads": heads, "num_layers": layers, "lm_heads": "separate" if separate else "shared"}
    return Parameters("medusa", options, state, borrowed)


def hydra_parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """Convert a Hydra checkpoint into our parameters.

    Raises:
        UserError: The checkpoint's heads are of another kind, or made for a target of another hidden size.
    """
    for key, (expected, default) in HYDRA_KEYS.items():
        value = checkpoint.config.get(key, default)
        if value != expected:
            raise UserError(
                f"the checkpoint's config says {key}: {value}, and drafters here have Hydra's heads with {key}: "
                f"{expected} only: import one with these"
            )
    state = renamed(checkpoint.tensors, HYDRA_NAMES, back=True)
    _check_size([state["heads.0.0.linear.weight"]], target_config)
    biases = [name for name in state if re.match(r"lm_heads\.\d+\.bias", name)]
    biased = checkpoint.keys.flag("lm_head_bias") or any(state[name].any() for name in biases)
    if not biased:
        state = {name: value for name, value in state.items() if name not in biases}
    heads, layers = _counts(state, r"heads\.(\d{1,4})\.(\d{1,4})\.linear\.weight")
    options = {"num_heads": heads, "num_layers": layers, "embedding_norm": False, "lm_head_bias": biased}
    return Parameters("hydra", options, state)


def _counts(state: Mapping[str, Tensor], block: str) -> tuple[int, int]:
    """Return the number of heads, and of blocks per head, from the two indices in the names of blocks."""
    places = [(int(match[1]), int(match[2])) for name in state if (match := re.match(block, name))]
    return 1 + max((i for i, _ in places), default=-1), 1 + max((j for _, j in places), default=-1)


def _check_size(block_weights: Iterable[Tensor], target_config: Mapping[str, Any]) -> None:
    for weight in block_weights:
        if weight.shape[:1] != (target_config["hidden_size"],):
            raise UserError(
                f"a block of the checkpoint's heads is {list(weight.shape)}, but the target's hidden size is "
                f"{target_config['hidden_size']}: import one that was made for this target"
            )


EXPORTERS = {
    ("medusa", "vllm"): Exporter(
        to_vllm, medusa_parameters, (DRAFT_VOCABULARY,), "medusa", first_token=True, needs_target=always,
        versions="vLLM 0.32",
    ),
}  # fmt: skip
