"""A low-rank term beside the LM head: values and gradients of plain autograd, in chunks, and no [N, V] tensor.

Shapes: N rows, D hidden, V vocabulary, r rank.
"""

import pytest
import torch
from support.live_memory import LiveMemory
from torch import Tensor, nn

from draftsmith.models import losses as through_head
from draftsmith.models.losses import LOSSES, LowRankLogits, TeacherRows, head_loss

N, D, V, R = 11, 5, 13, 3
Factors = list[Tensor]


def factors(dtype: torch.dtype = torch.float64) -> Factors:
    """Hidden states, the head, and the two factors beside it; then what the teacher reads."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(N, D), (V, D), (N, R), (V, R), (N, D)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [*(factor.requires_grad_() for factor in made[:4]), made[4]]


def head_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    head = nn.Linear(D, V, bias=bias is not None, dtype=weight.dtype).requires_grad_(False)
    del head.weight
    head.weight = weight
    if bias is not None:
        head.bias.copy_(bias)
    return head


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("frozen", [True, False])
def test_it_equals_plain_autograd(name: str, chunk: int, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all four factors, or of three beside a frozen head; with a bias of the head, which is added once."""
    monkeypatch.setattr(through_head, "CHUNK_ELEMENTS", chunk * V)
    hidden, weight, rows, columns, teacher = factors()
    labels_n, weights_n = torch.arange(N) % V, torch.linspace(0.1, 2, N, dtype=torch.float64)
    bias_v = torch.linspace(-1, 1, V, dtype=torch.float64)
    wanted = [hidden, rows, columns] if frozen else [hidden, weight, rows, columns]
    if frozen:
        weight = weight.detach()
    head, teacher_head = head_of(weight, bias_v), head_of(torch.randn(V, D, dtype=torch.float64))
    low_rank, taught = LowRankLogits(rows, columns), TeacherRows(teacher, torch.arange(N).flip(0))
    found = head_loss(hidden, head, labels_n, weights_n, name, taught, teacher_head, low_rank=low_rank)

    logits = hidden @ weight.T + bias_v + rows @ columns.T
    losses_n = LOSSES[name](logits, labels_n, teacher_head(teacher).flip(0))
    torch.testing.assert_close(found.losses_n, losses_n.detach())
    assert found.correct_n.tolist() == (logits.argmax(-1) == labels_n).tolist()
    expected = torch.autograd.grad((losses_n * weights_n).sum() * 2.5, wanted)
    torch.testing.assert_close(torch.autograd.grad(2.5 * found.loss, wanted), expected)
    with torch.no_grad():
        silent = head_loss(hidden, head, labels_n, weights_n, name, taught, teacher_head, low_rank=low_rank)
    assert silent.loss.grad_fn is None
    torch.testing.assert_close(silent.losses_n, found.losses_n)


def test_a_backward_again_and_large_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights' gradients that are not kept are computed again, each for itself: bit for bit the same."""
    hidden, weight, rows, columns, _ = factors()
    labels_n, weights_n = torch.arange(N) % V, torch.ones(N, dtype=torch.float64)
    found = []
    for large_bytes in (1 << 28, 1, V * D * 8):  # none is large, both are, only the head is
        monkeypatch.setattr(through_head, "LARGE_GRADIENT_BYTES", large_bytes)
        for factor in (weight, columns):
            factor.grad = torch.zeros_like(factor)  # of an earlier micro-batch
        loss = head_loss(hidden, head_of(weight), labels_n, weights_n, low_rank=LowRankLogits(rows, columns)).loss
        for _again in range(2):
            found.append(torch.autograd.grad(loss, (hidden, weight, rows, columns), retain_graph=True))
    assert all(torch.equal(mine, first) for each in found for mine, first in zip(each, found[0], strict=True))


def test_dtypes() -> None:
    """An fp32 term beside a bf16 head: products in bf16, gradients in fp32. In fp16 no small one is rounded to zero."""
    hidden, weight, rows, columns, _ = factors(torch.float32)
    heads = [head_of(weight.detach().bfloat16().to(dtype)) for dtype in (torch.bfloat16, torch.float32, torch.half)]
    labels_n, low_rank = torch.arange(N) % V, LowRankLogits(rows, columns)
    half, single = (head_loss(hidden, head, labels_n, torch.ones(N), low_rank=low_rank) for head in heads[:2])
    torch.testing.assert_close(half.losses_n, single.losses_n, atol=0.1, rtol=0.1)
    assert not torch.equal(half.losses_n, single.losses_n)
    in_half, in_single = (torch.autograd.grad(each.loss, (hidden, rows, columns)) for each in (half, single))
    for mine, theirs in zip(in_half, in_single, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() < 0.05 * theirs.norm()
    tiny = head_loss(hidden, heads[2], labels_n, torch.full((N,), 1e-9), low_rank=low_rank).loss
    for mine, theirs in zip(torch.autograd.grad(tiny, (hidden, rows, columns)), in_single, strict=True):
        assert (mine * 1e9 - theirs).norm() < 0.05 * theirs.norm()


def test_logits_of_all_rows_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the rows take a few [r] and [D] more for each, far less than logits [V] would."""
    vocabulary, chunk = 300, 10
    monkeypatch.setattr(through_head, "CHUNK_ELEMENTS", chunk * vocabulary)
    head = nn.Linear(D, vocabulary, bias=False).requires_grad_(False)
    columns = torch.randn(vocabulary, R).requires_grad_()

    def peak(num_rows: int) -> int:
        hidden_nd, rows_nr = torch.randn(num_rows, D).requires_grad_(), torch.randn(num_rows, R).requires_grad_()
        with LiveMemory() as live:
            labels_n = torch.arange(num_rows) % vocabulary
            low_rank = LowRankLogits(rows_nr, columns)
            head_loss(hidden_nd, head, labels_n, torch.rand(num_rows), low_rank=low_rank).loss.backward()
        return live.peak_elements

    assert peak(300) - peak(100) < 200 * 6 * (D + R)
