"""llama.cpp's layout: one GGUF file, for the architectures `eagle3`, `dflash` (DFlash 2, DSpark) and the target's own.

The requirements of its loaders were read in the sdist llama-cpp-python 0.3.36: `src/models/eagle3.cpp` and
`dflash.cpp`, `common/speculative.cpp`, and the converters `conversion/llama.py` and `qwen.py`. Feature layers are
numbered as here: k = after k layers of the target. `d2t` holds ids, not offsets. For architectures whose RoPE rotates
pairs of neighbouring dimensions (type NORM: `eagle3`, `llama`) the rows of queries and keys are interleaved.

The tokenizer is copied from the target's GGUF, key by key, as llama.cpp refuses a draft model with another one. If the
file has no embedding or head, llama.cpp uses the target's, in its precision.

Shapes: H heads, Dh head size, I inputs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.errors import UserError, reason
from draftsmith.models.formats import causal_lm, dflash, eagle
from draftsmith.models.formats.layout import Refusal, has_plain_logits, no_layers_but, only, renamed
from draftsmith.models.formats.reading import Checkpoint
from draftsmith.models.groups.layers import layers_config

FILE = "drafter.gguf"
# Of the weights; a norm, and what has a row that is no multiple of a block, stays in fp32.
DTYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
BLOCK = 32  # values that q8_0 and q4_0 scale together
# Prefixes of names, an engine's to theirs. What no prefix fits has the same name.
NAMES = {
    "embed_tokens.": "token_embd.",
    "norm.": "output_norm.",
    "markov_head.markov_w1.": "markov_w1.",
    "markov_head.markov_w2.": "markov_w2.",
    "confidence_head.proj.": "conf_proj.",
    "candidate_selector.hidden_projection.": "selector_hidden.",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
LAYER_NAMES = {
    "self_attn.q_proj.": "attn_q.", "self_attn.k_proj.": "attn_k.", "self_attn.v_proj.": "attn_v.",
    "self_attn.o_proj.": "attn_output.", "self_attn.q_norm.": "attn_q_norm.", "self_attn.k_norm.": "attn_k_norm.",
    "mlp.gate_proj.": "ffn_gate.", "mlp.up_proj.": "ffn_up.", "mlp.down_proj.": "ffn_down.",
    "input_layernorm.": "attn_norm.", "post_attention_layernorm.": "ffn_norm.", "hidden_norm.": "attn_norm_2.",
    "attention_conv.kernel_projection.": "attn_conv_proj.", "mlp_conv.kernel_projection.": "ffn_conv_proj.",
    "attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base",
}  # fmt: skip
# Architectures by method; of draft models by the target's model_type; those whose RoPE rotates neighbouring dimensions.
OF_METHODS = {"draft-eagle3": "eagle3", "draft-dflash": "dflash", "draft-dspark": "dflash"}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
TURNS_NEIGHBOURS = ("llama", "eagle3")

ROPE = Refusal(
    "a target whose RoPE changes with the length (dynamic, longrope, yarn)",
    lambda config: (
        (config.layers_of.get("rope_parameters") or {}).get("rope_type", "default")
        not in ("default", "linear", "llama3")
    ),
    "its files have one factor for each frequency of RoPE, and {config.layers_of[rope_parameters][rope_type]} "
    "changes the factors with the length",
    "a target with plain RoPE",
)
EAGLE3_RULES = (
    *eagle.LLAMA_ALONE,
    only("fc_norm", False, "its EAGLE-3 loader does not support fc_norm"),
    only("norm_output", False, "its EAGLE-3 loader does not support norm_output"),
)
OF_ITS_SELECTOR = Refusal(
    "more candidates than fit into a row",
    lambda config: config.selector_top_k * (config.selector_top_k + 1) > config.hidden_size,
    "it keeps k(k + 1) scores of {config.selector_top_k} candidates in a row of the hidden size, {config.hidden_size}",
    "fewer in drafter.options.selector_top_k",
)
DRAFT_MODEL_RULES = (
    *causal_lm.DRAFT_MODEL_RULES,
    no_layers_but(ARCHITECTURES, "draft models with {config.layers_of[model_type]}'s layers are not supported yet"),
)


# An engine's layout in a GGUF file; a head of all tokens stays the target's.
EXPORTERS = {
    (kind, "gguf"): replace(
        exporters[kind, "vllm"], method=method, refusals=(*rules, ROPE), logits_fit=has_plain_logits
    )
    for kind, method, exporters, rules in (
        ("eagle3", "draft-eagle3", eagle.EXPORTERS, EAGLE3_RULES),
        ("dflash", "draft-dflash", dflash.EXPORTERS, dflash.DFLASH_RULES),
        ("dflash2", "draft-dflash", dflash.EXPORTERS, (*dflash.DFLASH2_RULES, OF_ITS_SELECTOR)),
        ("dspark", "draft-dspark", dflash.EXPORTERS, dflash.DSPARK_RULES),
        ("draft_model", "draft-simple", causal_lm.EXPORTERS, DRAFT_MODEL_RULES),
    )
}


# ---- ours to theirs ----


# Name, value and types of a key of a GGUF file; an array has the type of its elements last.
Key = tuple[str, Any, list[Any]]


def write_gguf(
    file: Path,
    written: Checkpoint,
    architecture: str,
    layers_of: Mapping[str, Any],
    tokenizer: Sequence[Key],
    dtype: str,
) -> None:
    """Write a checkpoint, whose tensors have an engine's names, as a GGUF file.

    Args:
        architecture: Result of `architecture_of`.
        layers_of: Config of its layers, `DrafterConfig.layers_of`.
        tokenizer: Keys of the target's tokenizer, from `tokenizer_of`.
        dtype: One of `DTYPES`.

    Raises:
        UserError: The package gguf is not installed.
    """
    gguf = _package()
    writer = gguf.GGUFWriter(file, architecture)
    for name, value, kinds in tokenizer:
        writer.add_key_value(name, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for key, value in _keys(written.config).items():
        name = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](name, value)
    tensors = _turned(renamed(written.tensors, eagle.NAMES, back=True), architecture, written.config)
    for name, value in renamed(tensors, _names(architecture)).items():
        if name == "d2t":
            ids = value + torch.arange(len(value))
            writer.add_tensor(name, ids.to(torch.int64).numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
        elif name != "t2d":
            _add(gguf, writer, name, value.float().numpy(), dtype)
    if (factors := _rope_factors(layers_of)) is not None:
        _add(gguf, writer, "rope_freqs.weight", factors.numpy(), "f32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def architecture_of(method: str, layers_of: Mapping[str, Any]) -> str:
    """Return the GGUF key `general.architecture`, from the exporter's method and the drafter's layers."""
    return OF_METHODS.get(method) or ARCHITECTURES[layers_of["model_type"]]


def _keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's metadata by key, without the architecture as prefix."""
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": head_size,
        "rope.freq_base": float(config.get("rope_theta") or rope["rope_theta"]),
    }
    if "eagle_aux_hidden_state_layer_ids" in config:
        values |= {
            "target_layers": list(config["eagle_aux_hidden_state_layer_ids"]),
            "target_hidden_size": config["hidden_size"],
            "norm_before_residual": bool(config["norm_before_residual"]),
            "norm_before_fc": bool(config.get("norm_before_fc")),
        }
    if of_block := config.get("dflash_config"):
        values |= {
            "target_layers": [layer + 1 for layer in of_block["target_layer_ids"]],
            "block_size": config["block_size"],
            "attention.causal": bool(of_block["causal"]),
            "tokenizer.ggml.mask_token_id": of_block["mask_token_id"],
        }
        if window := config["sliding_window"]:
            sliding = [True] * config["num_hidden_layers"]
            values |= {"attention.sliding_window": window, "attention.sliding_window_pattern": sliding}
        values |= {key: of_block[key] for key in dflash.DFLASH2_KEYS if key in of_block}
    if "enable_confidence_head" in config:
        values |= {"sample_from_anchor": True, "has_confidence_head": bool(config["enable_confidence_head"])}
    return values


def _names(architecture: str) -> dict[str, str]:
    """Return prefixes of names in an engine's layout, with llama.cpp's, for `renamed`."""
    features_norm = "input_norm." if architecture == "eagle3" else "hidden_norm."
    of_layers = {f"layers.#.{name}": f"blk.#.{theirs}" for name, theirs in LAYER_NAMES.items()}
    names = {**NAMES, **of_layers, features_norm: "enc.output_norm."}
    if architecture in ARCHITECTURES.values():
        names = {f"model.{name}": theirs for name, theirs in names.items()}
    return {**names, "lm_head.": "output."}


def _add(gguf: Any, writer: Any, name: str, values: np.ndarray, dtype: str) -> None:
    """Add a tensor to the GGUF file, rounded to `dtype` if it is a matrix that allows it."""
    quantized = dtype in ("q8_0", "q4_0")
    if values.ndim != 2 or dtype == "f32" or (quantized and values.shape[-1] % BLOCK):
        writer.add_tensor(name, np.ascontiguousarray(values))
        return
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def _turned(tensors: Mapping[str, Tensor], architecture: str, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Interleave the two halves of a head's rows [H*Dh, I] of queries and keys, if RoPE needs it."""
    result = dict(tensors)
    for name, value in tensors.items() if architecture in TURNS_NEIGHBOURS else ():
        if found := re.search(r"self_attn\.([qk])_proj\.", name):
            heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
            result[name] = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return result


def _rope_factors(layers_of: Mapping[str, Any]) -> Tensor | None:
    """Return the divisors [Dh/2] of RoPE's frequencies; None if no frequency is divided."""
    kind = (layers_of.get("rope_parameters") or {}).get("rope_type", "default")
    if kind == "default":
        return None
    config = layers_config(layers_of, num_layers=1)
    scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    head_size = 2 * len(scaled)
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, head_size, 2).float() / head_size)
    return plain / scaled


def tokenizer_of(file: Path, target_config: Mapping[str, Any]) -> list[Key]:
    """Return all keys of the tokenizer in a target's GGUF file.

    Raises:
        UserError: The file cannot be read, or belongs to a target of another size.
    """
    gguf = _package()
    try:
        fields = gguf.GGUFReader(file).fields
        architecture = fields["general.architecture"].contents()
        found = {
            "num_hidden_layers": fields[f"{architecture}.block_count"].contents(),
            "hidden_size": fields[f"{architecture}.embedding_length"].contents(),
            "vocab_size": len(fields["tokenizer.ggml.tokens"].data),
        }
    except Exception as error:  # of any type: gguf's reader checks little
        raise UserError(
            f"{file} cannot be read as the GGUF file of a target ({reason(error)}): fetch or convert it again"
        ) from None
    for key, value in found.items():
        if value != target_config[key]:
            raise UserError(f"{file} is another target's: its {key} is {value}, not {target_config[key]}")
    return [(name, field.contents(), field.types) for name, field in fields.items() if name.startswith("tokenizer.")]


def _package() -> Any:
    """Import the package gguf.

    Raises:
        UserError: The package is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise UserError("--to gguf needs the package gguf: pip install -e '.[gguf]' in a checkout") from None
    return gguf
