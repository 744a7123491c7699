"""Losses against hand-derived numbers and plain autograd; the chunked head is equal and never holds [M, V]."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.models import loss as through_head
from draftsmith.models.kernels.cpu_library import has_kernels
from draftsmith.models.loss import (
    LOSSES,
    HeadLoss,
    HeadRows,
    LossWeights,
    Teacher,
    chunk_rows,
    has_teacher,
    head_loss,
    is_argmax,
    smooth_l1,
)
from draftsmith.models.target_logits import PLAIN, LogitShape

M, D, V, T = 7, 5, 11, 17  # rows, hidden, the head's vocabulary, a larger vocabulary of the teacher
NAMES = tuple(LOSSES)
LABEL_NAMES = {"ce", "focal"}  # `focal` is added by a test

# p = (.5, .3, .2), q = (.2, .2, .6): alpha = .2 + .2 + .2, KL = .5 ln(5/2) + .3 ln(3/2) + .2 ln(1/3)
P, Q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)
BY_HAND = {
    "ce": -math.log(0.6),  # the label is token 2
    "kl": 0.5 * math.log(2.5) + 0.3 * math.log(1.5) - 0.2 * math.log(3.0),
    "tv": 0.4,
}


# ---- rows ----


class LiveMemory(TorchDispatchMode):
    """Most elements, after any operation, of all storages created or seen within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_elements = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                elements = storage.nbytes() // tensor.element_size()
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), elements))
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        self.peak_elements = max(self.peak_elements, sum(elements for _, elements in self._live.values()))
        return result


@pytest.mark.parametrize("name", NAMES)
def test_row_losses_by_hand(name: str) -> None:
    """The other row does not interfere."""
    log_q, log_p = (torch.tensor(each, dtype=torch.float64).log() for each in ([Q, P], [P, P]))
    values = LOSSES[name](log_q, torch.tensor([2, 0]), log_p)
    same = math.log(2) if name == "ce" else 0.0
    torch.testing.assert_close(values, torch.tensor([BY_HAND[name], same], dtype=torch.float64))


@pytest.mark.parametrize(("name", "expected", "slope"), [("kl", 400.0, 1.0), ("tv", 1.0, 0.0)])
def test_losses_of_disjoint_p_and_q_are_finite(name: str, expected: float, slope: float) -> None:
    """alpha = 2 exp(-400) is 0 in fp32. The gradient of KL points towards the teacher's token."""
    logits, log_p = torch.tensor([[400.0, 0.0]]).requires_grad_(), torch.tensor([[0.0, 400.0]]).log_softmax(-1)
    loss = LOSSES[name](logits.log_softmax(-1), torch.tensor([1]), log_p)
    torch.testing.assert_close(loss, torch.tensor([expected]))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(grad, torch.tensor([[slope, -slope]]))


def test_argmax_of_ties_is_the_first() -> None:
    logits = torch.tensor([[1.0, 2, 2], [1, 2, 2], [3, 2, 1], [math.nan, 1, 2]])
    assert is_argmax(logits, torch.tensor([1, 2, 0, 2])).tolist() == [True, False, True, False]


def test_smooth_l1() -> None:
    """|d| = .5 costs .125, |d| = 2 costs 1.5, |d| = 1 costs .5; the loss is the mean of a row of 4 with one 0."""
    features = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]]).requires_grad_()
    teacher = torch.tensor([[1.5, 0.0, 4.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    losses = smooth_l1(features, teacher)
    torch.testing.assert_close(losses, torch.tensor([(0.125 + 1.5 + 0.5) / 4, 0.0]))
    (grad,) = torch.autograd.grad(losses.sum(), features)
    torch.testing.assert_close(grad[0] * 4, torch.tensor([-0.5, 1, -1, 0]))
    assert smooth_l1(features.bfloat16(), teacher).dtype == torch.float32


# ---- through the head ----


def shaped(shape: LogitShape, product: Tensor) -> Tensor:
    scaled = shape.scale * product
    return scaled if shape.cap is None else shape.cap * torch.tanh(scaled / shape.cap)


class Setting:
    """Weighted rows, a head with a bias, a teacher with a larger vocabulary and fewer rows, all in fp64."""

    def __init__(
        self, trained: bool = True, reduced: bool = True, low_rank: bool = False, shape: LogitShape = PLAIN
    ) -> None:
        generator, self.shape = torch.Generator().manual_seed(1), shape

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.hidden_md = normal(M, D).requires_grad_()
        self.head, teacher_head = nn.Linear(D, V).double(), nn.Linear(D, T if reduced else V).double()
        with torch.no_grad():
            for parameter in (*self.head.parameters(), *teacher_head.parameters()):
                parameter.copy_(normal(*parameter.shape))
        self.head.weight.requires_grad_(trained)
        self.head.bias.requires_grad_(False)
        columns = torch.randperm(T, generator=generator)[:V] if reduced else None
        self.teacher: Teacher | None = Teacher(normal(5, D), teacher_head, columns, shape)
        labels = torch.randint(V, (M,), generator=generator)
        self.rows = HeadRows.flat(labels, normal(M).abs(), torch.tensor([3, 0, 3, 1, 0, 3, 2]))
        self.low_rank = (normal(M, 3).requires_grad_(), normal(V, 3).requires_grad_()) if low_rank else None

    def run(self, loss: str | LossWeights) -> HeadLoss:
        return head_loss(self.head, self.hidden_md, self.rows, loss, self.teacher, self.low_rank, self.shape)

    def reference(self, loss: LossWeights) -> tuple[Tensor, Tensor]:
        """Return the weighted sum and the logits by plain autograd."""
        logits, labels, log_p = shaped(self.shape, self.head(self.hidden_md)), self.rows.label_m.clamp(min=0), None
        if self.low_rank is not None:
            logits = logits + self.low_rank[0] @ self.low_rank[1].T
        if self.teacher is not None:
            teacher_logits = shaped(self.shape, self.teacher.head(self.teacher.features_pd[self.rows.before_m]))
            columns = self.teacher.columns_v
            log_p = (teacher_logits if columns is None else teacher_logits[:, columns]).log_softmax(-1).detach()
        total = torch.zeros((), dtype=torch.float64)
        for name, weight in loss.items():
            counted_m = (self.rows.label_m >= 0) | (name not in LABEL_NAMES)
            losses_m = LOSSES[name](logits.log_softmax(-1), labels, log_p)
            total = total + (weight * counted_m * self.rows.weight_m * losses_m).sum()
        return total, logits

    def grads(self, loss: Tensor) -> list[Tensor | None]:
        factors = [self.hidden_md, self.head.weight, *(self.low_rank or ())]
        for factor in factors:
            factor.grad = None
        loss.backward()
        return [factor.grad for factor in factors]


@pytest.fixture(params=[(1, 1), (3, 2), (100, 3)], ids=str)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a chunk and of a block."""
    chunk, block = request.param
    monkeypatch.setattr(through_head, "CHUNK_ELEMENTS", chunk * V)
    monkeypatch.setattr(through_head, "BLOCK_ELEMENTS", block * V)
    assert chunk_rows(V, D) == chunk


SUMS = [*({name: 1.0} for name in NAMES), {"ce": 0.1, "tv": 1.8}, {"tv": 0.5, "kl": 0.2}, {"ce": 2.0}]


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("loss", SUMS, ids=str)
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
def test_head_loss_equals_plain_autograd(loss: dict[str, float], options: dict[str, Any]) -> None:
    """Gradients of hidden states, head and both factors of a low-rank term, which is neither scaled nor capped.

    Rows whose label the head lacks have no cross entropy; a name is the sum with weight 1.
    """
    setting = Setting(**options)
    for labels in (setting.rows.label_m, torch.where(torch.arange(M) % 3 == 1, -100, setting.rows.label_m)):
        setting.rows = setting.rows._replace(label_m=labels)
        result = setting.run(next(iter(loss)) if loss in SUMS[: len(NAMES)] else loss)
        expected, logits = setting.reference(loss)
        torch.testing.assert_close(result.loss, expected.detach())
        nats_m = F.cross_entropy(logits.detach(), labels, reduction="none")
        torch.testing.assert_close(result.cross_entropy_m, nats_m.masked_fill(labels < 0, math.inf))
        assert result.correct_m.tolist() == (logits.argmax(-1) == labels).tolist()
        torch.testing.assert_close(setting.grads(2.5 * result.loss), setting.grads(2.5 * expected))
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.autograd, "grad", None)  # no gradient is computed
            silent = setting.run(loss)
        assert silent.loss.grad_fn is None
        torch.testing.assert_close(silent.loss, expected.detach())


@pytest.mark.skipif(not has_kernels(), reason="no C++ compiler")
@pytest.mark.parametrize("vocabulary", [5, 37, 1000])
def test_cross_entropy_in_one_pass_on_a_cpu(vocabulary: int) -> None:
    """In bf16 loss, first argmax and gradient equal torch's operations; NaN stays NaN."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(8, vocabulary, bias=False).bfloat16().requires_grad_(False)
    hidden_md = torch.randn(9, 8, generator=generator).bfloat16()
    hidden_md[0] = 0.0  # ties
    labels_m = head(hidden_md).float().argmax(-1)
    labels_m[1::2], labels_m[4] = vocabulary - 1, -100
    rows = HeadRows.flat(labels_m, torch.linspace(0.5, 2, 9), torch.arange(9))
    found, exact = hidden_md.clone().requires_grad_(), hidden_md.clone().requires_grad_()
    result = head_loss(head, found, rows, {"ce": 2.0})
    logits = head(exact).float()
    expected = 2 * (F.cross_entropy(logits, labels_m, reduction="none") * rows.weight_m).sum()
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-5, atol=1e-6)
    assert result.correct_m.tolist() == (logits.argmax(-1) == labels_m).tolist()
    result.loss.backward()
    expected.backward()
    torch.testing.assert_close(found.grad, exact.grad, rtol=2**-6, atol=2**-8)
    hidden_md[3, 2] = math.nan
    assert head_loss(head, hidden_md.requires_grad_(), rows).cross_entropy_m[3].isnan()


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_after_the_first_error_of_a_group_have_no_loss(dtype: torch.dtype) -> None:
    """Three groups of three depths, depth after depth: right, wrong, right; wrong, ...; right, right, wrong."""
    is_right_gd = torch.tensor([[True, False, True], [False, True, True], [True, True, False]])
    order = torch.arange(9).view(3, 3).T.flatten()
    labels = torch.arange(9)
    hidden_md = torch.zeros(9, V)
    hidden_md[order, torch.where(is_right_gd.flatten(), labels, labels + 1)[order]] = 5.0
    head = nn.Linear(V, V, bias=False).to(dtype).requires_grad_(False)
    nn.init.eye_(head.weight)
    ones = torch.ones(9)
    rows = HeadRows(labels, ones, labels, labels // 3, labels % 3, labels, ones).at(order)
    wrong_pg = torch.zeros(3, 3, dtype=torch.bool)
    rows_md, plain_md = hidden_md[order].requires_grad_(), hidden_md.clone().requires_grad_()
    result = head_loss(head, rows_md, rows, wrong_pg=wrong_pg)
    reached = [0, 1, 3, 6, 7, 8]
    expected = F.cross_entropy(plain_md[reached], labels[reached], reduction="sum")
    torch.testing.assert_close(result.loss, expected.detach())
    assert torch.equal(wrong_pg, ~is_right_gd)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    (found,), (wanted,) = (torch.autograd.grad(*each) for each in ((result.loss, rows_md), (expected, plain_md)))
    torch.testing.assert_close(found, wanted[order], atol=tolerance, rtol=tolerance)


def focal(log_q: Tensor, labels: Tensor, log_p: Tensor | None = None) -> Tensor:
    """Return (1 - q)^2 times the cross entropy: a loss of labels as a user would add it."""
    nats_m = F.nll_loss(log_q, labels, reduction="none")
    return (1 - (-nats_m).exp()) ** 2 * nats_m


@pytest.mark.parametrize("loss", [{"focal": 1.0}, {"focal": 2.0, "ce": 0.5}, {"focal": 0.3, "kl": 1.0}], ids=str)
def test_new_loss_of_labels_needs_only_a_function_and_a_name(
    loss: LossWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts if the label is in the draft vocabulary, and needs no teacher."""
    monkeypatch.setitem(LOSSES, "focal", focal)
    monkeypatch.setattr(through_head, "LABEL_LOSSES", LABEL_NAMES)
    assert has_teacher(loss) == ("kl" in loss)
    setting = Setting()
    setting.rows.label_m[1::3] = -100
    setting.teacher = setting.teacher if "kl" in loss else None
    expected, _ = setting.reference(loss)
    torch.testing.assert_close(setting.grads(setting.run(loss).loss), setting.grads(expected))


@pytest.mark.parametrize("name", ["ce", "kl"])
@pytest.mark.parametrize("master", [True, False])
def test_fp16_gradients_do_not_underflow_before_scaling(name: str, master: bool) -> None:
    """For a mean over a million labels, scaled as by a GradScaler, no gradient is zero unless it is zero in fp32."""
    setting, scale = Setting(reduced=False), 65536.0
    hidden_md, teacher = setting.hidden_md.detach().half(), setting.teacher
    assert teacher is not None
    rows = setting.rows._replace(weight_m=2.0 ** -torch.arange(M))

    def grads(hidden: Tensor, head: nn.Linear) -> tuple[Tensor, ...]:
        head.load_state_dict(setting.head.half().state_dict())
        head.bias.requires_grad_(False)
        hidden, taught = (
            hidden.clone().requires_grad_(),
            teacher._replace(features_pd=teacher.features_pd.to(hidden.dtype)),
        )
        loss = head_loss(head, hidden, rows, name, taught).loss / 2.0**20
        return torch.autograd.grad(scale * loss, (hidden, head.weight))

    expected = grads(hidden_md.float(), nn.Linear(D, V))
    with torch.autocast("cpu", torch.float16, enabled=master):
        found = grads(hidden_md, nn.Linear(D, V) if master else nn.Linear(D, V).half())
    assert [grad.dtype for grad in found] == [torch.float16, torch.float32 if master else torch.float16]
    for grad, wanted in zip(found, expected, strict=True):
        assert ((grad == 0) <= (wanted == 0)).all()
        assert (grad.float() - wanted).norm() < 2e-3 * wanted.norm()


@pytest.mark.parametrize("num_rows", [0, M])
def test_fp16_without_rows_or_weights(num_rows: int) -> None:
    head = nn.Linear(D, V, bias=False).half()
    hidden_md = torch.randn(num_rows, D).half().requires_grad_()
    labels_m = torch.zeros(num_rows, dtype=torch.long)
    result = head_loss(head, hidden_md, HeadRows.flat(labels_m, torch.zeros(num_rows), labels_m))
    for grad in torch.autograd.grad(result.loss, (hidden_md, head.weight), allow_unused=not num_rows):
        assert grad is None or (grad == 0).all()


@pytest.mark.parametrize(("is_on_cpu", "teacher_rows"), [(True, 3 + 2), (False, 12)])
def test_rows_of_one_token_share_its_teacher(
    is_on_cpu: bool, teacher_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three depths of four tokens in chunks of eight rows: all of two tokens and two of the third, then the others.

    On other devices a chunk does not wait for its number of tokens.
    """
    monkeypatch.setattr(through_head, "CHUNK_ELEMENTS", 8 * V)
    monkeypatch.setattr(through_head, "DEVICE_ROWS", 8)
    monkeypatch.setattr(through_head, "is_on_cpu", lambda tensor: is_on_cpu)
    head, teacher_head = nn.Linear(D, V, bias=False).requires_grad_(False), nn.Linear(D, V, bias=False)
    token_m = torch.arange(4).repeat(3)
    rows = HeadRows.flat(token_m % V, torch.ones(12), token_m)
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        head_loss(head, torch.randn(12, D), rows, "kl", Teacher(torch.randn(4, D), teacher_head))
    assert flops.get_total_flops() == 2 * D * V * (12 + teacher_rows)


# ---- memory ----


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_all_rows_are_never_in_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the rows need a few [D] and numbers more per row, far less than their logits [V] would.

    Features, rows, these in the order of the teacher's tokens, and their gradient; 7 fields of `HeadRows`, their order,
    cross entropy, whether it is right, label, whether it is known, and its weight in the loss.
    """
    hidden_size, vocabulary, chunk = 4, 300, 10
    head = nn.Linear(hidden_size, vocabulary, bias=False)

    def peak(num_rows: int) -> int:
        hidden_md, features_pd = torch.randn(2, num_rows, hidden_size).unbind()
        rows = HeadRows.flat(torch.arange(num_rows) % vocabulary, torch.rand(num_rows), torch.randperm(num_rows))
        hidden_md.requires_grad_()
        with LiveMemory() as live:
            head_loss(head, hidden_md, rows, name, Teacher(features_pd, head)).loss.backward()
        return live.peak_elements

    monkeypatch.setattr(through_head, "CHUNK_ELEMENTS", chunk * vocabulary)
    few, many = peak(100), peak(300)
    assert few < 16 * chunk * vocabulary
    assert many - few <= 200 * (4 * hidden_size + 13)
    monkeypatch.setattr(through_head, "CHUNK_ELEMENTS", 10**9)
    assert peak(300) > 300 * vocabulary  # the count finds them if they exist


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradient_of_a_trained_head_is_in_memory_once(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For three heads: the final `.grad`, and at most one more and its chunk's part, for any number of micro-batches.

    The gradients are bitwise equal to those of the path that keeps them.
    """
    hidden_size, vocabulary, num_rows, num_heads = 40, 300, 10, 3
    generator = torch.Generator().manual_seed(2)
    hidden_bmd = torch.randn(micro_batches, num_rows, hidden_size, generator=generator)
    labels_m = torch.arange(num_rows)

    def gradients(heads: list[nn.Linear]) -> int:
        with LiveMemory() as live:
            for hidden_md in hidden_bmd:
                rows = HeadRows.flat(labels_m, torch.rand(num_rows), labels_m)
                losses = [head_loss(head, hidden_md, rows).loss for head in heads]
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
