"""Attention of a target on a CPU, without copies of the keys and values.

transformers' `sdpa` repeats the whole cache for every query head whenever there is a mask, as there is in tree
verification and in batches of several lengths. A tree of one sequence goes through `cpu_kernels.cpp`; the rest through
torch's kernel for CPUs, which reads shared heads as they are.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.models.cpu_kernels import can_attend

NAME = "grouped_sdpa"


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """query [B, H, n, D], key and value [B, Hkv, S, D], additive or boolean mask [B or 1, 1, n, S] to [B, n, H, D]."""
    plain = options.get("position_bias") is None and options.get("cache") is None
    scale = options.get("scaling")
    if plain and _alike(query, key, value) and can_attend(query, attention_mask):
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return torch.ops.draftsmith.attention(query, key, value, attention_mask, scale), None
    is_ours = attention_mask is not None and query.device.type == "cpu" and not torch.is_grad_enabled()
    if not is_ours or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """DeepSeek's values, for one, are of another size than its keys."""
    return all(of.dtype == query.dtype and of.shape[3] == query.shape[3] and of.stride(3) == 1 for of in (key, value))


AttentionInterface.register(NAME, grouped_sdpa)
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_grouped_sdpa(model: PreTrainedModel) -> None:
    """In place of `sdpa`, where the model is on a CPU."""
    if model.config.get_text_config()._attn_implementation == "sdpa" and model.device.type == "cpu":
        model.set_attn_implementation(NAME)
