"""Losses against hand-derived numbers and plain autograd; the chunked head is equal and never holds [N, V]."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.live_memory import LiveMemory
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.models import loss as through_head
from draftsmith.models.kernels.cpu_library import has_kernels
from draftsmith.models.loss import (
    LOSSES,
    Factors,
    LossWeights,
    Teacher,
    chunk_rows,
    has_teacher,
    head_loss,
    smooth_l1,
)
from draftsmith.models.target_logits import PLAIN, LogitShape

N, D, V, T = 7, 5, 11, 17  # rows, hidden, the head's vocabulary, a larger vocabulary of the teacher
NAMES = tuple(LOSSES)
LABEL_NAMES = {"ce", "focal"}  # `focal` is added by a test
TEACHER_NAMES = sorted(set(LOSSES) - LABEL_NAMES)

# p = (.5, .3, .2), q = (.2, .2, .6): alpha = .2 + .2 + .2, KL = .5 ln(5/2) + .3 ln(3/2) + .2 ln(1/3)
P, Q, ALPHA = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6), 0.6
KL = 0.5 * math.log(2.5) + 0.3 * math.log(1.5) - 0.2 * math.log(3.0)
BY_HAND = {
    "ce": -math.log(0.6),  # the label is token 2
    "kl": KL,
    "tv": 1 - ALPHA,
}


def random_rows(seed: int = 0, vocabulary: int = V) -> tuple[Tensor, Tensor, Tensor]:
    """Return the drafter's logits, labels and the teacher's logits."""
    generator = torch.Generator().manual_seed(seed)
    logits, teacher_logits = 2 * torch.randn(2, N, vocabulary, generator=generator, dtype=torch.float64)
    return logits, torch.randint(vocabulary, (N,), generator=generator), teacher_logits


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    at = at.clone().requires_grad_()
    return torch.autograd.grad(function(at).sum(), at)[0]


# ---- rows ----


@pytest.mark.parametrize("name", NAMES)
def test_row_losses_by_hand(name: str) -> None:
    """Logits are only known up to a constant, and the other row does not interfere."""
    logits = torch.tensor([Q, P], dtype=torch.float64).log() + torch.tensor([[3.0], [0.0]])
    teacher_logits = torch.tensor([P, P], dtype=torch.float64).log() - 2.0
    values = LOSSES[name](logits, torch.tensor([2, 0]), teacher_logits)
    same = math.log(2) if name == "ce" else 0.0
    torch.testing.assert_close(values, torch.tensor([BY_HAND[name], same], dtype=torch.float64))


@pytest.mark.parametrize("name", TEACHER_NAMES)
def test_losses_of_disjoint_p_and_q_are_finite(name: str) -> None:
    """alpha = 2 exp(-400) is 0 in fp32. The gradients of all but TV point towards the teacher's token."""
    logits, labels, teacher_logits = torch.tensor([[400.0, 0.0]]), torch.tensor([1]), torch.tensor([[0.0, 400.0]])
    expected, slope = {
        "kl": (400.0, 1.0),
        "tv": (1.0, 0.0),
    }[name]
    torch.testing.assert_close(LOSSES[name](logits, labels, teacher_logits), torch.tensor([expected]))
    grad = gradient(lambda z: LOSSES[name](z, labels, teacher_logits), logits)
    torch.testing.assert_close(grad, torch.tensor([[slope, -slope]]))


@pytest.mark.parametrize("name", NAMES)
def test_softmax_is_in_fp32_at_least(name: str) -> None:
    logits, labels, teacher_logits = random_rows()
    half, half_teacher = logits.bfloat16(), teacher_logits.bfloat16()
    value = LOSSES[name](half, labels, half_teacher)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, LOSSES[name](half.double(), labels, half_teacher.double()).float())
    assert LOSSES[name](logits, labels, teacher_logits).dtype == torch.float64


@pytest.mark.skipif(not has_kernels(), reason="no C++ compiler")
@pytest.mark.parametrize("vocabulary", [5, 16, 37, 1000])
def test_cross_entropy_in_one_pass_on_a_cpu(vocabulary: int) -> None:
    """It equals torch's operations; ties give the first argmax, and NaN stays NaN."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(9, vocabulary, generator=generator)).bfloat16()
    logits[0], logits[1] = 1.0, 2.0
    labels = logits.float().argmax(-1)
    labels[1:9:2] = vocabulary - 1
    exact = logits.float().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    expected.sum().backward()
    losses, correct, grad = torch.empty(9), torch.empty(9, dtype=torch.bool), logits.clone()
    torch.ops.draftsmith.cross_entropy(grad, labels, losses, correct)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.float(), exact.grad, rtol=2**-8, atol=1e-6)
    assert correct.tolist() == (logits.float().argmax(-1) == labels).tolist()
    assert correct[:2].tolist() == [True, False]
    logits[3, 2] = math.nan
    torch.ops.draftsmith.cross_entropy(logits, labels, losses, correct)
    assert logits[3].isnan().all()
    assert losses[3].isnan()


def test_smooth_l1() -> None:
    """|d| = .5 costs .125, |d| = 2 costs 1.5, |d| = 1 costs .5; the loss is the mean of a row of 4 with one 0."""
    features = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    teacher = torch.tensor([[1.5, 0.0, 4.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(smooth_l1(features, teacher), torch.tensor([(0.125 + 1.5 + 0.5) / 4, 0.0]))
    torch.testing.assert_close(
        gradient(lambda x: smooth_l1(x, teacher), features)[0] * 4, torch.tensor([-0.5, 1, -1, 0])
    )
    assert smooth_l1(features.bfloat16(), teacher).dtype == torch.float32


# ---- through the head ----


def shaped(shape: LogitShape, product: Tensor) -> Tensor:
    scaled = shape.scale * product
    return scaled if shape.cap is None else shape.cap * torch.tanh(scaled / shape.cap)


class Setting:
    """Rows with weights, a head with a bias, a teacher with a larger vocabulary and fewer rows, all in fp64."""

    def __init__(
        self, trained: bool = True, reduced: bool = True, low_rank: bool = False, shape: LogitShape = PLAIN
    ) -> None:
        generator, self.shape = torch.Generator().manual_seed(1), shape

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.hidden_nd = normal(N, D).requires_grad_()
        self.teacher: Teacher | None = Teacher(normal(5, D), torch.tensor([3, 0, 3, 1, 0, 3, 2]))
        self.teacher_nd = self.teacher.features_pd[self.teacher.token_n]
        self.head, self.teacher_head = nn.Linear(D, V).double(), nn.Linear(D, T if reduced else V).double()
        with torch.no_grad():
            for parameter in (*self.head.parameters(), *self.teacher_head.parameters()):
                parameter.copy_(normal(*parameter.shape))
        self.teacher_head.requires_grad_(False)
        self.head.weight.requires_grad_(trained)
        self.head.bias.requires_grad_(False)
        self.labels_n = torch.randint(V, (N,), generator=generator)
        self.weights_n: Tensor | None = normal(N).abs()
        self.columns = torch.randperm(T, generator=generator)[:V] if reduced else None
        factors = (normal(N, 3).requires_grad_(), normal(V, 3).requires_grad_())
        self.low_rank = factors if low_rank else None

    def run(self, loss: str | LossWeights, factors: Factors | None = None) -> through_head.HeadLoss:
        teacher, labels_n = self.teacher, self.labels_n
        if teacher is not None:
            teacher = teacher._replace(head=self.teacher_head, columns_v=self.columns)
        if factors is not None:  # -100 if the head lacks the label
            labels_n = labels_n.masked_fill(factors[0] == 0, -100)
        return head_loss(
            self.hidden_nd, self.head, labels_n, self.weights_n, loss, teacher, self.low_rank, self.shape,
            is_reduced=factors is not None,
        )  # fmt: skip

    def taught_in(self, dtype: torch.dtype) -> Teacher:
        assert self.teacher is not None
        return self.teacher._replace(features_pd=self.teacher.features_pd.to(dtype))

    def reference(self, loss: LossWeights, factors: Factors | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted sum, losses and logits by plain autograd."""
        logits, teacher_logits = (
            shaped(self.shape, head(rows))
            for head, rows in ((self.head, self.hidden_nd), (self.teacher_head, self.teacher_nd))
        )
        if self.low_rank is not None:
            logits = logits + self.low_rank[0] @ self.low_rank[1].T
        teacher_logits = teacher_logits if self.columns is None else teacher_logits[:, self.columns]
        losses_n = torch.zeros(N, dtype=torch.float64)
        for name, weight in loss.items():
            counts = factors[0] if factors is not None and name in LABEL_NAMES else 1.0
            losses_n = losses_n + weight * counts * LOSSES[name](logits, self.labels_n, teacher_logits)
        return (losses_n * self.weights_n).sum(), losses_n, logits

    def grads(self, loss: Tensor) -> list[Tensor | None]:
        factors = [self.hidden_nd, self.head.weight, *(self.low_rank or ())]
        for factor in factors:
            factor.grad = None
        loss.backward()
        return [factor.grad for factor in factors]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduced": False, "low_rank": True},
        {"trained": False, "low_rank": True},
        *({"low_rank": True, "shape": LogitShape(*shape)} for shape in ((0.25,), (1.0, 2.0), (0.5, 1.5))),
    ],
    ids=str,
)
def test_head_loss_equals_plain_autograd(
    name: str, chunk: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of hidden states, head and both factors of a low-rank term; the head's bias is added once.

    The low-rank term is neither scaled nor capped. Row weights that come later give the same gradients.
    """
    monkeypatch.setattr(through_head, "CHUNK_ELEMENTS", chunk * V)
    assert chunk_rows(V, D) == chunk
    setting = Setting(**options)
    result = setting.run(name)
    expected, losses_n, logits = setting.reference({name: 1.0})
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(result.losses_n, losses_n.detach())
    cross_entropy_n = F.cross_entropy(logits, setting.labels_n, reduction="none")
    torch.testing.assert_close(result.cross_entropy_n, cross_entropy_n.detach())
    assert result.correct_n.tolist() == (logits.argmax(-1) == setting.labels_n).tolist()
    wanted = setting.grads(2.5 * expected)
    torch.testing.assert_close(setting.grads(2.5 * result.loss), wanted)
    assert [part.requires_grad for part in result[:4]] == [True, False, False, False]
    with torch.no_grad():
        silent = setting.run(name)
    assert silent.loss.grad_fn is None
    torch.testing.assert_close(silent.losses_n, result.losses_n)
    weights_n, setting.weights_n = setting.weights_n, None
    later = setting.run(name)
    assert [part.requires_grad for part in later[:4]] == [False, True, False, False]
    torch.testing.assert_close(setting.grads(2.5 * (later.losses_n * weights_n).sum()), wanted)


@pytest.mark.parametrize("loss", [{"ce": 0.1, "tv": 1.8}, {"kl": 1.0}, {"tv": 0.5, "kl": 0.2}, {"ce": 2.0}], ids=str)
@pytest.mark.parametrize("later", [True, False])
def test_weighted_sums_of_losses_and_row_weights(
    loss: LossWeights, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each term has its own row weights, in any order of rows; a name is the sum with weight 1."""
    monkeypatch.setattr(through_head, "CHUNK_ELEMENTS", 3 * V)
    setting = Setting(low_rank=True)
    factors = torch.tensor([1.0, 0, 1, 1, 0, 1, 1]).double(), None
    expected, losses_n, _ = setting.reference(loss, factors)
    weights_n = setting.weights_n
    setting.weights_n = None if later else weights_n
    result = setting.run(loss, factors)
    total = (result.losses_n * weights_n).sum() if later else result.loss
    torch.testing.assert_close(result.losses_n.detach(), losses_n.detach())
    torch.testing.assert_close(setting.grads(2.5 * total), setting.grads(2.5 * expected))
    (name, weight), *others = loss.items()
    if weight == 1.0 and not others:
        assert torch.equal(setting.run(loss).losses_n, setting.run(name).losses_n)


def focal(logits: Tensor, labels: Tensor, teacher_logits: Tensor | None = None) -> Tensor:
    """Return (1 - q)^2 times the cross entropy: a loss of labels as a user would add it."""
    nats_n = F.cross_entropy(logits, labels, reduction="none")
    return (1 - (-nats_n).exp()) ** 2 * nats_n


@pytest.mark.parametrize("loss", [{"focal": 1.0}, {"focal": 2.0, "ce": 0.5}, {"focal": 0.3, "kl": 1.0}], ids=str)
def test_new_loss_of_labels_needs_only_a_function_and_a_name(
    loss: LossWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts if the label is in the draft vocabulary, and needs no teacher."""
    monkeypatch.setitem(LOSSES, "focal", focal)
    monkeypatch.setattr(through_head, "LABEL_LOSSES", LABEL_NAMES)
    assert has_teacher(loss) == ("kl" in loss)
    setting = Setting()
    factors = torch.tensor([1.0, 0, 1, 1, 0, 1, 1]).double(), None
    expected, losses_n, _ = setting.reference(loss, factors)
    if "kl" not in loss:
        setting.teacher = None
    result = setting.run(loss, factors)
    torch.testing.assert_close(result.losses_n, losses_n.detach())
    torch.testing.assert_close(setting.grads(result.loss), setting.grads(expected))


@pytest.mark.parametrize("name", ["ce", "kl"])
@pytest.mark.parametrize("master", [True, False])
@pytest.mark.parametrize("later", [True, False])
def test_fp16_gradients_do_not_underflow_before_scaling(name: str, master: bool, later: bool) -> None:
    """For a mean over a million labels, scaled as by a GradScaler, no gradient is zero unless it is zero in fp32."""
    setting, scale = Setting(reduced=False), 65536.0
    hidden_nd = setting.hidden_nd.detach().half()
    weights_n = 2.0**-20 * torch.tensor([2.0**-row for row in range(N)])

    def grads(hidden: Tensor, head: nn.Linear) -> tuple[Tensor, ...]:
        head.load_state_dict(setting.head.half().state_dict())
        head.bias.requires_grad_(False)
        hidden = hidden.clone().requires_grad_()
        given = None if later else weights_n
        result = head_loss(hidden, head, setting.labels_n, given, name, setting.taught_in(hidden.dtype))
        loss = (result.losses_n * weights_n).sum() if later else result.loss
        return torch.autograd.grad(scale * loss, (hidden, head.weight))

    expected = grads(hidden_nd.float(), nn.Linear(D, V))
    with torch.autocast("cpu", torch.float16, enabled=master):
        found = grads(hidden_nd, nn.Linear(D, V) if master else nn.Linear(D, V).half())
    assert [grad.dtype for grad in found] == [torch.float16, torch.float32 if master else torch.float16]
    for grad, wanted in zip(found, expected, strict=True):
        assert ((grad == 0) <= (wanted == 0)).all()
        assert (grad.float() - wanted).norm() < 2e-3 * wanted.norm()


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_fp16_without_rows_or_weights(weight: float) -> None:
    head = nn.Linear(D, V).half()
    head.bias.requires_grad_(False)
    num_rows = 0 if weight else N
    hidden_nd = torch.randn(num_rows, D).half().requires_grad_()
    result = head_loss(hidden_nd, head, torch.zeros(num_rows, dtype=torch.long), torch.full((num_rows,), weight))
    for grad in torch.autograd.grad(result.loss, (hidden_nd, head.weight)):
        assert (grad == 0).all()


@pytest.mark.parametrize(("is_on_cpu", "teacher_rows"), [(True, 3 + 2), (False, 12)])
def test_rows_of_one_token_share_its_teacher(
    is_on_cpu: bool, teacher_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three depths of four tokens in chunks of eight rows: all of two tokens and two of the third, then the others.

    On other devices a chunk does not wait for its number of tokens.
    """
    monkeypatch.setattr(through_head, "CHUNK_ELEMENTS", 8 * V)
    monkeypatch.setattr(through_head, "_is_on_cpu", lambda tensor: is_on_cpu)
    head, teacher_head = nn.Linear(D, V, bias=False).requires_grad_(False), nn.Linear(D, V, bias=False)
    token_n = torch.arange(4).repeat(3)
    teacher = Teacher(torch.randn(4, D), token_n, teacher_head)
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        head_loss(torch.randn(12, D), head, token_n % V, torch.ones(12), "kl", teacher)
    assert flops.get_total_flops() == 2 * D * V * (12 + teacher_rows)


# ---- memory ----


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_all_rows_are_never_in_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the rows need a few [D] and numbers more per row, far less than their logits [V] would."""
    hidden_size, vocabulary, chunk = 4, 300, 10
    head = nn.Linear(hidden_size, vocabulary, bias=False)

    def peak(num_rows: int) -> int:
        hidden_nd, features_nd = torch.randn(2, num_rows, hidden_size).unbind()
        teacher = Teacher(features_nd, torch.randperm(num_rows))
        labels_n, weights_n = torch.arange(num_rows) % vocabulary, torch.rand(num_rows)
        hidden_nd.requires_grad_()
        with LiveMemory() as live:
            head_loss(hidden_nd, head, labels_n, weights_n, name, teacher).loss.backward()
        return live.peak_elements

    monkeypatch.setattr(through_head, "CHUNK_ELEMENTS", chunk * vocabulary)
    few, many = peak(100), peak(300)
    assert few < 16 * chunk * vocabulary
    assert many - few < 200 * (4 * hidden_size + 10)
    monkeypatch.setattr(through_head, "CHUNK_ELEMENTS", 10**9)
    assert peak(300) > 300 * vocabulary  # the count finds them if they exist


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradient_of_a_trained_head_is_in_memory_once(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For three heads: the final `.grad` and at most one more of them, for any number of micro-batches.

    The gradients are bitwise equal to those of the path that keeps them.
    """
    hidden_size, vocabulary, num_rows, num_heads = 40, 300, 10, 3
    generator = torch.Generator().manual_seed(2)
    hidden_bnd = torch.randn(micro_batches, num_rows, hidden_size, generator=generator)
    labels_n = torch.arange(num_rows)

    def gradients(heads: list[nn.Linear]) -> int:
        with LiveMemory() as live:
            for hidden_nd in hidden_bnd:
                losses = [head_loss(hidden_nd, head, labels_n, torch.rand(num_rows)).loss for head in heads]
                torch.stack(losses).sum().backward()
                del losses
        return live.peak_elements

    results = []
    for large_bytes in (1, 1 << 28):
        monkeypatch.setattr(through_head, "LARGE_GRADIENT_BYTES", large_bytes)
        torch.manual_seed(0)
        heads = [nn.Linear(hidden_size, vocabulary, bias=False) for _ in range(num_heads)]
        peak = gradients(heads)
        one_head = hidden_size * vocabulary
        peak -= num_heads * one_head  # the weights
        others = 8 * num_rows * vocabulary  # a chunk's logits and buffers of that size
        if large_bytes == 1:
            assert num_heads * one_head < peak < (num_heads + 1) * one_head + others
        elif micro_batches > 1:  # the count finds them if all are kept
            assert peak > 2 * num_heads * one_head
        results.append([head.weight.grad for head in heads])
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)
