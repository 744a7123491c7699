"""Requirements of loaders on a checkpoint for the tiny target: tensors by name and shape, and values of the config.

Most loaders silently leave a missing tensor at random values, or skip an unknown one; then the drafter loads and no
draft token is accepted. These rules were read from the loaders' sources, such as vLLM 0.32's and SGLang 0.5.23's, and
share nothing with the code that writes a layout:

* EAGLE: vllm/model_executor/models/llama_eagle.py:50-190, sglang/srt/models/llama_eagle.py. vLLM drops the bias of
  `fc`, SGLang always has one.
* EAGLE-3, P-EAGLE: vllm's llama_eagle3.py:184-470 and qwen3_eagle3.py:175-450, transformers_utils/configs/speculators/
  algos.py:18-95 and base.py:62-93; sglang/srt/models/llama_eagle3.py, where the first layer has no biases whatever the
  config says, and fc reads three layers.
* DFlash, DFlash 2, DSpark: vllm's qwen3_dflash.py, qwen3_dflash2.py and qwen3_dspark.py, sglang's dflash.py and
  dspark.py.
* Medusa: vllm's medusa.py:20-193 and configs/medusa.py:45-58, FasterDecoding's medusa/model/medusa_model.py.
* Hydra: zankner/Hydra's hydra/model/hydra_heads/mlp_head.py and hydra_model.py.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from support.tiny_models import VOCABULARY

HIDDEN, MLP, KEYS, HEAD_SIZE = 32, 48, 16, 8
LLAMA, QWEN3 = {"model_type": "llama"}, {"model_type": "qwen3", "hidden_act": "silu"}
NO_BIAS, UNTIED, ONE_LAYER = {"attention_bias": False}, {"tie_word_embeddings": False}, {"num_hidden_layers": 1}
# Values that a config must have, by kind (the same for EAGLE-3 and P-EAGLE) and format.
CONFIGS: dict[tuple[str, str], dict[str, Any]] = {
    ("eagle", "vllm"): {"architectures": ["LlamaForCausalLM"], **LLAMA, **ONE_LAYER, **UNTIED},
    ("eagle", "sglang"): {"architectures": ["LlamaForCausalLMEagle"], **LLAMA, **NO_BIAS},
    ("eagle3", "vllm"): UNTIED,
    ("eagle3", "sglang"): {
        "architectures": ["LlamaForCausalLMEagle3"], **LLAMA, **NO_BIAS, **ONE_LAYER, **UNTIED,
    },
    ("eagle3", "speculators"): UNTIED,
    ("dflash", "vllm"): {"architectures": ["DFlashDraftModel"], **QWEN3, **NO_BIAS},
    ("dflash", "speculators"): {"architectures": ["DFlashSpeculator"], **QWEN3, **NO_BIAS, "sample_from_anchor": False},
    ("dflash2", "speculators"): {
        "architectures": ["DFlash2DraftModel"], **QWEN3, **NO_BIAS, "sliding_window_non_causal": True,
    },
    ("dflash2", "vllm"): {"architectures": ["DFlash2DraftModel"], **QWEN3, **NO_BIAS},
    ("dspark", "vllm"): {
        "architectures": ["Qwen3DSparkModel"], **QWEN3, **NO_BIAS, "sample_from_anchor": True,
        "markov_head_type": "vanilla",
    },
    ("medusa", "vllm"): {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": True},
}  # fmt: skip
IN_BLOCKS = ("dflash", "dflash2", "dspark")
Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]


def layer_shapes(
    prefix: str, width: int = HIDDEN, norms: tuple[str, ...] = ("input",), config: Config = NO_BIAS
) -> Shapes:
    """Return the shapes of a Llama layer whose attention reads `width`, with the config's biases and q/k norms."""
    attention = {"q": (HIDDEN, width), "k": (KEYS, width), "v": (KEYS, width), "o": (HIDDEN, HIDDEN)}
    mlp = {"gate": (MLP, HIDDEN), "up": (MLP, HIDDEN), "down": (HIDDEN, MLP)}
    shapes: Shapes = {f"{prefix}.mlp.{name}_proj.weight": shape for name, shape in mlp.items()}
    for name, shape in attention.items():
        shapes[f"{prefix}.self_attn.{name}_proj.weight"] = shape
        if config.get("attention_bias"):
            shapes[f"{prefix}.self_attn.{name}_proj.bias"] = shape[:1]
    if config.get("model_type") == "qwen3":
        shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (HEAD_SIZE,) for name in "qk"}
    names = [name if name == "hidden_norm" else f"{name}_layernorm" for name in (*norms, "post_attention")]
    return shapes | {f"{prefix}.{name}.weight": (HIDDEN,) for name in names}


def head_block(name: str, outputs: int = HIDDEN, inputs: int = HIDDEN) -> Shapes:
    """Return the shapes of a linear layer with a bias."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def draft_vocabulary(config: Config, always: bool = False) -> Shapes:
    """Return the shapes of a draft vocabulary's head and maps; with `always` a head even if all tokens are drafted."""
    drafted = config.get("draft_vocab_size") or VOCABULARY
    head: Shapes = {"lm_head.weight": (drafted, HIDDEN)}
    if drafted == VOCABULARY:
        return head if always else {}
    return {**head, "d2t": (drafted,), "t2d": (VOCABULARY,)}


def required_shapes(kind: str, to: str, config: Config) -> Shapes:
    """Return the required tensors."""
    if kind == "eagle":
        layer = layer_shapes("layers.0", norms=(), config=config)
        return {"fc.weight": (HIDDEN, 2 * HIDDEN), **({"fc.bias": (HIDDEN,)} if to == "sglang" else {}), **layer}
    if kind in ("eagle3", "peagle"):
        return _eagle3(to, {**config, **config.get("transformer_layer_config", {})})
    if kind in IN_BLOCKS:
        return _blocks(kind, to, config)
    shapes: Shapes = {}
    if (kind, to) == ("medusa", "vllm"):
        shared = config["original_lm_head"]
        for i in range(config["num_heads"]):
            for j in range(config["num_hidden_layers"]):
                shapes |= head_block(f"blocks.{i}.layers.{j}")
            shapes |= {} if shared else {f"lm_heads.{i}.weight": (VOCABULARY, HIDDEN)}
        return shapes | ({"lm_head.weight": (VOCABULARY, HIDDEN)} if shared else {})
    if kind == "medusa":
        blocks = config["medusa_num_layers"]
        for i in range(config["medusa_num_heads"]):
            for j in range(blocks):
                shapes |= head_block(f"{i}.{j}.linear")
            shapes[f"{i}.{blocks}.weight"] = (VOCABULARY, HIDDEN)
        return shapes
    for i in range(config["hydra_num_heads"]):
        for part in ("linear", "res_connection"):
            shapes |= head_block(f"hydra_mlp.{i}.0.{part}", inputs=(i + 2) * HIDDEN)
        for j in range(1, config["hydra_num_layers"]):
            shapes |= head_block(f"hydra_mlp.{i}.{j}.linear")
        shapes |= head_block(f"hydra_lm_head.{i}", VOCABULARY)
    return shapes


def _eagle3(to: str, config: Config) -> Shapes:
    nested = config.get("eagle_config", {})
    ids = config.get("eagle_aux_hidden_state_layer_ids") or nested["eagle_aux_hidden_state_layer_ids"]
    fused = 3 if to == "sglang" else len(ids)
    first = "layers.0" if to == "speculators" else "midlayer"
    shapes: Shapes = {"fc.weight": (HIDDEN, fused * HIDDEN), "norm.weight": (HIDDEN,)}
    shapes |= layer_shapes(first, 2 * HIDDEN, ("input", "hidden_norm"), LLAMA if to == "sglang" else config)
    for i in range(1, config["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{i}", config=config)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(fused)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (fused * HIDDEN,)
    if any(config.get(key) is not None for key in ("mask_token_id", "pard_token", "ptd_token_id")):
        shapes["mask_hidden"] = (*((1, 1) if to == "speculators" else (1,)), fused * HIDDEN)
    return shapes | draft_vocabulary(config, always=to == "speculators")


def _blocks(kind: str, to: str, config: Config) -> Shapes:
    nested = config.get("dflash_config", config)
    if to == "speculators":
        config = {**config, **config["transformer_layer_config"]}
    fused = len(nested["aux_hidden_state_layer_ids" if to == "speculators" else "target_layer_ids"])
    shapes: Shapes = {"fc.weight": (HIDDEN, fused * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{i}", config=config)
    if nested.get("conv_kernel_size"):
        taps, groups = nested["conv_kernel_size"], HIDDEN // nested["conv_group_size"]
        for i, name in itertools.product(range(config["num_hidden_layers"]), ("attention_conv", "mlp_conv")):
            shapes[f"layers.{i}.{name}.base_kernel"] = (2, taps, HIDDEN)
            shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (2 * taps * groups, HIDDEN)
    if kind == "dflash2":
        rank = nested["selector_rank"]
        for name in ("predecessor", "successor"):
            shapes[f"candidate_selector.{name}_codebook"] = (VOCABULARY, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, HIDDEN)
    if kind == "dspark":
        rank = config["markov_rank"]
        shapes["markov_head.markov_w1.weight"] = (VOCABULARY, rank)
        shapes["markov_head.markov_w2.weight"] = (config.get("draft_vocab_size") or VOCABULARY, rank)
        if config.get("enable_confidence_head"):
            shapes |= {"confidence_head.proj.weight": (1, HIDDEN + rank), "confidence_head.proj.bias": (1,)}
    return shapes | (draft_vocabulary(config) if to in ("vllm", "speculators") else {})


def find_violations(kind: str, to: str, config: Config, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a loader's violations by a checkpoint with this config and these tensors."""
    asked = required_shapes(kind, to, config)
    # A separate head for all tokens may replace the target's.
    known = {**draft_vocabulary(config, always=kind in ("eagle3", "peagle")), **asked}
    found = [f"{name} is missing" for name in asked.keys() - shapes.keys()]
    found += [f"{name} is {shape}, not {known.get(name)}" for name, shape in shapes.items() if known.get(name) != shape]
    key = ({"peagle": "eagle3"}.get(kind, kind), "vllm" if kind in IN_BLOCKS and to == "sglang" else to)
    flat = {**config, **config.get("transformer_layer_config", {}), "architectures": config.get("architectures")}
    return found + [f"{name} must be {value}" for name, value in CONFIGS[key].items() if flat.get(name) != value]
