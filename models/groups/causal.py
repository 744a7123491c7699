"""Attention to real tokens, causal or to a past, with its log-sum-exp, by the kernels that torch has.

The backward is a kernel's own, called with an output and a log-sum-exp that further keys may have been merged into
(see `attention.py`).

Packed documents on a CUDA device are one call of the variable-length flash kernel, however many they are. Where that
does not run (on a CPU, in fp32, before sm80) there is one call for each document.

Shapes: B batch, H query heads, Hkv key/value heads, S positions, Dh head size; T positions of packed documents, B = 1.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.groups.documents import Documents
from draftsmith.recipes.errors import UserError

aten = torch.ops.aten


def causal_forward(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, scale: float, documents: Documents | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Causal grouped-query attention, within each document if there are several.

    Returns:
        Output [B, H, S, Dh], log-sum-exp [B, H, S] in fp32 (fp64 for fp64), and what the backward needs besides.

    Raises:
        UserError: A device or dtype that no kernel is known for.
    """
    if documents is None:
        return _forward(q_bhsd, k_bhsd, v_bhsd, scale)
    if _has_flash(q_bhsd):
        return _packed_forward(q_bhsd, k_bhsd, v_bhsd, scale, documents)
    outs, lses, saved = [], [], []
    for q, k, v in _by_document(documents, q_bhsd, k_bhsd, v_bhsd):
        out, lse, saved_there = _forward(q, k, v, scale)
        outs.append(out)
        lses.append(lse)
        saved += saved_there
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2), saved


def causal_backward(
    grad_out: Tensor,
    q_bhsd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: list[Tensor],
    scale: float,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, given the merged output and log-sum-exp."""
    if documents is None:
        return _backward(grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse, saved, scale)
    if _has_flash(q_bhsd):
        return _packed_backward(grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse, saved, scale, documents)
    parts = _by_document(documents, grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse)
    each = len(saved) // len(parts)
    grads = [
        _backward(grad, q, k, v, o, sums, saved[number * each : (number + 1) * each], scale)
        for number, (grad, q, k, v, o, sums) in enumerate(parts)
    ]
    grad_q, grad_k, grad_v = (torch.cat(part, dim=2) for part in zip(*grads, strict=True))
    return grad_q, grad_k, grad_v


def past_forward(q_bhsd: Tensor, k_bhpd: Tensor, v_bhpd: Tensor, scale: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attention to P keys that all queries see; returns as `causal_forward`."""
    return _forward(q_bhsd, k_bhpd, v_bhpd, scale, is_causal=False)


def past_backward(
    grad_out: Tensor,
    q_bhsd: Tensor,
    k_bhpd: Tensor,
    v_bhpd: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, given the merged output and log-sum-exp."""
    return _backward(grad_out, q_bhsd, k_bhpd, v_bhpd, out, lse, saved, scale, is_causal=False)


def _by_document(documents: Documents, *parts: Tensor) -> list[Any]:
    """Slices along the positions, of each document that has any."""
    slices = zip(*(part.split(documents.lengths, dim=2) for part in parts), strict=True)
    return [there for there in slices if there[0].shape[2] > 0]


def _has_flash(q_bhsd: Tensor) -> bool:
    """Whether the flash kernel for CUDA takes these queries: half precision, on Ampere and later."""
    is_half = q_bhsd.dtype in (torch.float16, torch.bfloat16) and q_bhsd.shape[-1] % 8 == 0
    return q_bhsd.device.type == "cuda" and is_half and _is_ampere(q_bhsd.device)


def _efficient_dtype(q_bhsd: Tensor) -> torch.dtype:
    """What the memory-efficient kernel is given: before Ampere it has no bfloat16."""
    return torch.float32 if q_bhsd.dtype == torch.bfloat16 and not _is_ampere(q_bhsd.device) else q_bhsd.dtype


def _is_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


# ---- one sequence in each row of the batch ----


def _forward(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, scale: float, is_causal: bool = True
) -> tuple[Tensor, Tensor, list[Tensor]]:
    if q_bhsd.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q_bhsd, k_bhsd, v_bhsd, 0.0, is_causal, scale=scale)
        return out, lse, []
    if q_bhsd.device.type != "cuda" or q_bhsd.dtype == torch.float64:
        raise UserError(
            f"attention backend `folded` runs on CPU and CUDA up to fp32, not on {q_bhsd.device.type} in "
            f"{q_bhsd.dtype}: use drafter.options.attention=dense"
        )
    k_bhsd, v_bhsd = (_repeat_heads(part, q_bhsd.shape[1]) for part in (k_bhsd, v_bhsd))
    if _has_flash(q_bhsd):
        out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q_bhsd, k_bhsd, v_bhsd, 0.0, is_causal, scale=scale
        )
        return out, lse, [seed, offset]
    dtype = _efficient_dtype(q_bhsd)
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
        q_bhsd.to(dtype), k_bhsd.to(dtype), v_bhsd.to(dtype), None, True, 0.0, is_causal, scale=scale
    )
    return out.to(q_bhsd.dtype), lse[..., : q_bhsd.shape[2]].contiguous(), [seed, offset]


def _backward(
    grad_out: Tensor,
    q_bhsd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: list[Tensor],
    scale: float,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    if q_bhsd.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse, 0.0, is_causal, scale=scale
        )
    num_kv_heads, length, keys = k_bhsd.shape[1], q_bhsd.shape[2], k_bhsd.shape[2]
    k_bhsd, v_bhsd = (_repeat_heads(part, q_bhsd.shape[1]) for part in (k_bhsd, v_bhsd))
    if _has_flash(q_bhsd):
        lse = lse.contiguous()  # the kernel does not look at its strides
        grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_backward(
            grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse, None, None, length, keys, 0.0, is_causal, *saved, scale=scale
        )
    else:
        # The kernel reads its log-sum-exp in blocks of 32 rows.
        padded_lse = F.pad(lse, (0, -length % 32), value=float("inf"))
        dtype = _efficient_dtype(q_bhsd)
        grad_out, q, k, v, out = (part.to(dtype) for part in (grad_out, q_bhsd, k_bhsd, v_bhsd, out))
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, k, v, None, out, padded_lse, *saved, 0.0, [True] * 3 + [False], is_causal, scale=scale
        )
        grad_q, grad_k, grad_v = (grad.to(q_bhsd.dtype) for grad in grads[:3])
    grad_k, grad_v = (part.unflatten(1, (num_kv_heads, -1)).sum(2) for part in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


def _repeat_heads(part_bhsd: Tensor, num_heads: int) -> Tensor:
    return part_bhsd.repeat_interleave(num_heads // part_bhsd.shape[1], dim=1)


# ---- documents one behind the other, by the variable-length kernel, which groups query heads itself ----


def _packed_forward(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, scale: float, documents: Documents
) -> tuple[Tensor, Tensor, list[Tensor]]:
    bounds, longest = documents.bounds_d, documents.max_length_tokens
    q_thd, k_thd, v_thd = (part[0].transpose(0, 1) for part in (q_bhsd, k_bhsd, v_bhsd))
    out_thd, lse_ht, rng_state, unused, _ = aten._flash_attention_forward(
        q_thd, k_thd, v_thd, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
    )
    return out_thd.transpose(0, 1).unsqueeze(0), lse_ht.unsqueeze(0), [rng_state, unused]


def _packed_backward(
    grad_out: Tensor,
    q_bhsd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: list[Tensor],
    scale: float,
    documents: Documents,
) -> tuple[Tensor, Tensor, Tensor]:
    bounds, longest = documents.bounds_d, documents.max_length_tokens
    parts_thd = [part[0].transpose(0, 1) for part in (grad_out, q_bhsd, k_bhsd, v_bhsd, out)]
    grads_thd = aten._flash_attention_backward(
        *parts_thd, lse[0], bounds, bounds, longest, longest, 0.0, True, *saved, scale=scale
    )
    grad_q, grad_k, grad_v = (grad.transpose(0, 1).unsqueeze(0) for grad in grads_thd)
    return grad_q, grad_k, grad_v
