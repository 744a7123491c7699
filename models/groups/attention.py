"""Group-wise attention for parallel drafters (arXiv 2410.05589, section 4.1), without an [S(K+1), S(K+1)] mask.

The sequence is held as G = K+1 *depths* of length S: depth 0 the real tokens, depth j all the [MASK]_j. Depth 0 at
position t is the real token x_t; depths 1..K at t are the masks of its group. A query of depth j at t attends to

    (a) the depth-0 keys at positions <= t, which is the same causal attention for every depth, and
    (b) the keys of depths 1..j at its own position t; or, where groups are not `causal`, of all of 1..K.

ParallelSpec's masks are the first kind of (b): each of them could be drafted without those after it. DFlash's blocks
(arXiv 2602.06036) are the second: a block's rows are denoised together, so every one sees every other.

Queries may be those of the last depths only, where the depths are computed one after the other because each reads
what the one before it gave (EAGLE-3's training-time test, arXiv 2503.01840): the keys are of all depths so far.

Three backends compute the same thing:

* `dense`: materialises the boolean mask. The reference that every test compares with; quadratic memory.
* `folded`: (a) folds the depths into the head axis, as grouped-query heads over the depth-0 keys, and calls the flash
  kernel once; (b) is an M x K product per position; the two merge by their log-sum-exp. The backward of (a) is the
  flash backward called with the *merged* output and log-sum-exp (as in ring attention, arXiv 2310.01889), because
  dS = P * (dP - rowsum(dO * O)) only needs P normalised by the merged sum. Exact; memory linear in S. In half
  precision (b) is computed in fp32 both ways, under autocast too.
* `flex`: FlexAttention with a block mask, CUDA only (torch has no FlexAttention backward on CPU).

Packed documents on a CUDA device are one call of the variable-length flash kernel, however many they are. Where that
does not run (on a CPU, in fp32, before sm80) there is one call for each document.

Shapes: B batch, H query heads, Hkv key/value heads (H = Hkv * R), G depths, Q <= G depths with queries, K = G-1
masks, M = min(Q, K) masks with queries, S positions, Dh head size; T positions of packed documents, B = 1.
"""

import functools
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.groups.rows import Documents, Grid
from draftsmith.recipes.errors import UserError

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
    """transformers' attention interface, by which it is registered for the layers of drafters.

    It hands queries [1, H, N, Dh], keys and values to the object that the forward was given, whose method `attend`
    gives [1, N, H, Dh]: `GroupAttention` in training, `CachedAttention` over a KV cache in decoding.
    """
    if cached_attention is None:
        raise ValueError("the drafter's layers need `cached_attention`")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cached_attention.attend(module.layer_idx, query, key, value, scale), None


class GroupAttention:
    """Group attention over packed rows: of all depths together, or of some after those that they attend to.

    Args:
        backend: As in `group_attention`.
        grid: The rows' grid, of all depths or of the first ones.
        causal: Whether a row sees only the earlier ones of its own group.
        keeps: Whether rows of further depths follow, which attend to the keys and values of these.
    """

    def __init__(self, backend: str, grid: Grid, causal: bool = True, keeps: bool = False) -> None:
        self._backend, self._grid, self._causal, self._keeps = backend, grid, causal, keeps
        self._earlier = dict[int, list[tuple[Tensor, Tensor]]]()

    def add(self, layer_index: int, k_bhnd: Tensor, v_bhnd: Tensor) -> None:
        """Keys and values [1, Hkv, N, Dh] that further depths attend to, of rows without a query."""
        self._earlier.setdefault(layer_index, []).append((self._grid.to_grid(k_bhnd), self._grid.to_grid(v_bhnd)))

    def go_on(self, grid: Grid) -> None:
        """Go on with the rows of the next depths, on a grid of these alone."""
        self._grid = grid

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """[1, N, H, Dh] for queries [1, H, N, Dh], keys and values [1, Hkv, N, Dh]."""
        grid = self._grid
        keys_values = [*self._earlier.get(layer_index, []), (grid.to_grid(k_bhrd), grid.to_grid(v_bhrd))]
        if self._keeps:
            self._earlier[layer_index] = keys_values
        k_bhgsd, v_bhgsd = (
            parts[-1] if len(parts) == 1 else torch.cat([part.to(parts[-1].dtype) for part in parts], dim=2)
            for parts in zip(*keys_values, strict=True)
        )
        q_bhqsd = grid.to_grid(q_bhrd)
        out = group_attention(q_bhqsd, k_bhgsd, v_bhgsd, self._backend, scale, grid.documents, self._causal)
        return grid.from_grid(out)


def group_attention(
    q_bhqsd: Tensor,
    k_bhgsd: Tensor,
    v_bhgsd: Tensor,
    backend: str = "folded",
    scale: float | None = None,
    documents: Documents | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention of every depth to the real past and to the masks of its own group, the earlier ones or all.

    Args:
        q_bhqsd: [B, H, Q, S, Dh] of the last Q depths, already rotated.
        k_bhgsd: [B, Hkv, G, S, Dh], already rotated; Hkv divides H.
        v_bhgsd: [B, Hkv, G, S, Dh].
        backend: `folded`, `dense` or `flex`.
        scale: Factor on the scores; 1/sqrt(Dh) by default.
        documents: Of which the S positions consist, if of several that do not see each other.
        causal: Whether a mask sees only the earlier ones of its own group.

    Returns:
        [B, H, Q, S, Dh].

    Raises:
        UserError: Unknown backend, or one that this device cannot run.
    """
    scale = q_bhqsd.shape[-1] ** -0.5 if scale is None else scale
    # Under autocast RoPE leaves queries and keys in fp32 beside values in half precision; kernels want one dtype.
    q_bhqsd, k_bhgsd = q_bhqsd.to(v_bhgsd.dtype), k_bhgsd.to(v_bhgsd.dtype)
    if backend == "folded":
        return _FoldedGroupAttention.apply(q_bhqsd, k_bhgsd, v_bhgsd, scale, documents, causal)
    if backend not in BACKENDS:
        raise UserError(f"unknown attention backend `{backend}`: use one of {', '.join(BACKENDS)}")
    device, query_depths, num_depths, length = q_bhqsd.device, q_bhqsd.shape[2], *k_bhgsd.shape[2:4]
    q_bhtd, k_bhtd, v_bhtd = (part.flatten(2, 3) for part in (q_bhqsd, k_bhgsd, v_bhgsd))
    if backend == "dense":
        mask = group_mask(num_depths, length, device, causal)
        if documents is not None:
            number_gs = documents.numbers(length).repeat(num_depths)
            mask &= number_gs[:, None] == number_gs
        mask = mask[-query_depths * length :]
        out = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, mask, scale=scale, enable_gqa=True)
    elif device.type != "cuda":
        raise UserError(
            f"attention backend `flex` needs a CUDA device, not {device.type} (FlexAttention has no backward there): "
            "use drafter.options.attention=folded"
        )
    else:
        block_mask = _flex_block_mask(query_depths, num_depths, length, device, causal, documents)
        out = _compiled_flex("flex_attention")(
            q_bhtd, k_bhtd, v_bhtd, block_mask=block_mask, scale=scale, enable_gqa=q_bhtd.shape[1] != k_bhtd.shape[1]
        )
    return out.unflatten(2, (query_depths, length))


def group_mask(num_depths: int, length: int, device: torch.device | str = "cpu", causal: bool = True) -> Tensor:
    """[G*S, G*S] booleans, True where the query (row) may see the key (column); index = depth * S + position."""
    index = torch.arange(num_depths * length, device=device)
    return _may_see(index[:, None], index[None, :], length, causal)


def _may_see(query: Tensor, key: Tensor, length: int, causal: bool) -> Tensor:
    query_depth, query_position = query // length, query % length
    key_depth, key_position = key // length, key % length
    real_past = (key_depth == 0) & (key_position <= query_position)
    is_seen = (key_depth <= query_depth) if causal else (query_depth >= 1)
    return real_past | ((key_depth >= 1) & is_seen & (key_position == query_position))


@functools.cache
def _compiled_flex(function: Literal["flex_attention", "create_block_mask"]) -> Any:
    """Uncompiled they hold a value for each query and key: of a mask 25 GiB for five depths of 32k."""
    from torch.nn.attention import flex_attention

    return torch.compile(getattr(flex_attention, function))


@functools.lru_cache(maxsize=16)
def _flex_block_mask(
    query_depths: int, num_depths: int, length: int, device: torch.device, causal: bool, documents: Documents | None
) -> Any:
    first_query = (num_depths - query_depths) * length
    document_s = None if documents is None else documents.numbers(length)

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = _may_see(query + first_query, key, length, causal)
        return seen if document_s is None else seen & (document_s[query % length] == document_s[key % length])

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
    ) -> Tensor:
        query_depths, num_masks = q_bhqsd.shape[2], k_bhgsd.shape[2] - 1
        # The depths of one query head are neighbours on the head axis: grouped-query heads of one key head.
        q_folded = q_bhqsd.flatten(1, 2)
        out_folded, lse_folded, saved = _causal_forward(q_folded, k_bhgsd[:, :, 0], v_bhgsd[:, :, 0], scale, documents)
        if num_masks > 0:
            masks = slice(-min(query_depths, num_masks), None)
            q, out, lse = (part.unflatten(1, (-1, query_depths)) for part in (q_folded, out_folded, lse_folded))
            with torch.autocast(q.device.type, enabled=False):  # fp32 products here, as in the backward
                _merge_own_group(out[:, :, masks], lse[:, :, masks], q[:, :, masks], k_bhgsd, v_bhgsd, scale, causal)
        ctx.save_for_backward(q_folded, k_bhgsd, v_bhgsd, out_folded, lse_folded, *saved)
        ctx.scale, ctx.query_depths, ctx.documents, ctx.causal = scale, query_depths, documents, causal
        return out_folded.unflatten(1, (-1, query_depths))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out_bhqsd,) = grad_outputs
        q_folded, k_bhgsd, v_bhgsd, out_folded, lse_folded, *saved = ctx.saved_tensors
        query_depths, num_masks = ctx.query_depths, k_bhgsd.shape[2] - 1
        grad_q_folded, grad_k0_bhsd, grad_v0_bhsd = _causal_backward(
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
        grad_q = grad_q_folded.unflatten(1, (-1, query_depths))
        if num_masks == 0:
            return grad_q, grad_k0_bhsd.unsqueeze(2), grad_v0_bhsd.unsqueeze(2), None, None, None
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
        return grad_q, grad_k, grad_v, None, None, None


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


# ---- part (a): causal attention with its log-sum-exp, by the kernels that torch has ----


def _causal_forward(
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


def _by_document(documents: Documents, *parts: Tensor) -> list[Any]:
    """Slices along the positions, of each document that has any."""
    slices = zip(*(part.split(documents.lengths, dim=2) for part in parts), strict=True)
    return [there for there in slices if there[0].shape[2] > 0]


def _has_flash(q_bhsd: Tensor) -> bool:
    """Whether the flash kernel for CUDA takes these queries: half precision, on Ampere and later."""
    is_half = q_bhsd.dtype in (torch.float16, torch.bfloat16) and q_bhsd.shape[-1] % 8 == 0
    return q_bhsd.device.type == "cuda" and is_half and _is_ampere(q_bhsd.device)


def _efficient_dtype(q_bhsd: Tensor) -> torch.dtype:
    """The dtype for the memory-efficient kernel, which has no bfloat16 before Ampere."""
    return torch.float32 if q_bhsd.dtype == torch.bfloat16 and not _is_ampere(q_bhsd.device) else q_bhsd.dtype


def _is_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


# ---- one sequence in each row of the batch ----


def _forward(q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, scale: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    if q_bhsd.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q_bhsd, k_bhsd, v_bhsd, 0.0, True, scale=scale)
        return out, lse, []
    if q_bhsd.device.type != "cuda" or q_bhsd.dtype == torch.float64:
        raise UserError(
            f"attention backend `folded` runs on CPU and CUDA up to fp32, not on {q_bhsd.device.type} in "
            f"{q_bhsd.dtype}: use drafter.options.attention=dense"
        )
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
) -> tuple[Tensor, Tensor, Tensor]:
    if q_bhsd.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q_bhsd, k_bhsd, v_bhsd, out, lse, 0.0, True, scale=scale
        )
    num_kv_heads, length = k_bhsd.shape[1], q_bhsd.shape[2]
    k_bhsd, v_bhsd = (_repeat_heads(part, q_bhsd.shape[1]) for part in (k_bhsd, v_bhsd))
    if _has_flash(q_bhsd):
        lse = lse.contiguous()  # the kernel does not look at its strides
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


# ---- documents one after the other, by the variable-length kernel, which groups query heads itself ----


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
