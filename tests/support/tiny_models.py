"""A random target of a few thousand parameters, and drafters for it."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.drafters.parallel import ParallelDrafter
from draftsmith.models.target.features import target_features
from draftsmith.models.target.text_model import use_configured_time_steps

VOCABULARY, LENGTH = 61, 14
# Config keys of targets of experts, by model type.
EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
# Targets with recurrent layers, by their type.
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **DELTA_NET, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": DELTA_NET,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "falcon_h1": {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8, "num_hidden_layers": 3,
    },
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4, "linear_head_dim": 8,
        "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
}  # fmt: skip
MASKS = 3


def tiny_target(model_type: str = "llama", **changes: Any) -> PreTrainedModel:
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(7)
    layers = HYBRIDS.get(model_type, {})
    if kinds := layers.get("layer_types", layers.get("layers_block_type")):
        values["num_hidden_layers"] = len(kinds)
    config = AutoConfig.for_model(model_type, **{**values, **layers, **changes})
    target = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    use_configured_time_steps(target)
    return target


def long_rope(switch: int) -> dict[str, Any]:
    """Return RoPE whose angles change beyond `switch` tokens, for heads of 8 dimensions."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 8.0]}
    return {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": switch, **factors}


def capped_target() -> PreTrainedModel:
    """Build a target in fp64 with logits far beyond its cap."""
    sizes = {"query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": None}
    return tiny_target("gemma2", tie_word_embeddings=False, **sizes).double()


def smallest_llama(seed: int, vocab_size: int, **changes: Any) -> LlamaForCausalLM:
    """Build a target in float64 with 16 features, for tests with many answers."""
    values: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.4,
    }  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**values, **changes})).double().eval()


def tiny_drafter_of(kind: str, target: PreTrainedModel, **options: Any) -> Drafter:
    """Build a drafter with random changes of its initial values, whose ones and zeros could hide mistakes."""
    torch.manual_seed(11)
    drafter = load_drafter_class(kind).from_target(target, options)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    drafter.training_step = 10_000  # after any warm-up
    return drafter.eval()


def tiny_parallel(target: PreTrainedModel, **options: Any) -> ParallelDrafter:
    drafter = tiny_drafter_of("parallel", target, **{"num_masks": MASKS, **options})
    assert isinstance(drafter, ParallelDrafter)
    return drafter


def random_batch(
    target: PreTrainedModel, batch: int = 2, length: int = LENGTH, drafter: Drafter | None = None
) -> dict[str, Tensor]:
    """Return random tokens, the features that the drafter reads (final ones by default), and two assistant turns."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.zeros_like(ids)
    mask[:, 4:9], mask[:, 11:] = 1, 1
    features, teacher = (
        (target_features(target, ids), None) if drafter is None else drafter.training_features(target, ids)
    )
    rows = {"input_ids": ids, "features": features, "loss_mask": mask}
    return rows if teacher is None else {**rows, "teacher_features": teacher}
