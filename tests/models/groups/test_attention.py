"""Group attention: every backend equals the dense mask, values and gradients, and nothing leaks."""

from typing import Any

import pytest
import torch
from support.ghost_device import KeptTensors, ghost_device
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.models.groups.attention import _Folded, _FoldedGroupAttention, group_attention
from draftsmith.models.groups.layout import group_mask

# batch, query heads, key heads, depths, positions, head size
SHAPES = [(1, 4, 4, 5, 9, 16), (2, 4, 2, 5, 17, 8), (2, 6, 2, 3, 40, 32), (1, 2, 1, 1, 6, 8), (1, 2, 2, 2, 1, 8)]
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.1}


def random_qkv(shape: tuple[int, ...], dtype: torch.dtype, contiguous: bool = False) -> list[Tensor]:
    """Return tensors laid out as projections do, [B, G, S, H, Dh] in memory, unless `contiguous`."""
    batch, heads, kv_heads, depths, length, size = shape
    generator = torch.Generator().manual_seed(5)
    parts = [
        torch.randn(batch, depths, length, h, size, generator=generator, dtype=torch.float64).to(dtype)
        for h in (heads, kv_heads, kv_heads)
    ]
    parts = [part.permute(0, 3, 1, 2, 4) for part in parts]
    return [(part.contiguous() if contiguous else part).requires_grad_() for part in parts]


def full_mask(num_depths: int, length: int, **options: Any) -> Tensor:
    """Return the mask of all queries and keys, [G * S, G * S]."""
    place = torch.arange(num_depths * length)
    return group_mask(place[:, None], place, length, **options)


def test_mask_by_hand() -> None:
    """K=2, S=2; rows and columns in the order x_0 x_1, [M]1_0 [M]1_1, [M]2_0 [M]2_1."""
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]
    assert full_mask(3, 2).int().tolist() == expected
    blocks = [row[:2] + ([0, 0, 0, 0] if place < 2 else [1, 0, 1, 0]) for place, row in enumerate(expected)]
    blocks[3][2:], blocks[5][2:] = [0, 1, 0, 1], [0, 1, 0, 1]
    assert full_mask(3, 2, causal=False).int().tolist() == blocks
    # A window of 3 over four tokens: depth j of group t has position t + j and sees no token before t + j - 2.
    of_masks_2 = full_mask(3, 4, window=3).int()[8:, :4]
    assert of_masks_2.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert full_mask(3, 4, window=3).int()[:4, :4].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]


@pytest.mark.parametrize("backend", ["folded", "dense"])
def test_rope_under_autocast_leaves_queries_and_keys_in_fp32(backend: str) -> None:
    """With `train.bf16` the result is that of three bf16 inputs, and each gradient has its input's dtype."""
    q, k, v = random_qkv(SHAPES[1], torch.float32)
    expected = group_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), backend=backend)
    out = group_attention(q, k, v.bfloat16(), backend=backend)
    out.float().sum().backward()
    assert torch.equal(out, expected)
    assert all(part.grad is not None and part.grad.dtype == torch.float32 for part in (q, k, v))


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 6e-3), (torch.float16, 7.5e-4)])
def test_autocast_rounds_no_product_of_the_own_group(dtype: torch.dtype, bound: float, backward_inside: bool) -> None:
    """Gradients of the masks' keys and values against fp64: 0.4 % in bf16, 2 % if the scores are rounded to it."""
    parts = [2 * part.detach().to(dtype) for part in random_qkv((2, 4, 2, 5, 40, 16), torch.float64)]
    weight = torch.randn(parts[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = []
    for backend, as_dtype in (("folded", dtype), ("dense", torch.float64)):
        qkv = [part.clone().to(as_dtype).requires_grad_() for part in parts]
        with torch.autocast("cpu", dtype, enabled=backend == "folded"):
            loss = (group_attention(*qkv, backend=backend) * weight).sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        grads.append([part.grad[:, :, 1:].double() for part in qkv[1:] if part.grad is not None])
    for grad, expected in zip(*grads, strict=True):
        assert (grad - expected).norm() < bound * expected.norm()


@pytest.mark.parametrize(
    ("backend", "shape", "query_depths", "dtype", "contiguous"),
    [
        *(
            ("folded", shape, None, dtype, packed)
            for shape in SHAPES
            for dtype in TOLERANCES
            for packed in (True, False)
        ),
        *(
            (backend, shape, depths, torch.float64, False)
            for backend in ("folded", "dense")
            for shape, depths in ((SHAPES[1], 1), (SHAPES[1], 4), (SHAPES[2], 2), (SHAPES[4], 1))
        ),
    ],
)
@pytest.mark.parametrize(("causal", "wider"), [(True, None), (False, None), (True, 0), (False, 2)])
def test_every_backend_equals_dense(
    backend: str,
    shape: tuple[int, ...],
    query_depths: int | None,
    dtype: torch.dtype,
    contiguous: bool,
    causal: bool,
    wider: int | None,
) -> None:
    """Values and gradients; queries of the last depths alone give a slice of the dense result with all.

    The dense one is in fp64: in fp32 its own sums are off by up to 1.7e-5, depending on the processor.
    """
    depths, results = query_depths or shape[3], []
    window = None if wider is None else shape[3] + wider
    for last, name, used in ((shape[3], "dense", torch.float64), (depths, backend, dtype)):
        q, k, v = (part.detach().to(used).requires_grad_() for part in random_qkv(shape, dtype, contiguous))
        options: dict[str, Any] = {"scale": 0.3, "causal": causal, "window": window}
        out = group_attention(q[:, :, -last:], k, v, backend=name, **options)[:, :, -depths:]
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        (out * weight.to(used)).sum().backward()
        results.append([part.to(dtype) for part in (out.detach(), q.grad, k.grad, v.grad) if part is not None])
    assert results[0][0].shape == (shape[0], shape[1], depths, *shape[4:])
    torch.testing.assert_close(results[0], results[1], atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


LENGTHS = [3, 0, 7, 1, 6]


@pytest.mark.parametrize("backend", ["folded", "dense"])
@pytest.mark.parametrize("query_depths", [4, 1])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (False, 5)])
def test_documents_equal_separate_calls(backend: str, query_depths: int, causal: bool, window: int | None) -> None:
    """Values and gradients of consecutive documents, one of them empty, equal those of each alone by `dense`."""
    bounds_d = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    documents = bounds_d, max(LENGTHS)
    results = []
    for together in (True, False):
        q, k, v = random_qkv((1, 4, 2, 4, sum(LENGTHS), 8), torch.float64)
        parts = [q[:, :, -query_depths:], k, v]
        if together:
            options: dict[str, Any] = {"documents": documents, "causal": causal, "window": window}
            out = group_attention(*parts, backend=backend, scale=0.3, **options)
        else:
            each = zip(*(part.split(LENGTHS, dim=3) for part in parts), strict=True)
            options = {"causal": causal, "window": window}
            outs = [group_attention(*there, backend="dense", scale=0.3, **options) for there in each]
            out = torch.cat(outs, dim=3)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (out * weight).sum().backward()
        results.append([out.detach(), *(part.grad for part in (q, k, v))])
    torch.testing.assert_close(results[0], results[1], atol=1e-9, rtol=1e-9)


def test_a_window_that_all_documents_fit_in_changes_no_bit() -> None:
    """The last row of the longest document, of 7 tokens, stands at 6 + 3: it sees the first from a window of 10 on."""
    documents = torch.tensor([0, *LENGTHS]).cumsum(0).int(), max(LENGTHS)
    qkv = random_qkv((1, 4, 2, 4, sum(LENGTHS), 8), torch.float32)
    out, same, other = (group_attention(*qkv, documents=documents, window=window) for window in (None, 10, 9))
    assert torch.equal(out, same)
    assert not torch.allclose(out, other)


def test_large_scores_stay_finite() -> None:
    qkv = [part.detach().mul(100).requires_grad_() for part in random_qkv((1, 2, 2, 3, 8, 8), torch.float32)]
    out = group_attention(*qkv)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(part.grad).all() for part in qkv if part.grad is not None)


@pytest.mark.parametrize(
    ("dtype", "capability", "kernel", "window"),
    [
        (torch.bfloat16, (9, 0), "packed flash", None),
        (torch.float16, (8, 0), "packed flash", None),
        (torch.float16, (7, 5), "efficient float16", None),
        (torch.bfloat16, (7, 5), "efficient float32", None),
        (torch.float32, (7, 5), "efficient float32", None),
        (torch.bfloat16, (9, 0), "packed flash", 6),
    ],
)
def test_folded_uses_the_kernel_of_the_device(
    dtype: torch.dtype, capability: tuple[int, int], kernel: str, window: int | None
) -> None:
    """Before Ampere there is no flash kernel, and no bfloat16 in the memory-efficient one; values and dtypes stay."""
    tolerance, results = TOLERANCES.get(dtype, 0.02), []
    for device in ("cpu", "cuda:0"):
        with ghost_device(capability) as ghosts, torch.no_grad():
            qkv = [part.detach().to(device) for part in random_qkv(SHAPES[1], dtype)]
            ghosts.counting = True
            kept: Any = KeptTensors()
            folded = _Folded(SHAPES[1][3], SHAPES[1][3] - 1, 0.3, None, True, window)
            out = _FoldedGroupAttention.forward(kept, *qkv, folded)
            gradients = _FoldedGroupAttention.backward(kept, out.sin())[:3]
            ghosts.counting = False
            results.append([part.cpu() for part in (out, *gradients)])
            if device != "cpu":
                assert {what for kind, what in ghosts.counts if kind == "kernel" and "backward" not in what} == {kernel}
                assert (ghosts.of("back"), ghosts.of("in")) == (0, 0)
    assert [part.dtype for part in results[1]] == [dtype] * 4
    torch.testing.assert_close(results[0], results[1], atol=tolerance, rtol=tolerance)


def test_folded_has_no_window_before_ampere() -> None:
    with ghost_device((7, 5)), torch.no_grad():
        qkv = [part.detach().to("cuda:0") for part in random_qkv(SHAPES[1], torch.float16)]
        with pytest.raises(UserError, match=r"window .*not on cuda in torch.float16.*attention=dense"):
            group_attention(*qkv, window=6)


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("shape", [(2, 4, 2, 5, 70, 64), (1, 4, 4, 5, 256, 128)])
@pytest.mark.parametrize("query_depths", [5, 1])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (False, 20)])
def test_folded_equals_dense_on_cuda(
    dtype: torch.dtype,
    tolerance: float,
    shape: tuple[int, ...],
    query_depths: int,
    causal: bool,
    window: int | None,
) -> None:
    if window and dtype == torch.float32:
        pytest.skip("`folded` has a window in half precision alone")
    results = []
    for name in ("folded", "dense"):
        q, k, v = (part.detach().cuda().requires_grad_() for part in random_qkv(shape, dtype))
        out = group_attention(q[:, :, -query_depths:], k, v, backend=name, causal=causal, window=window)
        out.square().sum().backward()
        results.append([out.detach(), *(part.grad for part in (q, k, v))])
    torch.testing.assert_close(results[0], results[1], atol=tolerance, rtol=tolerance)
