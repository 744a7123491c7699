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

Three backends compute the same thing:

* `dense`: materialises the boolean mask. The reference that every test compares with; quadratic memory.
* `folded`: (a) folds the depths into the head axis, as grouped-query heads over the depth-0 keys, and calls the flash
  kernel once; (b) is an M x K product per position; the two merge by their log-sum-exp. The backward of (a) is the
  flash backward called with the *merged* output and log-sum-exp (as in ring attention, arXiv 2310.01889), because
  dS = P * (dP - rowsum(dO * O)) only needs P normalised by the merged sum. Exact; memory linear in S. In half
  precision (b) is computed in fp32 both ways, under autocast too.
* `flex`: FlexAttention with a block mask, CUDA only (torch has no FlexAttention backward on CPU).

A window needs one call of (a) per depth: on a CPU over chunks as long as the window, each with the chunk before it, so
that memory and time are linear in S; on CUDA by the flash kernel's own window.

Packed documents on a CUDA device are one call of the variable-length flash kernel, however many they are. Where that
does not run (on a CPU, in fp32, before sm80) there is one call for each document.

Shapes: B batch, H query heads, Hkv key/value heads (H = Hkv * R), G depths, Q <= G depths with queries, K = G-1
masks, M = min(Q, K) masks with queries, S positions, Dh head size; T positions of packed documents, B = 1.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.models.compiling import allow_many_shapes
from draftsmith.models.groups.layout import DepthRows, Documents, Groups, group_mask, number_documents

Backend = Literal["folded", "dense", "flex"]
BACKENDS: tuple[str, ...] = get_args(Backend)

aten = torch.ops.aten


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cached_attention: Any = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface for the layers of drafters, for which it is registered.

    It hands queries [1, H, N, Dh], keys and values to the object passed to the forward, whose method `attend`
    returns [1, N, H, Dh]: `GroupAttention` in training, `CachedAttention` over a KV cache in decoding.
    """
    if cached_attention is None:
        raise ValueError("the drafter's layers need `cached_attention`")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cached_attention.attend(module.layer_idx, query, key, value, scale), None


class GroupAttention:
    """Group attention of the packed query rows of all groups: of all depths together, or of some depths at a time.

    Args:
        backend: As in `group_attention`.
        groups: Groups that the rows belong to.
        depths: Rows of the first depths (`Groups.rows_of_depths`); None: the rows of all depths.
        causal: Whether a row sees only the earlier rows of its group.
        keeps: Keep keys and values, as rows of further depths follow that attend to them.
        window: As in `group_attention`.
    """

    def __init__(
        self,
        backend: str,
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
        """Continue with the rows of the next depths, on a grid of only these depths."""
        _, self._shape, self._index_n = depths
        self._is_full = False

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """Return [1, N, H, Dh] for queries [1, H, N, Dh], keys and values [1, Hkv, N, Dh]."""
        keys_values = [*self._earlier.get(layer_index, []), (self._to_grid(k_bhrd), self._to_grid(v_bhrd))]
        if self._keeps:
            self._earlier[layer_index] = keys_values
        k_bhgsd, v_bhgsd = (
            parts[-1] if len(parts) == 1 else torch.cat([part.to(parts[-1].dtype) for part in parts], dim=2)
            for parts in zip(*keys_values, strict=True)
        )
        parts = self._to_grid(q_bhrd), k_bhgsd, v_bhgsd
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
    backend: str = "folded",
    scale: float | None = None,
    documents: Documents | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Attend from every depth to the real past and to the masks of its group, the earlier ones or all.

    Args:
        q_bhqsd: [B, H, Q, S, Dh] of the last Q depths, already rotated.
        k_bhgsd: [B, Hkv, G, S, Dh], already rotated; Hkv divides H.
        v_bhgsd: [B, Hkv, G, S, Dh].
        backend: `folded`, `dense` or `flex`.
        scale: Factor on the scores; 1/sqrt(Dh) by default.
        documents: Documents that the S positions consist of, if several, which do not see each other.
        causal: Whether a mask sees only the earlier masks of its group.
        window: Number of tokens that a query sees, up to and including its own position; at least G; None: all.

    Returns:
        [B, H, Q, S, Dh].

    Raises:
        UserError: Unknown backend, or one that this device cannot run.
    """
    longest = q_bhqsd.shape[3] if documents is None else documents[1]
    if window is not None and window >= longest + k_bhgsd.shape[2] - 1:
        window = None  # no token is that far away
    scale = q_bhqsd.shape[-1] ** -0.5 if scale is None else scale
    # Under autocast RoPE leaves queries and keys in fp32 and values in half precision; kernels need one dtype.
    q_bhqsd, k_bhgsd = q_bhqsd.to(v_bhgsd.dtype), k_bhgsd.to(v_bhgsd.dtype)
    if backend == "folded":
        return _FoldedGroupAttention.apply(q_bhqsd, k_bhgsd, v_bhgsd, scale, documents, causal, window)
    if backend not in BACKENDS:
        raise UserError(f"unknown attention backend `{backend}`: use one of {', '.join(BACKENDS)}")
    device, query_depths, num_depths, length = q_bhqsd.device, q_bhqsd.shape[2], *k_bhgsd.shape[2:4]
    q_bhtd, k_bhtd, v_bhtd = (part.flatten(2, 3) for part in (q_bhqsd, k_bhgsd, v_bhgsd))
    if backend == "dense":
        key = torch.arange(num_depths * length, device=device)
        document_s = None if documents is None else number_documents(documents, length)
        mask = group_mask(key[-query_depths * length :, None], key, length, causal, window, document_s)
        out = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, mask, scale=scale, enable_gqa=True)
    elif device.type != "cuda":
        raise UserError(
            f"attention backend `flex` needs a CUDA device, not {device.type} (FlexAttention has no backward there): "
            "use drafter.options.attention=folded"
        )
    else:
        block_mask = _flex_block_mask(query_depths, num_depths, length, device, causal, documents, window)
        out = _compiled_flex("flex_attention")(
            q_bhtd, k_bhtd, v_bhtd, block_mask=block_mask, scale=scale, enable_gqa=q_bhtd.shape[1] != k_bhtd.shape[1]
        )
    return out.unflatten(2, (query_depths, length))


@functools.cache
def _compiled_flex(function: Literal["flex_attention", "create_block_mask"]) -> Any:
    """Compile a function of FlexAttention: eagerly, its mask of five depths of 32k tokens would take 25 GiB."""
    from torch.nn.attention import flex_attention

    allow_many_shapes()
    return torch.compile(getattr(flex_attention, function))


@functools.lru_cache(maxsize=16)
def _flex_block_mask(
    query_depths: int,
    num_depths: int,
    length: int,
    device: torch.device,
    causal: bool,
    documents: Documents | None,
    window: int | None,
) -> Any:
    """Return flex attention's mask of groups for the queries of the last `query_depths` depths."""
    first_query = (num_depths - query_depths) * length
    document_s = None if documents is None else number_documents(documents, length)

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return group_mask(query + first_query, key, length, causal, window, document_s)

    create_block_mask = _compiled_flex("create_block_mask")
    return create_block_mask(mask_mod, None, None, query_depths * length, num_depths * length, device=device)


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
        causal: bool = True,
        window: int | None = None,
    ) -> Tensor:
        query_depths, num_masks = q_bhqsd.shape[2], k_bhgsd.shape[2] - 1
        # The depths of one query head are neighbours on the head axis: grouped-query heads of one key head.
        q_folded = q_bhqsd.flatten(1, 2)
        past = _Past(query_depths, num_masks, scale, documents, window)
        out_folded, lse_folded, saved = past.forward(q_folded, k_bhgsd[:, :, 0], v_bhgsd[:, :, 0])
        if num_masks > 0:
            masks = slice(-min(query_depths, num_masks), None)
            q, out, lse = (part.unflatten(1, (-1, query_depths)) for part in (q_folded, out_folded, lse_folded))
            with torch.autocast(q.device.type, enabled=False):  # fp32 products here, as in the backward
                _merge_own_group(out[:, :, masks], lse[:, :, masks], q[:, :, masks], k_bhgsd, v_bhgsd, scale, causal)
        ctx.save_for_backward(q_folded, k_bhgsd, v_bhgsd, out_folded, lse_folded, *saved)
        ctx.scale, ctx.past, ctx.causal = scale, past, causal
        return out_folded.unflatten(1, (-1, query_depths))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out_bhqsd,) = grad_outputs
        q_folded, k_bhgsd, v_bhgsd, out_folded, lse_folded, *saved = ctx.saved_tensors
        query_depths, num_masks = grad_out_bhqsd.shape[2], k_bhgsd.shape[2] - 1
        grad_q_folded, grad_k0_bhsd, grad_v0_bhsd = ctx.past.backward(
            grad_out_bhqsd.flatten(1, 2),
            q_folded,
            k_bhgsd[:, :, 0],
            v_bhgsd[:, :, 0],
            out_folded,
            lse_folded,
            saved,
        )
        grad_q = grad_q_folded.unflatten(1, (-1, query_depths))
        if num_masks == 0:
            return grad_q, grad_k0_bhsd.unsqueeze(2), grad_v0_bhsd.unsqueeze(2), None, None, None, None
        grad_k, grad_v = torch.empty_like(k_bhgsd), torch.empty_like(v_bhgsd)
        grad_k[:, :, 0], grad_v[:, :, 0] = grad_k0_bhsd, grad_v0_bhsd
        masks = slice(-min(query_depths, num_masks), None)
        q, out, lse = (
            part.unflatten(1, (-1, query_depths))[:, :, masks] for part in (q_folded, out_folded, lse_folded)
        )
        grad_out = grad_out_bhqsd[:, :, masks]
        with torch.autocast(q.device.type, enabled=False):
            grad_q[:, :, masks] += _own_group_backward(
                grad_out, q, k_bhgsd, v_bhgsd, out, lse, ctx.scale, ctx.causal, grad_k[:, :, 1:], grad_v[:, :, 1:]
            )
        return grad_q, grad_k, grad_v, None, None, None, None


def _rows(q_bhmsd: Tensor, num_kv_heads: int) -> Tensor:
    """Lay out all queries of masks that share a key head as rows of one small matrix, [B, Hkv, S, R*M, Dh]."""
    return q_bhmsd.unflatten(1, (num_kv_heads, -1)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)


def _from_rows(rows: Tensor, num_queries: int) -> Tensor:
    """Invert `_rows`: [B, Hkv, S, R*M, ...] -> [B, H, M, S, ...]."""
    return rows.unflatten(3, (-1, num_queries)).movedim(2, 4).flatten(1, 2)


def _own_scores(q_rows: Tensor, k_bhskd: Tensor, num_queries: int, scale: float, causal: bool) -> Tensor:
    """Compute scores [B, Hkv, S, R*M, K] of the last M masks; if causal, mask j sees masks 1..j, the rest is -inf."""
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
    """Reshape [B, H, M, S] -> [B, Hkv, S, R*M, 1]."""
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
    """Return the gradient of part (b)'s queries [B, H, M, S, Dh]; write those of the masks' keys and values."""
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


# ---- part (a): causal attention with its log-sum-exp, by the kernels that torch has ----


@dataclass(frozen=True)
class _Past:
    """Attention to the real past (part a) of the last Q of 1 + `num_masks` depths, folded in heads [B, H*Q, S, Dh]."""

    query_depths: int
    num_masks: int
    scale: float
    documents: Documents | None
    window: int | None

    def forward(self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return output, log-sum-exp [B, H*Q, S] in fp32 (fp64 for fp64), and other tensors for the backward."""
        if self.window is None:
            return _causal_forward(q_bhsd, k_bhsd, v_bhsd, self.scale, self.documents)
        by_depth = [
            _causal_forward(q.contiguous(), k_bhsd, v_bhsd, self.scale, self.documents, tokens)
            for q, tokens in zip(self._of_depths(q_bhsd), self._windows, strict=True)
        ]
        outs, lses, saved = zip(*by_depth, strict=True)
        return self._folded(outs), self._folded(lses), [tensor for there in saved for tensor in there]

    def backward(
        self,
        grad_out: Tensor,
        q_bhsd: Tensor,
        k_bhsd: Tensor,
        v_bhsd: Tensor,
        out: Tensor,
        lse: Tensor,
        saved: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of queries, keys and values, given the merged output and log-sum-exp."""
        if self.window is None:
            return _causal_backward(grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse, saved, self.scale, self.documents)
        grads_q, grads_k, grads_v = [], [], []
        each = len(saved) // self.query_depths
        parts = zip(*(self._of_depths(part) for part in (grad_out, q_bhsd, out, lse)), self._windows, strict=True)
        for number, (grad, q, o, sums, tokens) in enumerate(parts):
            rest = saved[number * each : (number + 1) * each]
            grad, q, o, sums = (part.contiguous() for part in (grad, q, o, sums))
            grads = _causal_backward(grad, q, k_bhsd, v_bhsd, o, sums, rest, self.scale, self.documents, tokens)
            grads_q.append(grads[0])
            grads_k.append(grads[1])
            grads_v.append(grads[2])
        return self._folded(grads_q), torch.stack(grads_k).sum(0), torch.stack(grads_v).sum(0)

    @property
    def _windows(self) -> list[int]:
        """Return, for each depth that has queries, how many real tokens they see, back from the group's newest."""
        assert self.window is not None
        first = 1 + self.num_masks - self.query_depths
        return [self.window - depth for depth in range(first, first + self.query_depths)]

    def _of_depths(self, folded: Tensor) -> tuple[Tensor, ...]:
        """Split heads [B, H*Q, ...] into the Q depths, [B, H, ...] each."""
        return folded.unflatten(1, (-1, self.query_depths)).unbind(2)

    @staticmethod
    def _folded(by_depth: Sequence[Tensor]) -> Tensor:
        """Fold tensors of the depths, [B, H, ...] each, into the heads [B, H*Q, ...]."""
        return torch.stack(list(by_depth), dim=2).flatten(1, 2)


def _causal_forward(
    q_bhsd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    scale: float,
    documents: Documents | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attend causally, grouped queries, within each document if there are several, to the last `window` keys or all.

    Returns:
        Output [B, H, S, Dh], log-sum-exp [B, H, S] in fp32 (fp64 for fp64), and other tensors for the backward.

    Raises:
        UserError: No kernel supports this device or dtype.
    """
    if documents is None:
        return _forward(q_bhsd, k_bhsd, v_bhsd, scale, window)
    if _has_flash(q_bhsd):
        return _packed_forward(q_bhsd, k_bhsd, v_bhsd, scale, documents, window)
    outs, lses, saved = [], [], []
    for q, k, v in _by_document(documents, q_bhsd, k_bhsd, v_bhsd):
        out, lse, saved_there = _forward(q, k, v, scale, window)
        outs.append(out)
        lses.append(lse)
        saved += saved_there
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2), saved


def _causal_backward(
    grad_out: Tensor,
    q_bhsd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: list[Tensor],
    scale: float,
    documents: Documents | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of queries, keys and values, given the merged output and log-sum-exp."""
    if documents is None:
        return _backward(grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse, saved, scale, window)
    if _has_flash(q_bhsd):
        return _packed_backward(grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse, saved, scale, documents, window)
    parts = _by_document(documents, grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse)
    each = len(saved) // len(parts)
    grads = [
        _backward(grad, q, k, v, o, sums, saved[number * each : (number + 1) * each], scale, window)
        for number, (grad, q, k, v, o, sums) in enumerate(parts)
    ]
    grad_q, grad_k, grad_v = (torch.cat(part, dim=2) for part in zip(*grads, strict=True))
    return grad_q, grad_k, grad_v


@functools.lru_cache(maxsize=16)
def _lengths(bounds_d: Tensor) -> list[int]:
    """Return the tokens of each document. Waits for the device, once for all layers."""
    return bounds_d.diff().tolist()


def _by_document(documents: Documents, *parts: Tensor) -> list[Any]:
    """Return the parts' slices of each document that is not empty."""
    slices = zip(*(part.split(_lengths(documents[0]), dim=2) for part in parts), strict=True)
    return [there for there in slices if there[0].shape[2] > 0]


def _has_flash(q_bhsd: Tensor) -> bool:
    """Return True if the flash kernel for CUDA takes these queries: half precision, on Ampere and later."""
    is_half = q_bhsd.dtype in (torch.float16, torch.bfloat16) and q_bhsd.shape[-1] % 8 == 0
    return q_bhsd.device.type == "cuda" and is_half and _is_ampere(q_bhsd.device)


def _efficient_dtype(q_bhsd: Tensor) -> torch.dtype:
    """Return the dtype for the memory-efficient kernel, which has no bfloat16 before Ampere."""
    return torch.float32 if q_bhsd.dtype == torch.bfloat16 and not _is_ampere(q_bhsd.device) else q_bhsd.dtype


def _is_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


# ---- one sequence in each row of the batch ----


def _forward(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run causal attention of each row of the batch, with the device's fused kernel.

    Returns:
        The output, the logsumexp of the scores, and what `_backward` needs besides: the kernel's random state.

    Raises:
        UserError: The device has no kernel for this dtype or a window.
    """
    if q_bhsd.device.type == "cpu":
        if window is not None:
            return *_chunked_forward(q_bhsd, k_bhsd, v_bhsd, scale, window), []
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q_bhsd, k_bhsd, v_bhsd, 0.0, True, scale=scale)
        return out, lse, []
    if q_bhsd.device.type != "cuda" or q_bhsd.dtype == torch.float64:
        raise UserError(
            f"attention backend `folded` runs on CPU and CUDA up to fp32, not on {q_bhsd.device.type} in "
            f"{q_bhsd.dtype}: use drafter.options.attention=dense"
        )
    if window is not None and not _has_flash(q_bhsd):
        raise UserError(
            f"attention backend `folded` has no window on {q_bhsd.device.type} in {q_bhsd.dtype}, only in half "
            "precision on Ampere and later: use drafter.options.attention=flex"
        )
    if window is not None:
        q, k, v = (_one_after_the_other(part) for part in (q_bhsd, k_bhsd, v_bhsd))
        out, lse, saved = _packed_forward(q, k, v, scale, _as_documents(q_bhsd), window)
        return _row_by_row(out, len(q_bhsd)), _row_by_row(lse, len(q_bhsd)), saved
    k_bhsd, v_bhsd = (_repeat_heads(part, q_bhsd.shape[1]) for part in (k_bhsd, v_bhsd))
    if _has_flash(q_bhsd):
        out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q_bhsd, k_bhsd, v_bhsd, 0.0, True, scale=scale
        )
        return out, lse, [seed, offset]
    dtype = _efficient_dtype(q_bhsd)
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
        q_bhsd.to(dtype), k_bhsd.to(dtype), v_bhsd.to(dtype), None, True, 0.0, True, scale=scale
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
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given `_forward`'s results `out`, `lse` and `saved`."""
    if q_bhsd.device.type == "cpu":
        if window is not None:
            return _chunked_backward(grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse, scale, window)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse, 0.0, True, scale=scale
        )
    if window is not None:
        rows = _as_documents(q_bhsd)
        grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse = map(
            _one_after_the_other, (grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse)
        )
        grads = _packed_backward(grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse, saved, scale, rows, window)
        grad_q, grad_k, grad_v = (_row_by_row(grad, len(rows[0]) - 1) for grad in grads)
        return grad_q, grad_k, grad_v
    num_kv_heads, length = k_bhsd.shape[1], q_bhsd.shape[2]
    k_bhsd, v_bhsd = (_repeat_heads(part, q_bhsd.shape[1]) for part in (k_bhsd, v_bhsd))
    if _has_flash(q_bhsd):
        lse = lse.contiguous()  # the kernel ignores strides
        grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_backward(
            grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse, None, None, length, length, 0.0, True, *saved, scale=scale
        )
    else:
        # The kernel reads its log-sum-exp in blocks of 32 rows.
        padded_lse = F.pad(lse, (0, -length % 32), value=float("inf"))
        dtype = _efficient_dtype(q_bhsd)
        grad_out, q, k, v, out = (part.to(dtype) for part in (grad_out, q_bhsd, k_bhsd, v_bhsd, out))
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, k, v, None, out, padded_lse, *saved, 0.0, [True] * 3 + [False], True, scale=scale
        )
        grad_q, grad_k, grad_v = (grad.to(q_bhsd.dtype) for grad in grads[:3])
    grad_k, grad_v = (part.unflatten(1, (num_kv_heads, -1)).sum(2) for part in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


def _repeat_heads(part_bhsd: Tensor, num_heads: int) -> Tensor:
    return part_bhsd.repeat_interleave(num_heads // part_bhsd.shape[1], dim=1)


# ---- a window, on a CPU: chunks of its length, each of which sees itself and the one before it ----


def _chunked_forward(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Run attention with a window on a CPU: each chunk of `window` queries sees itself and the chunk before."""
    q, k, v = _chunks(q_bhsd, window), *(_with_chunk_before(_chunks(part, window)) for part in (k_bhsd, v_bhsd))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *(part.flatten(0, 1) for part in (q, k, v)), 0.0, False, attn_mask=_chunk_mask(q, window), scale=scale
    )
    length = q_bhsd.shape[2]
    return _whole(out.unflatten(0, q.shape[:2]), length), _whole(lse.unflatten(0, q.shape[:2]), length)


def _chunked_backward(
    grad_out: Tensor,
    q_bhsd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of `_chunked_forward`."""
    length = q_bhsd.shape[2]
    grad, q, o, sums = (_chunks(part, window) for part in (grad_out, q_bhsd, out, lse))
    k, v = (_with_chunk_before(_chunks(part, window)) for part in (k_bhsd, v_bhsd))
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(part.flatten(0, 1) for part in (grad, q, k, v, o)),
        sums.flatten(0, 1).contiguous(),
        0.0,
        False,
        attn_mask=_chunk_mask(q, window),
        scale=scale,
    )
    grad_q, grad_k, grad_v = (part.unflatten(0, q.shape[:2]) for part in grads)
    return _whole(grad_q, length), _whole(_as_own(grad_k), length), _whole(_as_own(grad_v), length)


def _chunks(part: Tensor, size: int) -> Tensor:
    """Split [B, H, S, ...] into chunks [B, n, H, size, ...], with zeros after the end."""
    padding = (0, 0) * (part.dim() - 3) + (0, -part.shape[2] % size)
    return F.pad(part, padding).unflatten(2, (-1, size)).movedim(2, 1)


def _whole(chunks: Tensor, length: int) -> Tensor:
    """Undo `_chunks`."""
    return chunks.movedim(1, 2).flatten(2, 3)[:, :, :length]


def _with_chunk_before(chunks: Tensor) -> Tensor:
    """Prepend to each chunk the one before: [B, n, H, C, Dh] -> [B, n, H, 2C, Dh], zeros before the first."""
    before = torch.cat([torch.zeros_like(chunks[:, :1]), chunks[:, :-1]], dim=1)
    return torch.cat([before, chunks], dim=3)


def _as_own(grads: Tensor) -> Tensor:
    """Sum gradients [B, n, H, 2C, Dh] of `_with_chunk_before` into those of chunks [B, n, H, C, Dh]."""
    before, own = grads.chunk(2, dim=3)
    own = own.clone()
    own[:, :-1] += before[:, 1:]
    return own


def _chunk_mask(q_bnhcd: Tensor, window: int) -> Tensor:
    """Build a mask [B*n, 1, C, 2C]: 0 where a query sees a key of its chunk or the one before, -inf elsewhere."""
    batch, count = q_bnhcd.shape[:2]
    query, key = (torch.arange(size, device=q_bnhcd.device) for size in (window, 2 * window))
    key = key - window
    hidden = (key > query[:, None]) | (key <= query[:, None] - window)
    mask = torch.zeros(count, 1, *hidden.shape, dtype=q_bnhcd.dtype, device=q_bnhcd.device)
    mask.masked_fill_(hidden, float("-inf"))
    mask[0, ..., :window] = float("-inf")
    return mask.repeat(batch, 1, 1, 1)


# ---- documents one after the other, by the variable-length kernel, which groups query heads itself ----


def _packed_forward(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, scale: float, documents: Documents, window: int | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run flash attention over documents that lie one after the other in one row; returns as `_forward`."""
    bounds, longest = documents
    q_thd, k_thd, v_thd = (part[0].transpose(0, 1) for part in (q_bhsd, k_bhsd, v_bhsd))
    out_thd, lse_ht, rng_state, unused, _ = aten._flash_attention_forward(
        q_thd, k_thd, v_thd, bounds, bounds, longest, longest, 0.0, True, False, **_options_of_flash(scale, window)
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
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of `_packed_forward`."""
    bounds, longest = documents
    parts_thd = [part[0].transpose(0, 1) for part in (grad_out, q_bhsd, k_bhsd, v_bhsd, out)]
    grads_thd = aten._flash_attention_backward(
        *parts_thd, lse[0], bounds, bounds, longest, longest, 0.0, True, *saved, **_options_of_flash(scale, window)
    )
    grad_q, grad_k, grad_v = (grad.transpose(0, 1).unsqueeze(0) for grad in grads_thd)
    return grad_q, grad_k, grad_v


def _options_of_flash(scale: float, window: int | None) -> dict[str, Any]:
    """Return the flash kernel's named arguments; its window does not count a query's own key."""
    return {"scale": scale} | ({} if window is None else {"window_size_left": window - 1, "window_size_right": 0})


def _as_documents(q_bhsd: Tensor) -> Documents:
    """Return the rows of a batch as documents, since only that kernel takes a window."""
    batch, length = len(q_bhsd), q_bhsd.shape[2]
    bounds_d = torch.arange(batch + 1, device=q_bhsd.device, dtype=torch.int32) * length
    return bounds_d, length


def _one_after_the_other(part: Tensor) -> Tensor:
    """Join the sequences, [B, H, S, ...] -> [1, H, B*S, ...]."""
    return part.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _row_by_row(part: Tensor, batch: int) -> Tensor:
    """Split the sequences, [1, H, B*S, ...] -> [B, H, S, ...]."""
    return part[0].unflatten(1, (batch, -1)).transpose(0, 1)
