"""Configs of checkpoints in the layouts that others publish, as their authors write them."""

from typing import Any

from support.tiny_models import VOCABULARY

DRAFTED = 20
LAYERS: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "vocab_size": VOCABULARY, "num_hidden_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip
# Configs as the authors write them.
EAGLE_AUTHORS = {**LAYERS, "bias": True, "architectures": ["LlamaForCausalLM"]}
SPECFORGE = {
    **LAYERS, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}  # fmt: skip
VLLM = {
    **LAYERS, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCABULARY,
    "eagle_aux_hidden_state_layer_ids": [0, 2, 3], "num_aux_hidden_states": 3,
}  # fmt: skip
EAGLE31 = {**VLLM, "fc_norm": True, "norm_output": True}
PEAGLE = {**VLLM, "pard_token": 7}
PEAGLE_NORMED = {**PEAGLE, "fc_norm": True}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFTED,
    "transformer_layer_config": LAYERS, "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "x/y"}},
}  # fmt: skip
SPECULATORS_NORMED = {**SPECULATORS, "norm_before_fc": True, "norm_output": True, "fc_norm": False}
# SpecForge's, and DeepSpec's, which has no nested config.
DFLASH = {
    **LAYERS, "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "block_size": 4, "num_hidden_layers": 2,
    "num_target_layers": 4, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
}  # fmt: skip
DSPARK = {
    **LAYERS, "model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "block_size": 3, "mask_token_id": 7,
    "target_layer_ids": [1, 2], "markov_rank": 5, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
DSPARK_REDUCED = {**DSPARK, "draft_vocab_size": DRAFTED}
# z-lab/Qwen3.8-27B-DFlash2's keys.
DFLASH2 = {
    **DFLASH, "architectures": ["DFlash2DraftModel"], "is_causal": False, "sliding_window": 6,
    "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2,
    "dflash_config": {
        **DFLASH["dflash_config"], "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 5,
        "selector_top_k": 4,
    },
}  # fmt: skip
SPECULATORS_DFLASH2 = {
    "architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", "draft_vocab_size": VOCABULARY,
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "x/y"}},
    "transformer_layer_config": {
        **LAYERS, "model_type": "qwen3", "sliding_window": 6, "use_sliding_window": True,
        "layer_types": ["sliding_attention"],
    },
    "block_size": 4, "aux_hidden_state_layer_ids": [1, 3], "mask_token_id": 7, "sample_from_anchor": False,
    "sliding_window_non_causal": True, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 5,
    "selector_top_k": 4,
}  # fmt: skip
MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 2, "hidden_size": 32, "vocab_size": VOCABULARY}
HYDRA = {
    "hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True,
    "hidden_state_offset": 0, "hidden_size": 32, "vocab_size": VOCABULARY,
}  # fmt: skip
# The kind of each import, its weight file, and the format to export it to, or for some the authors' layout.
LAYOUTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "eagle": (EAGLE_AUTHORS, "eagle", "pytorch_model.bin", "sglang"),
    "specforge": (SPECFORGE, "eagle3", "model.safetensors", "sglang"),
    "vllm": (VLLM, "eagle3", "model.safetensors", "vllm"),
    "eagle3.1": (EAGLE31, "eagle3", "model.safetensors", "vllm"),
    "peagle": (PEAGLE, "peagle", "model.safetensors", "vllm"),
    "peagle-normed": (PEAGLE_NORMED, "peagle", "model.safetensors", "vllm"),
    "speculators": (SPECULATORS, "eagle3", "model.safetensors", "speculators"),
    "speculators-normed": (SPECULATORS_NORMED, "eagle3", "model.safetensors", "speculators"),
    "dflash": (DFLASH, "dflash", "model.safetensors", "vllm"),
    "dflash2": (DFLASH2, "dflash2", "model.safetensors", "vllm"),
    "speculators-dflash2": (SPECULATORS_DFLASH2, "dflash2", "model.safetensors", "speculators"),
    "dspark": (DSPARK, "dspark", "model.safetensors", "sglang"),
    "dspark-reduced": (DSPARK_REDUCED, "dspark", "model.safetensors", "vllm"),
    "hydra": (HYDRA, "hydra", "hydra_lm_head.pt", "hydra"),
    "medusa": (MEDUSA, "medusa", "medusa_lm_head.pt", "medusa"),
}
# The keys of torchspec/config/dflash_draft_config.json; AngelSpec's, in angelspec/models/draft/dspark.py, are more.
TORCHSPEC = {
    **{key: LAYERS[key] for key in LAYERS if key not in ("model_type", "head_dim", "hidden_act")},
    "architectures": ["DFlashDraftModel"], "model_type": "dflash", "num_hidden_layers": 2, "num_target_layers": 2,
    "target_hidden_size": 32, "target_num_hidden_layers": 4, "target_layer_ids": [0, 2], "mask_token_id": 7,
}  # fmt: skip
ANGELSPEC = {
    **TORCHSPEC, "architectures": ["DSparkDraftModel"], "model_type": "dspark", "fusion_type": "concat_fc",
    "markov_rank": 5, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
