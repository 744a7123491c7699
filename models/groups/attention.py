"""Group-wise attention for parallel drafters (arXiv 2410.05589, section 4.1), without an [S(K+1), S(K+1)] mask.

The sequence is held as G = K+1 *streams* of length S: stream 0 the real tokens, stream j all the [MASK]_j. Stream 0 at
position t is the real token x_t; streams 1..K at t are the masks of its group. A query of stream j at t attends to

    (a) the stream-0 keys at positions <= t, which is the same causal attention for every stream, and
    (b) the keys of streams 1..j at its own position t; or, where groups are not `causal`, of all of 1..K.

ParallelSpec's masks are the first kind of (b): each of them could be drafted without those behind it. DFlash's blocks
(arXiv 2602.06036) are the second: a block's rows are denoised together, so every one sees every other.

Queries may be those of the last streams only, where the streams are computed one after the other because each reads
what the one before it gave (EAGLE-3's training-time test, arXiv 2503.01840): the keys are of all streams so far.

Three backends compute the same thing:

* `dense`: materialises the boolean mask. The reference that every test compares with; quadratic memory.
* `folded`: (a) folds the streams into the head axis, as grouped-query heads over the stream-0 keys, and calls the flash
  kernel once; (b) is an M x K product per position; the two merge by their log-sum-exp. The backward of (a) is the
  flash backward called with the *merged* output and log-sum-exp (as in ring attention, arXiv 2310.01889), because
  dS = P * (dP - rowsum(dO * O)) only needs P normalised by the merged sum. Exact; memory linear in S. In half
  precision (b) is computed in fp32 both ways, under autocast too.
* `flex`: FlexAttention with a block mask, CUDA only (torch has no FlexAttention backward on CPU).

Shapes: B batch, H query heads, Hkv key/value heads (H = Hkv * R), G streams, Q <= G streams with queries, K = G-1
masks, M = min(Q, K) masks with queries, S positions, Dh head size.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.groups.causal import causal_backward, causal_forward, past_backward, past_forward
from draftsmith.models.groups.documents import Documents
from draftsmith.recipes.errors import UserError

Backend = Literal["folded", "dense", "flex"]
BACKENDS: tuple[str, ...] = get_args(Backend)


@dataclass(frozen=True)
class Past:
    """Stream-0 keys and values before the positions at hand, which the first of these see, in every stream.

    k_bhpd, v_bhpd: [B, Hkv, P, Dh]; num_queries: How many of the S positions see them: those of the document that began
    there.
    """

    k_bhpd: Tensor
    v_bhpd: Tensor
    num_queries: int


def group_attention(
    q_bhqsd: Tensor,
    k_bhgsd: Tensor,
    v_bhgsd: Tensor,
    backend: str = "folded",
    scale: float | None = None,
    documents: Documents | None = None,
    past: Past | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention of every stream to the real past and to the masks of its own group, the earlier ones or all.

    Args:
        q_bhqsd: [B, H, Q, S, Dh] of the last Q streams, already rotated.
        k_bhgsd: [B, Hkv, G, S, Dh], already rotated; Hkv divides H.
        v_bhgsd: [B, Hkv, G, S, Dh].
        backend: `folded`, `dense` or `flex`.
        scale: Factor on the scores; 1/sqrt(Dh) by default.
        documents: Of which the S positions consist, if of several that do not see each other.
        past: What lies before them, if they are a part of a longer sequence.
        causal: Whether a mask sees none of its own group behind it.

    Returns:
        [B, H, Q, S, Dh].

    Raises:
        UserError: Unknown backend, or one that this device cannot run.
    """
    scale = q_bhqsd.shape[-1] ** -0.5 if scale is None else scale
    # Under autocast RoPE leaves queries and keys in fp32 beside values in half precision; kernels want one dtype.
    q_bhqsd, k_bhgsd = q_bhqsd.to(v_bhgsd.dtype), k_bhgsd.to(v_bhgsd.dtype)
    if backend == "folded":
        seen = (None, None, 0) if past is None else (past.k_bhpd, past.v_bhpd, past.num_queries)
        return _FoldedGroupAttention.apply(q_bhqsd, k_bhgsd, v_bhgsd, scale, documents, *seen, causal)
    if backend == "dense":
        return _dense(q_bhqsd, k_bhgsd, v_bhgsd, scale, documents, past, causal)
    if backend == "flex":
        if past is not None:
            raise UserError(
                "attention backend `flex` takes all masks at once: use drafter.options.attention=folded, or leave out "
                "drafter.options.in_parts"
            )
        return _flex(q_bhqsd, k_bhgsd, v_bhgsd, scale, documents, causal)
    raise UserError(f"unknown attention backend `{backend}`: use one of {', '.join(BACKENDS)}")


def group_mask(num_streams: int, length: int, device: torch.device | str = "cpu", causal: bool = True) -> Tensor:
    """[G*S, G*S] booleans, True where the query (row) may see the key (column); index = stream * S + position."""
    index = torch.arange(num_streams * length, device=device)
    return _may_see(index[:, None], index[None, :], length, causal)


def _may_see(query: Tensor, key: Tensor, length: int, causal: bool) -> Tensor:
    query_stream, query_position = query // length, query % length
    key_stream, key_position = key // length, key % length
    real_past = (key_stream == 0) & (key_position <= query_position)
    is_seen = (key_stream <= query_stream) if causal else (query_stream >= 1)
    return real_past | ((key_stream >= 1) & is_seen & (key_position == query_position))


def _dense(
    q_bhqsd: Tensor,
    k_bhgsd: Tensor,
    v_bhgsd: Tensor,
    scale: float,
    documents: Documents | None = None,
    past: Past | None = None,
    causal: bool = True,
) -> Tensor:
    query_streams, length = q_bhqsd.shape[2:4]
    num_streams = k_bhgsd.shape[2]
    mask = group_mask(num_streams, length, q_bhqsd.device, causal)
    if documents is not None:
        number_gs = documents.numbers(length).repeat(num_streams)
        mask &= number_gs[:, None] == number_gs
    mask = mask[-query_streams * length :]
    k_bhtd, v_bhtd = k_bhgsd.flatten(2, 3), v_bhgsd.flatten(2, 3)
    if past is not None:
        sees_s = torch.arange(length, device=mask.device) < past.num_queries
        mask = torch.cat([sees_s.repeat(query_streams)[:, None].expand(-1, past.k_bhpd.shape[2]), mask], dim=1)
        k_bhtd, v_bhtd = torch.cat([past.k_bhpd, k_bhtd], dim=2), torch.cat([past.v_bhpd, v_bhtd], dim=2)
    out = F.scaled_dot_product_attention(q_bhqsd.flatten(2, 3), k_bhtd, v_bhtd, mask, scale=scale, enable_gqa=True)
    return out.unflatten(2, (query_streams, length))


def _flex(
    q_bhqsd: Tensor,
    k_bhgsd: Tensor,
    v_bhgsd: Tensor,
    scale: float,
    documents: Documents | None = None,
    causal: bool = True,
) -> Tensor:
    if q_bhqsd.device.type != "cuda":
        raise UserError(
            f"attention backend `flex` needs a CUDA device, not {q_bhqsd.device.type} (FlexAttention has no backward "
            "there): use drafter.options.attention=folded"
        )
    query_streams, length = q_bhqsd.shape[2:4]
    shape = (query_streams, k_bhgsd.shape[2], length, q_bhqsd.device, causal)
    if documents is None:
        block_mask = _flex_block_mask(*shape)
    else:
        block_mask = _make_flex_block_mask(*shape, documents.numbers(length))
    out = _compiled_flex_attention()(
        q_bhqsd.flatten(2, 3),
        k_bhgsd.flatten(2, 3),
        v_bhgsd.flatten(2, 3),
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q_bhqsd.shape[1] != k_bhgsd.shape[1],
    )
    return out.unflatten(2, (query_streams, length))


@functools.cache
def _compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@functools.lru_cache(maxsize=16)
def _flex_block_mask(query_streams: int, num_streams: int, length: int, device: torch.device, causal: bool) -> Any:
    return _make_flex_block_mask(query_streams, num_streams, length, device, causal)


def _make_flex_block_mask(
    query_streams: int,
    num_streams: int,
    length: int,
    device: torch.device,
    causal: bool,
    document_s: Tensor | None = None,
) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    first_query = (num_streams - query_streams) * length

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = _may_see(query + first_query, key, length, causal)
        return seen if document_s is None else seen & (document_s[query % length] == document_s[key % length])

    return create_block_mask(mask_mod, None, None, query_streams * length, num_streams * length, device=device)


class _FoldedGroupAttention(torch.autograd.Function):
    """Part (a) by the flash kernel, part (b) by an M x K product, merged by log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q_bhqsd: Tensor,
        k_bhgsd: Tensor,
        v_bhgsd: Tensor,
        scale: float,
        documents: Documents | None = None,
        past_k_bhpd: Tensor | None = None,
        past_v_bhpd: Tensor | None = None,
        past_queries: int = 0,
        causal: bool = True,
    ) -> Tensor:
        query_streams, num_masks = q_bhqsd.shape[2], k_bhgsd.shape[2] - 1
        # The streams of one query head are neighbours on the head axis: grouped-query heads of one key head.
        q_folded = q_bhqsd.flatten(1, 2)
        out_folded, lse_folded, saved = causal_forward(q_folded, k_bhgsd[:, :, 0], v_bhgsd[:, :, 0], scale, documents)
        ctx.saved_of_past, seen = [], slice(past_queries)
        if past_k_bhpd is not None and past_v_bhpd is not None:
            out_past, lse_past, ctx.saved_of_past = past_forward(q_folded[:, :, seen], past_k_bhpd, past_v_bhpd, scale)
            _merge(out_folded[:, :, seen], lse_folded[:, :, seen], out_past, lse_past)
        if num_masks > 0:
            masks = slice(-min(query_streams, num_masks), None)
            q, out, lse = (part.unflatten(1, (-1, query_streams)) for part in (q_folded, out_folded, lse_folded))
            with torch.autocast(q.device.type, enabled=False):  # fp32 products here, as in the backward
                _merge_own_group(out[:, :, masks], lse[:, :, masks], q[:, :, masks], k_bhgsd, v_bhgsd, scale, causal)
        ctx.save_for_backward(q_folded, k_bhgsd, v_bhgsd, out_folded, lse_folded, past_k_bhpd, past_v_bhpd, *saved)
        ctx.scale, ctx.query_streams, ctx.documents, ctx.seen = scale, query_streams, documents, seen
        ctx.causal = causal
        return out_folded.unflatten(1, (-1, query_streams))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out_bhqsd,) = grad_outputs
        q_folded, k_bhgsd, v_bhgsd, out_folded, lse_folded, past_k_bhpd, past_v_bhpd, *saved = ctx.saved_tensors
        query_streams, num_masks = ctx.query_streams, k_bhgsd.shape[2] - 1
        grad_q_folded, grad_k0_bhsd, grad_v0_bhsd = causal_backward(
            grad_out_bhqsd.flatten(1, 2),
            q_folded,
            k_bhgsd[:, :, 0],
            v_bhgsd[:, :, 0],
            out_folded,
            lse_folded,
            saved,
            ctx.scale,
            ctx.documents,
        )
        of_past: tuple[Tensor | None, ...] = (None, None)
        if past_k_bhpd is not None:
            seen = ctx.seen
            q, out, lse = (part[:, :, seen] for part in (q_folded, out_folded, lse_folded))
            grad_out = grad_out_bhqsd.flatten(1, 2)[:, :, seen]
            grad_q_seen, grad_past_k, grad_past_v = past_backward(
                grad_out, q, past_k_bhpd, past_v_bhpd, out, lse, ctx.saved_of_past, ctx.scale
            )
            of_past = grad_past_k, grad_past_v
            grad_q_folded[:, :, seen] += grad_q_seen
        grad_q = grad_q_folded.unflatten(1, (-1, query_streams))
        if num_masks == 0:
            return grad_q, grad_k0_bhsd.unsqueeze(2), grad_v0_bhsd.unsqueeze(2), None, None, *of_past, None, None
        grad_k, grad_v = torch.empty_like(k_bhgsd), torch.empty_like(v_bhgsd)
        grad_k[:, :, 0], grad_v[:, :, 0] = grad_k0_bhsd, grad_v0_bhsd
        masks = slice(-min(query_streams, num_masks), None)
        q, out, lse = (
            part.unflatten(1, (-1, query_streams))[:, :, masks] for part in (q_folded, out_folded, lse_folded)
        )
        grad_out = grad_out_bhqsd[:, :, masks]
        with torch.autocast(q.device.type, enabled=False):
            grad_q[:, :, masks] += _own_group_backward(
                grad_out, q, k_bhgsd, v_bhgsd, out, lse, ctx.scale, ctx.causal, grad_k[:, :, 1:], grad_v[:, :, 1:]
            )
        return grad_q, grad_k, grad_v, None, None, *of_past, None, None


def _merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Add attention of the same queries [..., S, Dh] to other keys, in place."""
    merged = torch.logaddexp(lse, other_lse)
    out.mul_((lse - merged).exp_().unsqueeze(-1))
    out.add_(other_out * (other_lse - merged).exp_().unsqueeze(-1))
    lse.copy_(merged)


def _rows(q_bhmsd: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hkv, S, R*M, Dh]: all queries of masks that share a key head, as rows of one small matrix."""
    return q_bhmsd.unflatten(1, (num_kv_heads, -1)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)


def _from_rows(rows: Tensor, num_queries: int) -> Tensor:
    """[B, Hkv, S, R*M, ...] -> [B, H, M, S, ...], the inverse of `_rows`."""
    return rows.unflatten(3, (-1, num_queries)).movedim(2, 4).flatten(1, 2)


def _own_scores(q_rows: Tensor, k_bhskd: Tensor, num_queries: int, scale: float, causal: bool) -> Tensor:
    """[B, Hkv, S, R*M, K] scores of the last M masks; if causal, mask j sees masks 1..j, and the rest is -inf."""
    if not causal:
        return (q_rows @ k_bhskd.mT).mul_(scale)
    num_masks = k_bhskd.shape[3]
    hidden = torch.ones(num_queries, num_masks, dtype=torch.bool, device=q_rows.device)
    hidden = hidden.triu(1 + num_masks - num_queries)
    scores = (q_rows @ k_bhskd.mT).mul_(scale)
    return scores.masked_fill_(hidden.repeat(scores.shape[3] // num_queries, 1), float("-inf"))


def _merge_own_group(
    out_bhmsd: Tensor,
    lse_bhms: Tensor,
    q_bhmsd: Tensor,
    k_bhgsd: Tensor,
    v_bhgsd: Tensor,
    scale: float,
    causal: bool,
) -> None:
    """Add part (b) to the output and log-sum-exp of part (a), in place."""
    num_kv_heads, num_queries = k_bhgsd.shape[1], q_bhmsd.shape[2]
    dtype = lse_bhms.dtype  # at least fp32
    q_rows = _rows(q_bhmsd, num_kv_heads).to(dtype)
    k_bhskd, v_bhskd = (part[:, :, 1:].transpose(2, 3).to(dtype) for part in (k_bhgsd, v_bhgsd))
    scores = _own_scores(q_rows, k_bhskd, num_queries, scale, causal)
    merged_bhms = torch.logaddexp(lse_bhms, _from_rows(scores.logsumexp(-1), num_queries))
    p_rows = scores.sub_(_rows_of_positions(merged_bhms, num_kv_heads)).exp_()
    out_bhmsd.mul_((lse_bhms - merged_bhms).exp_().unsqueeze(-1))
    out_bhmsd.add_(_from_rows(p_rows @ v_bhskd, num_queries))
    lse_bhms.copy_(merged_bhms)


def _rows_of_positions(values_bhms: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, M, S] -> [B, Hkv, S, R*M, 1]."""
    return values_bhms.unflatten(1, (num_kv_heads, -1)).permute(0, 1, 4, 2, 3).flatten(3, 4).unsqueeze(-1)


def _own_group_backward(
    grad_out_bhmsd: Tensor,
    q_bhmsd: Tensor,
    k_bhgsd: Tensor,
    v_bhgsd: Tensor,
    out_bhmsd: Tensor,
    lse_bhms: Tensor,
    scale: float,
    causal: bool,
    grad_k_bhksd: Tensor,
    grad_v_bhksd: Tensor,
) -> Tensor:
    """Part (b): returns the gradient of the queries [B, H, M, S, Dh], writes those of the masks' keys and values."""
    num_kv_heads, num_queries = k_bhgsd.shape[1], q_bhmsd.shape[2]
    dtype = lse_bhms.dtype
    q_rows, grad_out_rows, out_rows = (_rows(x, num_kv_heads).to(dtype) for x in (q_bhmsd, grad_out_bhmsd, out_bhmsd))
    k_bhskd, v_bhskd = (part[:, :, 1:].transpose(2, 3).to(dtype) for part in (k_bhgsd, v_bhgsd))
    lse_rows = _rows_of_positions(lse_bhms, num_kv_heads)
    p_rows = _own_scores(q_rows, k_bhskd, num_queries, scale, causal).sub_(lse_rows).exp_()
    # dS = P * (dP - rowsum(dO * O)), with the merged O
    grad_p_rows = grad_out_rows @ v_bhskd.mT
    grad_scores = grad_p_rows.sub_(torch.linalg.vecdot(grad_out_rows, out_rows).unsqueeze(-1))
    grad_scores.mul_(p_rows).mul_(scale)
    grad_k_bhksd.copy_((grad_scores.mT @ q_rows).transpose(2, 3))
    grad_v_bhksd.copy_((p_rows.mT @ grad_out_rows).transpose(2, 3))
    return _from_rows(grad_scores @ k_bhskd, num_queries)
