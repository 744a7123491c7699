"""Attention of a few query rows to a long KV cache: by our kernels where they support the tensors, else by torch's.

transformers' `sdpa` repeats the whole cache for every query head whenever there is a mask, as there is in tree
verification.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.models.kernels.cpu_kernels import can_attend
from draftsmith.models.kernels.cuda_attention import can_split, has_split_attention, split_attention

OWN_SDPA = "own_sdpa"


def own_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as `sdpa`: query [B, H, n, D], key, value [B, G, S, D], any mask [B or 1, 1, n, S] -> [B, n, H, D]."""
    if options.get("position_bias") is None and options.get("cache") is None:
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if can_attend(query, key, value, attention_mask):
            return torch.ops.draftsmith.attention(query, key, value, attention_mask, scale), None
        if query.device.type == "cuda" and can_split(query, key, value, attention_mask):
            return split_attention(query, key, value, attention_mask, scale), None
        if attention_mask is not None and query.device.type == "cpu" and not torch.is_grad_enabled():
            if query.shape[2] == 1:
                # The queries of a shared head as rows of one head: in bf16 torch's kernel is then ten times as fast.
                shared = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
                out = F.scaled_dot_product_attention(shared, key, value, attention_mask, scale=scale)
                return out.reshape(query.transpose(1, 2).shape), None
            # torch's kernel for CPUs reads shared heads as they are.
            out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scale, enable_gqa=True)
            return out.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(OWN_SDPA, own_sdpa)
AttentionMaskInterface.register(OWN_SDPA, sdpa_mask)


def use_own_attention(model: PreTrainedModel) -> None:
    """Replace `sdpa` by `own_sdpa` where the model is on a CPU, or on CUDA where the kernels work."""
    device = model.device
    works = device.type == "cpu" or (device.type == "cuda" and has_split_attention(device, model.dtype))
    if works and model.config.get_text_config()._attn_implementation == "sdpa":
        model.set_attn_implementation(OWN_SDPA)
