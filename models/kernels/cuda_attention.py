"""Attention of a few rows over a long KV cache on CUDA, split over the keys (flash decoding), as one Triton kernel.

transformers' `sdpa` repeats keys and values for every query head whenever there is a mask, and torch's kernel then has
one block a query head: 9 blocks on a GPU of 132 multiprocessors for SmolLM2, which was 70 % of a step's kernel time
(docs/measured/gpu.md). Here the query heads that share a key-value head are rows of one block, nothing is repeated, and
every `SPLIT` columns are a separate block; a second kernel merges the splits by their log-sum-exp. Keys and values of
`COLUMNS` columns that the mask closes to all rows of a block are not read: a CUDA graph is recorded once, over all of a
cache's capacity, and costs what the columns in use cost.

Shapes: H query heads, Hkv key-value heads, N rows, C columns of the cache, D head size. In a kernel: M = N H / Hkv rows
of one key-value head, row m being node m // group and query head m % group of the group.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MOST_ROWS = 64  # of a draft tree; beyond it, as in a prompt, torch's own attention has enough blocks
SPLIT, COLUMNS = 128, 64  # columns of a split, and of one product in it
LEAST_SPLITS = 16  # of a merge: it is compiled again for every further power of two
LEAST_HEAD_SIZE, MOST_HEAD_SIZE = 16, 256
LOWEST_SCORE = -3.0e38  # of columns beyond the cache: weight 0, and finite, since infinite scores would give NaN
CLOSED = -6.0e4  # what a mask adds to a hidden column is below this, in float16 too
TOLERANCE = 2e-2  # of the first check against torch, in bf16

logger = logging.getLogger(__name__)


def _power_of_two(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN's attention, torch's choice on Hopper: it plans again for every new length, 0.1 s each time."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """Define the two kernels, where Triton is installed."""
    import triton
    import triton.language as tl

    # Numbers that change from round to round: kernels for 1 and for multiples of 16 would be compiled within an answer,
    # which took 1.1 of the 1.4 s of 122 drafts of `parallel` on an H200.
    @triton.jit(do_not_specialize=["mask_row", "nodes", "columns", "splits"])
    def partial_attention(  # type: ignore[no-untyped-def]
        q_ptr, k_ptr, v_ptr, mask_ptr, parts_ptr,
        q_head, q_row, k_head, k_column, v_head, v_column, mask_row,
        scale, nodes, columns, splits,
        GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_C: tl.constexpr, SPLIT_C: tl.constexpr, HAS_MASK: tl.constexpr, LOWEST_SCORE: tl.constexpr,
        HIDDEN: tl.constexpr,
    ):  # fmt: skip
        """Write sum(p v), max(s) and sum(p) of one split of the columns, of one key-value head and block of rows."""
        kv_head, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        node, head = row // GROUP, kv_head * GROUP + row % GROUP
        is_row, is_d = node < nodes, d < D
        q = tl.load(
            q_ptr + head[:, None] * q_head + node[:, None] * q_row + d[None, :],
            mask=is_row[:, None] & is_d[None, :], other=0.0,
        )  # fmt: skip
        largest = tl.full([BLOCK_M], LOWEST_SCORE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(0, SPLIT_C, BLOCK_C):
            column = split * SPLIT_C + start + tl.arange(0, BLOCK_C)
            is_column = column < columns
            bias = tl.where(is_row[:, None] & is_column[None, :], 0.0, LOWEST_SCORE)
            if HAS_MASK:
                seen = is_row[:, None] & is_column[None, :]
                bias = tl.load(mask_ptr + node[:, None] * mask_row + column[None, :], mask=seen, other=LOWEST_SCORE)
                bias = bias.to(tl.float32)
            if tl.max(tl.max(bias, 1), 0) > HIDDEN:
                here = is_column[:, None] & is_d[None, :]
                k = tl.load(k_ptr + kv_head * k_head + column[:, None] * k_column + d[None, :], mask=here, other=0.0)
                s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + bias
                s = tl.where(is_column[None, :], tl.maximum(s, LOWEST_SCORE), LOWEST_SCORE)
                new_largest = tl.maximum(largest, tl.max(s, 1))
                p = tl.exp(s - new_largest[:, None])
                shrink = tl.exp(largest - new_largest)
                v = tl.load(v_ptr + kv_head * v_head + column[:, None] * v_column + d[None, :], mask=here, other=0.0)
                out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
                total = total * shrink + tl.sum(p, 1)
                largest = new_largest
        place = (kv_head * splits + split) * nodes * GROUP + row
        max_ptr = parts_ptr + tl.num_programs(0) * splits * nodes * GROUP * D
        sum_ptr = max_ptr + tl.num_programs(0) * splits * nodes * GROUP
        tl.store(parts_ptr + place[:, None] * D + d[None, :], out, mask=is_row[:, None] & is_d[None, :])
        tl.store(max_ptr + place, largest, mask=is_row)
        tl.store(sum_ptr + place, total, mask=is_row)

    @triton.jit(do_not_specialize=["nodes", "splits"])
    def merge_splits(  # type: ignore[no-untyped-def]
        parts_ptr, result_ptr, nodes, splits,
        GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
        LOWEST_SCORE: tl.constexpr,
    ):  # fmt: skip
        """Merge the splits of one row of one key-value head: result [N, H, D]."""
        kv_head, row = tl.program_id(0), tl.program_id(1)
        split, d = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_D)
        is_split, is_d = split < splits, d < D
        place = (kv_head * splits + split) * nodes * GROUP + row
        max_ptr = parts_ptr + tl.num_programs(0) * splits * nodes * GROUP * D
        sum_ptr = max_ptr + tl.num_programs(0) * splits * nodes * GROUP
        largest = tl.load(max_ptr + place, mask=is_split, other=LOWEST_SCORE)
        weight = tl.where(is_split, tl.exp(largest - tl.max(largest, 0)), 0.0)
        total = tl.sum(weight * tl.load(sum_ptr + place, mask=is_split, other=0.0), 0)
        parts = tl.load(
            parts_ptr + place[:, None] * D + d[None, :], mask=is_split[:, None] & is_d[None, :], other=0.0
        )  # fmt: skip
        result = tl.sum(parts * weight[:, None], 0) / total
        heads = tl.num_programs(0) * GROUP
        head = (row // GROUP) * heads + kv_head * GROUP + row % GROUP
        tl.store(result_ptr + head * D + d, result.to(result_ptr.dtype.element_ty), mask=is_d)

    return partial_attention, merge_splits


def split_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend with N query rows of one sequence to the C columns of its KV cache: softmax(scale q k' + mask) v.

    Args:
        query: [1, H, N, D], of H query heads of size D.
        key, value: [1, Hkv, C, D], of Hkv key-value heads, contiguous in D.
        mask: [1, 1, N, C], added to the scores, contiguous in C. Every row must see a column. None: rows see all.

    Returns:
        [1, N, H, D], contiguous.
    """
    if torch.compiler.is_compiling():
        result: Tensor = _split_attention(query, key, value, mask, scale)
        return result
    # Uncompiled, nothing needs the operator, and calling it takes as long as a launch.
    return _launch(query, key, value, mask, scale)


def _launch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    partial_attention, merge_splits = _kernels()
    (_, heads, nodes, head_size), (kv_heads, columns) = query.shape, key.shape[1:3]
    group, splits = heads // kv_heads, -(-columns // SPLIT)
    rows = nodes * group
    block_d = max(LEAST_HEAD_SIZE, _power_of_two(head_size))
    block_m = min(64, max(16, _power_of_two(rows)))
    # sum(p v) of every split, head and row, then all max(s), then all sum(p).
    parts = query.new_empty(kv_heads * splits * rows * (head_size + 2), dtype=torch.float32)
    result = query.new_empty(1, nodes, heads, head_size)
    shared = {"GROUP": group, "D": head_size, "BLOCK_D": block_d, "LOWEST_SCORE": LOWEST_SCORE}
    partial_attention[(kv_heads, splits, -(-rows // block_m))](
        query, key, value, key if mask is None else mask, parts,
        query.stride(1), query.stride(2), key.stride(1), key.stride(2), value.stride(1), value.stride(2),
        0 if mask is None else mask.stride(2), scale, nodes, columns, splits,
        BLOCK_M=block_m, BLOCK_C=COLUMNS, SPLIT_C=SPLIT, HAS_MASK=mask is not None, HIDDEN=CLOSED, **shared,
    )  # fmt: skip
    block_splits = max(LEAST_SPLITS, _power_of_two(splits))
    merge_splits[(kv_heads, rows)](parts, result, nodes, splits, BLOCK_SPLITS=block_splits, **shared)
    return result


@torch.library.custom_op("draftsmith::split_attention", mutates_args=())
def _split_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return _launch(query, key, value, mask, scale)


@_split_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


def can_split(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return True if `split_attention` supports these tensors, given as its arguments of the same names."""
    batch, heads, rows, head_size = query.shape
    parts = (query, key, value)
    return (
        batch == 1
        and rows <= MOST_ROWS
        and (rows == 1 or mask is not None)
        and not torch.is_grad_enabled()
        and LEAST_HEAD_SIZE <= head_size <= MOST_HEAD_SIZE
        and heads % key.shape[1] == 0
        and all(part.dtype == query.dtype and part.shape[3] == head_size and part.stride(3) == 1 for part in parts)
        and (
            mask is None
            or (mask.dtype != torch.bool and mask.shape == (1, 1, rows, key.shape[2]) and mask.stride(3) == 1)
        )
    )


@functools.cache
def has_split_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the kernels of split attention compile on this device and agree with torch's attention there.

    They are compared once a process; if they fail, a warning says why, and torch's own attention is used.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    query, key, value = (torch.randn(1, heads, size, 64, device=device, dtype=dtype) for heads, size in SAMPLE)
    mask = torch.zeros(1, 1, query.shape[2], key.shape[2], device=device, dtype=dtype)
    mask[..., -query.shape[2] :].fill_(torch.finfo(dtype).min)
    try:
        with torch.no_grad():
            result = split_attention(query, key, value, mask, 0.125).transpose(1, 2)
            expected = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.125, enable_gqa=True)
        difference = float((result.float() - expected.float()).abs().max())
    except Exception as error:  # Triton's own kinds, a missing C compiler, CUDA's
        first_line = next(iter(str(error).splitlines()), "")
        reason = f"{type(error).__name__}: {first_line[:200]}"
    else:
        if difference <= TOLERANCE:
            return True
        reason = f"a result differs from torch's by {difference:.2g}"
    logger.warning("attention by Triton is not used on %s (%s); a step takes longer", device, reason)
    return False


SAMPLE = ((6, 5), (2, 300), (2, 300))  # heads, and rows or columns, of query, key and value
