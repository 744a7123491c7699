"""Group-wise attention for parallel drafters (arXiv 2410.05589, section 4.1), without an [S(K+1), S(K+1)] mask.

Who attends to whom is `layout.group_mask`, which only the reference `dense` materialises; the kernel computes the same.

The sequence is held as G = K+1 *depths* of length S: depth 0 the real tokens, depth j all the [MASK]_j. Depth 0 at
position t is the real token x_t; depths 1..K at t are the masks of its group. A query of depth j at t attends to

    (a) the depth-0 keys at positions <= t, which is the same causal attention for every depth, and
    (b) the keys of depths 1..j at its own position t; or, where groups are not `causal`, of all of 1..K.

ParallelSpec's masks are the first kind of (b): each of them could be drafted without those after it. DFlash's blocks
(arXiv 2602.06036) are the second: a block's rows are denoised together, so every one sees every other.

With a sliding window of W tokens, a query of depth j at t, whose position is t + j, sees in (a) only the keys at
positions > t + j - W, so that each depth has another first key, as engines serve it. A group is never wider than the
window.

Queries may be those of the last depths only, where the depths are computed one after the other because each reads
the output of the one before it (EAGLE-3's training-time test, arXiv 2503.01840): the keys are of all depths so far.

Two backends compute the same thing:

* `dense`: materialises the boolean mask. The reference that every test compares with, for devices without the kernels
  of `folded`; quadratic memory.
* `folded`: (a) folds the depths into the head axis, as grouped-query heads over the depth-0 keys, and calls the flash
  kernel once; (b) is an M x K product per position; the two merge by their log-sum-exp. The backward of (a) is the
  flash backward called with the *merged* output and log-sum-exp (as in ring attention, arXiv 2310.01889), because
  dS = P * (dP - rowsum(dO * O)) only needs P normalised by the merged sum. Exact; memory linear in S. In half
  precision (b) is computed in fp32 both ways, under autocast too, and the merged output rounded to the values' dtype.
  On a CPU in bf16 the backward of (a) is written out here, in blocks of queries.

On a CUDA device (a) is one call of the variable-length flash kernel, however many documents there are, or with a window
one call per depth. Where that does not run (on a CPU, in fp32, before sm80) there is one call for each document; a
window then needs a CPU, and memory for the mask of its longest document.

Shapes: B batch, H query heads, Hkv key/value heads (H = Hkv * R), G depths, Q <= G depths with queries, K = G-1
masks, M = min(Q, K) masks with queries, S positions, Dh head size; T positions of packed documents, B = 1.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.models.groups.layout import DepthRows, Documents, Groups, group_mask, number_documents

Backend = Literal["folded", "dense"]

BLOCK = 64  # queries of a backward on a CPU: with their scores they stay in the cache

aten = torch.ops.aten


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    row_attention: Any = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface for the layers of drafters, for which it is registered.

    It hands queries [1, H, N, Dh], keys and values to the object passed to the forward, whose method `attend`
    returns [1, N, H, Dh]: `GroupAttention` in training, `CachedAttention` over a KV cache in decoding.
    """
    if row_attention is None:
        raise ValueError("the drafter's layers need the argument `row_attention`, such as a `GroupAttention`")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return row_attention.attend(module.layer_idx, query, key, value, scale), None


class GroupAttention:
    """Group attention of the packed query rows of all groups: of all depths together, or of some depths at a time.

    Args:
        groups: Layout of the rows, with the documents of `group_attention`.
        backend, causal, window: As in `group_attention`.
        depths: Rows of the first depths (`Groups.rows_of_depths`); None: the rows of all depths.
        keeps: Store keys and values, so that the rows of deeper depths can attend to them.
    """

    def __init__(
        self,
        backend: Backend,
        groups: Groups,
        depths: DepthRows | None = None,
        causal: bool = True,
        keeps: bool = False,
        window: int | None = None,
    ) -> None:
        self._backend, self._causal, self._keeps, self._window = backend, causal, keeps, window
        self._documents, self._is_full = groups.documents, groups.is_full
        self._shape, self._index_n = groups.core_shape, groups.core_index_n
        self._earlier = dict[int, list[tuple[Tensor, Tensor]]]()
        if depths is not None:
            self.resume(depths)

    def add(self, layer_index: int, k_bhnd: Tensor, v_bhnd: Tensor) -> None:
        """Append keys and values [1, Hkv, N, Dh] of rows without a query, for further depths to attend to."""
        self._earlier.setdefault(layer_index, []).append((self._to_grid(k_bhnd), self._to_grid(v_bhnd)))

    def resume(self, depths: DepthRows) -> None:
        """Continue with the query rows of the next depths, on a grid of only these depths."""
        _, self._shape, self._index_n = depths
        self._is_full = False

    def attend(self, layer_index: int, q_bhnd: Tensor, k_bhnd: Tensor, v_bhnd: Tensor, scale: float) -> Tensor:
        """Attend: queries [1, H, N, Dh], keys and values [1, Hkv, N, Dh] of packed rows -> outputs [1, N, H, Dh]."""
        keys_values = [*self._earlier.get(layer_index, []), (self._to_grid(k_bhnd), self._to_grid(v_bhnd))]
        if self._keeps:
            self._earlier[layer_index] = keys_values
        k_bhgsd, v_bhgsd = (
            parts[-1] if len(parts) == 1 else torch.cat([part.to(parts[-1].dtype) for part in parts], dim=2)
            for parts in zip(*keys_values, strict=True)
        )
        parts = self._to_grid(q_bhnd), k_bhgsd, v_bhgsd
        out = group_attention(*parts, self._backend, scale, self._documents, self._causal, self._window)
        rows = out.permute(0, 2, 3, 1, 4).flatten(0, 2)
        return (rows if self._is_full else rows.index_select(0, self._index_n)).unsqueeze(0)

    def _to_grid(self, packed: Tensor) -> Tensor:
        """Scatter [1, H, N, Dh] to [B, H, G, S, Dh], zeros where a row is inactive."""
        rows, shape = packed[0].transpose(0, 1), self._shape
        if not self._is_full:
            rows = rows.new_zeros(math.prod(shape), *rows.shape[1:]).index_copy(0, self._index_n, rows)
        return rows.unflatten(0, shape).permute(0, 3, 1, 2, 4)


def group_attention(
    q_bhqsd: Tensor,
    k_bhgsd: Tensor,
    v_bhgsd: Tensor,
    backend: Backend = "folded",
    scale: float | None = None,
    documents: Documents | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Attend from every depth to the real tokens up to its group's, and to the group's masks, earlier ones or all.

    Args:
        q_bhqsd: [B, H, Q, S, Dh] of the last Q depths, already rotated.
        k_bhgsd: [B, Hkv, G, S, Dh], already rotated; Hkv divides H.
        v_bhgsd: [B, Hkv, G, S, Dh].
        scale: Factor on the scores; 1/sqrt(Dh) by default.
        documents: Bounds of several documents in the S positions, if any, which do not see each other.
        causal: Whether a mask sees only the earlier masks of its group.
        window: Number of tokens that a query sees, its own position included, more than a group has; None: all.

    Returns:
        [B, H, Q, S, Dh].

    Raises:
        UserError: The device cannot run the backend.
    """
    longest = q_bhqsd.shape[3] if documents is None else documents[1]
    if window is not None and window >= longest + k_bhgsd.shape[2] - 1:
        window = None  # no token is that far away
    scale = q_bhqsd.shape[-1] ** -0.5 if scale is None else scale
    # Under autocast RoPE leaves queries and keys in fp32 and values in half precision; kernels need one dtype.
    q_bhqsd, k_bhgsd = q_bhqsd.to(v_bhgsd.dtype), k_bhgsd.to(v_bhgsd.dtype)
    if backend == "folded":
        folded = _Folded(q_bhqsd.shape[2], k_bhgsd.shape[2] - 1, scale, documents, causal, window)
        out: Tensor = _FoldedGroupAttention.apply(q_bhqsd, k_bhgsd, v_bhgsd, folded)
        return out
    query_depths, num_depths, length = q_bhqsd.shape[2], *k_bhgsd.shape[2:4]
    key = torch.arange(num_depths * length, device=q_bhqsd.device)
    document_s = None if documents is None else number_documents(documents, length)
    mask = group_mask(key[-query_depths * length :, None], key, length, causal, window, document_s)
    q_bhtd, k_bhtd, v_bhtd = (part.flatten(2, 3) for part in (q_bhqsd, k_bhgsd, v_bhgsd))
    out = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, mask, scale=scale, enable_gqa=True)
    return out.unflatten(2, (query_depths, length))


class _FoldedGroupAttention(torch.autograd.Function):
    """Part (a) by the flash kernel, part (b) by an M x K product, merged by log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q_bhqsd: Tensor, k_bhgsd: Tensor, v_bhgsd: Tensor, folded: "_Folded") -> Tensor:
        # The depths of one query head are neighbours on the head axis: grouped-query heads of one key head.
        q_folded = q_bhqsd.flatten(1, 2)
        out_folded, lse_folded, states = folded.past(q_folded, k_bhgsd[:, :, 0], v_bhgsd[:, :, 0])
        if folded.num_masks > 0:
            with torch.autocast(q_bhqsd.device.type, enabled=False):  # fp32 products here, as in the backward
                folded.merge_own_group(out_folded, lse_folded, q_folded, k_bhgsd, v_bhgsd)
        ctx.save_for_backward(q_folded, k_bhgsd, v_bhgsd, out_folded, lse_folded, *states)
        ctx.folded = folded
        return out_folded.unflatten(1, (-1, folded.query_depths))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q_folded, k_bhgsd, v_bhgsd, out_folded, lse_folded, *states = ctx.saved_tensors
        folded, grad_out_folded = ctx.folded, grad_outputs[0].flatten(1, 2)
        past = grad_out_folded, q_folded, k_bhgsd[:, :, 0], v_bhgsd[:, :, 0], out_folded, lse_folded
        grad_q_folded, grad_k0_bhsd, grad_v0_bhsd = folded.past_backward(states, *past)
        grad_q = grad_q_folded.unflatten(1, (-1, folded.query_depths))
        if folded.num_masks == 0:
            return grad_q, grad_k0_bhsd.unsqueeze(2), grad_v0_bhsd.unsqueeze(2), None
        with torch.autocast(q_folded.device.type, enabled=False):
            grad_own = folded.own_group_backward(
                grad_q_folded, grad_out_folded, q_folded, k_bhgsd, v_bhgsd, out_folded, lse_folded
            )
        grad_k, grad_v = (
            torch.cat([first.unsqueeze(2), own.to(first.dtype)], dim=2)
            for first, own in zip((grad_k0_bhsd, grad_v0_bhsd), grad_own, strict=True)
        )
        return grad_q, grad_k, grad_v, None


def _rows(q_bhmsd: Tensor, num_kv_heads: int) -> Tensor:
    """Lay out all queries of masks that share a key head as rows of one small matrix, [B, Hkv, S, R*M, Dh]."""
    return q_bhmsd.unflatten(1, (num_kv_heads, -1)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)


@dataclass(frozen=True)
class _Folded:
    """Group attention of the last Q of 1 + `num_masks` depths, whose queries are folded in heads [B, H*Q, S, Dh].

    `past` is part (a), by the kernels that torch has, with its log-sum-exp; `merge_own_group` and `own_group_backward`
    are part (b).
    """

    query_depths: int
    num_masks: int
    scale: float
    documents: Documents | None
    causal: bool
    window: int | None

    # ---- part (b): the masks of a query's own group ----

    def of_masks(self, folded: Tensor) -> Tensor:
        """Return the part of the M masks' queries, a view [B, H, M, S, ...]."""
        return folded.unflatten(1, (-1, self.query_depths))[:, :, -min(self.query_depths, self.num_masks) :]

    def _from_rows(self, rows: Tensor) -> Tensor:
        """Invert `_rows`: [B, Hkv, S, R*M, ...] -> [B, H, M, S, ...]."""
        return rows.unflatten(3, (-1, min(self.query_depths, self.num_masks))).movedim(2, 4).flatten(1, 2)

    def _own_scores(self, q_rows: Tensor, k_bhskd: Tensor) -> Tensor:
        """Compute scores [B, Hkv, S, R*M, K]; if causal, mask j sees masks 1..j, the rest is -inf."""
        scores = (q_rows @ k_bhskd.mT).mul_(self.scale)
        if self.causal:
            num_queries = min(self.query_depths, self.num_masks)
            hidden = torch.ones(num_queries, self.num_masks, dtype=torch.bool, device=q_rows.device)
            hidden = hidden.triu(1 + self.num_masks - num_queries)
            scores.masked_fill_(hidden.repeat(scores.shape[3] // num_queries, 1), float("-inf"))
        return scores

    def merge_own_group(self, out: Tensor, lse: Tensor, q: Tensor, k_bhgsd: Tensor, v_bhgsd: Tensor) -> None:
        """Add part (b) to the output and log-sum-exp of part (a), in place."""
        out_bhmsd, lse_bhms, q_bhmsd = map(self.of_masks, (out, lse, q))
        num_kv_heads, dtype = k_bhgsd.shape[1], lse.dtype  # at least fp32
        k_bhskd, v_bhskd = (part[:, :, 1:].transpose(2, 3).to(dtype) for part in (k_bhgsd, v_bhgsd))
        scores = self._own_scores(_rows(q_bhmsd, num_kv_heads).to(dtype), k_bhskd)
        merged_bhms = torch.logaddexp(lse_bhms, self._from_rows(scores.logsumexp(-1)))
        p_rows = scores.sub_(_rows(merged_bhms.unsqueeze(-1), num_kv_heads)).exp_()
        out_bhmsd.mul_((lse_bhms - merged_bhms).exp_().unsqueeze(-1))
        out_bhmsd.add_(self._from_rows(p_rows @ v_bhskd))
        lse_bhms.copy_(merged_bhms)

    def own_group_backward(
        self, grad_q: Tensor, grad_out: Tensor, q: Tensor, k_bhgsd: Tensor, v_bhgsd: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add to the masks' queries' gradients, in place; return those of keys and values [B, Hkv, K, S, Dh]."""
        num_kv_heads, dtype = k_bhgsd.shape[1], lse.dtype
        q_rows, grad_out_rows, out_rows = (
            _rows(self.of_masks(part), num_kv_heads).to(dtype) for part in (q, grad_out, out)
        )
        k_bhskd, v_bhskd = (part[:, :, 1:].transpose(2, 3).to(dtype) for part in (k_bhgsd, v_bhgsd))
        lse_rows = _rows(self.of_masks(lse).unsqueeze(-1), num_kv_heads)
        p_rows = self._own_scores(q_rows, k_bhskd).sub_(lse_rows).exp_()
        # dS = P * (dP - rowsum(dO * O)), with the merged O
        grad_p_rows = grad_out_rows @ v_bhskd.mT
        grad_scores = grad_p_rows.sub_(torch.linalg.vecdot(grad_out_rows, out_rows).unsqueeze(-1))
        grad_scores.mul_(p_rows).mul_(self.scale)
        grad_k_bhskd, grad_v_bhskd = grad_scores.mT @ q_rows, p_rows.mT @ grad_out_rows
        self.of_masks(grad_q).add_(self._from_rows(grad_scores @ k_bhskd))
        return grad_k_bhskd.transpose(2, 3), grad_v_bhskd.transpose(2, 3)

    # ---- part (a): causal attention to the real past ----

    def past(self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return output, log-sum-exp [B, H*Q, S] in fp32 (fp64 for fp64), and the kernels' random states.

        Raises:
            UserError: The device has no kernel for this dtype or a window.
        """
        if _has_flash(q_bhsd):
            return self._flash_forward(q_bhsd, k_bhsd, v_bhsd)
        by_document = [self._fused_forward(*parts) for parts in self._by_document(q_bhsd, k_bhsd, v_bhsd)]
        outs, lses, states = zip(*by_document, strict=True)
        return _joined(outs), _joined(lses), [state for of_document in states for state in of_document]

    def past_backward(self, states: list[Tensor], *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of queries, keys and values.

        Args:
            states: Of `past`.
            given: Gradient of the output, queries, keys, values, and merged output and log-sum-exp.
        """
        if _has_flash(given[1]):
            return self._flash_backward(states, *given)
        by_document = self._by_document(*given)
        each = len(states) // len(by_document)
        grads = [
            self._fused_backward(states[number * each : (number + 1) * each], *parts)
            for number, parts in enumerate(by_document)
        ]
        grad_q, grad_k, grad_v = map(_joined, zip(*grads, strict=True))
        return grad_q, grad_k, grad_v

    def _by_document(self, *parts: Tensor) -> list[Any]:
        """Return the parts' slices of each document that is not empty; without documents the parts."""
        if self.documents is None:
            return [parts]
        slices = zip(*(part.split(_lengths(self.documents[0]), dim=2) for part in parts), strict=True)
        return [of_document for of_document in slices if of_document[0].shape[2] > 0]

    # ---- by the device's fused kernel, one sequence in each row of the batch ----

    def _fused_forward(self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Attend causally in each row; returns as `past`."""
        device, dtype = q_bhsd.device.type, q_bhsd.dtype
        if device == "cpu":
            mask = self._mask(q_bhsd)
            q = q_bhsd if mask is None else self._depth_after_depth(q_bhsd)
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q, k_bhsd, v_bhsd, 0.0, mask is None, attn_mask=mask, scale=self.scale
            )
            return out.reshape(q_bhsd.shape), lse.reshape(q_bhsd.shape[:3]), []
        if device != "cuda" or dtype == torch.float64 or self.window is not None:
            problem = "runs on CPU and CUDA up to fp32"
            if device == "cuda" and dtype != torch.float64:
                problem = "has a window on CUDA in half precision on Ampere and later"
            raise UserError(
                f"attention backend `folded` {problem}, not on {device} in {dtype}: use drafter.options.attention=dense"
            )
        k_bhsd, v_bhsd = (_repeat_heads(part, q_bhsd.shape[1]) for part in (k_bhsd, v_bhsd))
        parts = (part.to(_efficient_dtype(q_bhsd)) for part in (q_bhsd, k_bhsd, v_bhsd))
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
            *parts, None, True, 0.0, True, scale=self.scale
        )
        return out.to(dtype), lse[..., : q_bhsd.shape[2]].contiguous(), [seed, offset]

    def _fused_backward(self, states: list[Tensor], *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse = given
        if q_bhsd.device.type == "cpu":
            mask, q = self._mask(q_bhsd), q_bhsd
            if mask is None and q.dtype == torch.bfloat16:
                with torch.autocast("cpu", enabled=False):
                    return self._backward_in_blocks(*given)
            if mask is not None:
                grad_out, q, out, lse = map(self._depth_after_depth, (grad_out, q, out, lse))
            grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, q, k_bhsd, v_bhsd, out, lse, 0.0, mask is None, attn_mask=mask, scale=self.scale
            )
            return grad_q.reshape(q_bhsd.shape), grad_k, grad_v
        num_kv_heads = k_bhsd.shape[1]
        k_bhsd, v_bhsd = (_repeat_heads(part, q_bhsd.shape[1]) for part in (k_bhsd, v_bhsd))
        # The kernel reads its log-sum-exp in blocks of 32 rows.
        padded_lse = F.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))
        dtype = _efficient_dtype(q_bhsd)
        grad_out, q, k, v, out = (part.to(dtype) for part in (grad_out, q_bhsd, k_bhsd, v_bhsd, out))
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, k, v, None, out, padded_lse, *states, 0.0, [True] * 3 + [False], True, scale=self.scale
        )
        grad_q, grad_k, grad_v = (grad.to(q_bhsd.dtype) for grad in grads[:3])
        grad_k, grad_v = (part.unflatten(1, (num_kv_heads, -1)).sum(2) for part in (grad_k, grad_v))
        return grad_q, grad_k, grad_v

    def _backward_in_blocks(
        self, grad_out: Tensor, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Multiply blocks of bf16 queries with all keys up to them (arXiv 2205.14135, algorithm 4), on a CPU.

        torch's kernel there takes twice as long and has five times the error, as it sums in bf16.
        """
        keys, by_key_head = k_bhsd.float(), (k_bhsd.shape[1], -1)
        grad_q, grad_k, grad_v = torch.empty_like(q_bhsd), torch.zeros_like(keys), torch.zeros_like(keys)
        for start in range(0, q_bhsd.shape[2], BLOCK):
            past, block = slice(start + BLOCK), slice(start, start + BLOCK)
            # The query heads of a key head are rows of one matrix [B, Hkv, R*Q*block, ...].
            q_rows, grad_rows, out_rows, lse_rows = (
                part[:, :, block].unflatten(1, by_key_head).flatten(2, 3)
                for part in (q_bhsd, grad_out, out, lse.unsqueeze(-1))
            )
            p_rows = (q_rows.float() @ keys[:, :, past].mT).mul_(self.scale).sub_(lse_rows)
            by_query = p_rows.unflatten(2, (-1, lse[0, 0, block].numel()))[..., start:]
            by_query.masked_fill_(torch.ones(by_query.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
            p_rows.exp_()
            grad_v[:, :, past] += p_rows.to(v_bhsd.dtype).mT @ grad_rows
            # dS = P * (dP - rowsum(dO * O))
            products = torch.linalg.vecdot(grad_rows.float(), out_rows.float()).unsqueeze(-1)
            grad_scores = (grad_rows @ v_bhsd[:, :, past].mT).float().sub_(products).mul_(p_rows).mul_(self.scale)
            grad_scores = grad_scores.to(k_bhsd.dtype)
            grad_k[:, :, past] += grad_scores.mT @ q_rows
            grad_q[:, :, block] = (grad_scores @ k_bhsd[:, :, past]).unflatten(2, by_query.shape[2:4]).flatten(1, 2)
        return grad_q, grad_k.to(k_bhsd.dtype), grad_v.to(v_bhsd.dtype)

    def _depth_after_depth(self, folded: Tensor) -> Tensor:
        """Unfold heads [B, H*Q, S, ...] to sequences of all depths, [B, H, Q*S, ...]."""
        return folded.unflatten(1, (-1, self.query_depths)).flatten(2, 3)

    def _mask(self, q_bhsd: Tensor) -> Tensor | None:
        """Return 0 where the real tokens are inside a row's window and -inf elsewhere [Q*S, S]; None: no window."""
        if self.window is None:
            return None
        length = q_bhsd.shape[2]
        place = torch.arange((1 + self.num_masks) * length)
        is_seen = group_mask(place[-self.query_depths * length :, None], place[:length], length, window=self.window)
        return torch.zeros(is_seen.shape, dtype=q_bhsd.dtype).masked_fill_(~is_seen, float("-inf"))

    # ---- by the variable-length flash kernel, which groups query heads itself ----

    def _flash_forward(self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Attend causally in each document, or each row of the batch; returns as `past`."""
        bounds = self._bounds(q_bhsd)
        k_thd, v_thd = map(_as_tokens, (k_bhsd, v_bhsd))
        outs, lses, states = list[Tensor](), list[Tensor](), list[Tensor]()
        for q, window in zip(self._by_window(q_bhsd), self._windows, strict=True):
            out_thd, lse_ht, *random_states, _ = aten._flash_attention_forward(
                _as_tokens(q), k_thd, v_thd, *bounds, 0.0, True, False, scale=self.scale, **window
            )
            outs.append(out_thd.view(len(q), -1, *out_thd.shape[1:]).transpose(1, 2))
            lses.append(lse_ht.view(len(lse_ht), len(q), -1).transpose(0, 1))
            states += random_states
        return self._folded(outs), self._folded(lses), states

    def _flash_backward(self, states: list[Tensor], *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse = given
        bounds = self._bounds(q_bhsd)
        k_thd, v_thd = map(_as_tokens, (k_bhsd, v_bhsd))
        grads = list[list[Tensor]]()
        by_window = map(self._by_window, (grad_out, q_bhsd, out, lse))
        for number, (grad, q, o, sums, window) in enumerate(zip(*by_window, self._windows, strict=True)):
            grad_thd, q_thd, out_thd = map(_as_tokens, (grad, q, o))
            lse_ht = sums.transpose(0, 1).flatten(1, 2).contiguous()  # the kernel ignores strides
            parts, random_states = (grad_thd, q_thd, k_thd, v_thd, out_thd, lse_ht), states[2 * number :][:2]
            grads_thd = aten._flash_attention_backward(
                *parts, *bounds, 0.0, True, *random_states, scale=self.scale, **window
            )
            grads.append([part.unflatten(0, (len(q), -1)).transpose(1, 2) for part in grads_thd])
        grads_q, grads_k, grads_v = zip(*grads, strict=True)
        if self.window is None:
            return grads_q[0], grads_k[0], grads_v[0]
        return self._folded(grads_q), torch.stack(grads_k).sum(0), torch.stack(grads_v).sum(0)

    def _bounds(self, q_bhsd: Tensor) -> tuple[Tensor, Tensor, int, int]:
        """Return bounds and longest length of queries and keys: the documents', or those of the rows of the batch."""
        if self.documents is not None:
            bounds_d, longest = self.documents
        else:
            longest = q_bhsd.shape[2]
            bounds_d = torch.arange(len(q_bhsd) + 1, device=q_bhsd.device, dtype=torch.int32) * longest
        return bounds_d, bounds_d, longest, longest

    @property
    def _windows(self) -> list[dict[str, int]]:
        """Return the kernel's arguments for each call: one, or with a window one for each depth that has queries.

        A depth's window ends at its group's newest token; the kernel's does not count a query's own key.
        """
        if self.window is None:
            return [{}]
        first = 1 + self.num_masks - self.query_depths
        sizes = [self.window - depth for depth in range(first, first + self.query_depths)]
        return [{"window_size_left": size - 1, "window_size_right": 0} for size in sizes]

    def _by_window(self, folded: Tensor) -> tuple[Tensor, ...]:
        """Split heads [B, H*Q, ...] into the parts of `_windows`: with a window the depths, [B, H, ...] each."""
        return (folded,) if self.window is None else folded.unflatten(1, (-1, self.query_depths)).unbind(2)

    def _folded(self, parts: Sequence[Tensor]) -> Tensor:
        """Undo `_by_window`."""
        return parts[0] if self.window is None else torch.stack(list(parts), dim=2).flatten(1, 2)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join documents along S."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)


def _as_tokens(part_bhsd: Tensor) -> Tensor:
    """Join the sequences, [B, H, S, Dh] -> [B*S, H, Dh]."""
    return part_bhsd.transpose(1, 2).flatten(0, 1)


@functools.lru_cache(maxsize=16)
def _lengths(bounds_d: Tensor) -> list[int]:
    """Return the tokens of each document. Waits for the device, once for all layers."""
    return bounds_d.diff().tolist()


def _has_flash(q_bhsd: Tensor) -> bool:
    """Return True if the flash kernel for CUDA takes these queries: half precision, on Ampere and later."""
    is_half = q_bhsd.dtype in (torch.float16, torch.bfloat16) and q_bhsd.shape[-1] % 8 == 0
    return q_bhsd.device.type == "cuda" and is_half and _is_ampere(q_bhsd.device)


def _efficient_dtype(q_bhsd: Tensor) -> torch.dtype:
    """Return the dtype for the memory-efficient kernel, which has no bfloat16 before Ampere."""
    return torch.float32 if q_bhsd.dtype == torch.bfloat16 and not _is_ampere(q_bhsd.device) else q_bhsd.dtype


def _is_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _repeat_heads(part_bhsd: Tensor, num_heads: int) -> Tensor:
    return part_bhsd.repeat_interleave(num_heads // part_bhsd.shape[1], dim=1)
