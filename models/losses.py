"""The losses of the field, by the names that a recipe gives them, and the LM head that they are taken through.

p = target (the teacher), q = drafter. alpha = sum_v min(p_v, q_v) = 1 - TV(p, q) is the probability that a token which
was drafted from q is accepted (Leviathan et al., arXiv 2211.17192, section 3.2).

| name        | loss of a row                                                         | source                |
|-------------|-----------------------------------------------------------------------|-----------------------|
| `ce`        | -log q(label)                                                         | Medusa, 2401.10774    |
| `kl`        | KL(p, q); its gradient is that of cross entropy with soft labels p    | EAGLE, 2401.15077     |
| `tv`        | 1 - alpha                                                             | 2211.17192            |
| `lk_alpha`  | -log alpha                                                            | LK losses, 2602.23881 |
| `lk_lambda` | lambda * KL + (1 - lambda) * TV, lambda = exp(-eta * stopgrad(alpha)) | LK losses, 2602.23881 |

Where we deviate: every row has its own alpha; its authors' code (in SpecForge) takes one, the batch's mean, for both.

No [N, V] tensor exists: a chunk's logits give its losses, its argmax and, since the weight of every row is known
beforehand, the gradient of its hidden states and its share of the head's gradient, and are then dropped. (As Liger's
fused linear cross entropy does, arXiv 2410.10989; `torch.nn.functional.linear_cross_entropy` gives no argmax without a
second product.)

Shapes: N rows (labelled positions), D hidden, V the head's vocabulary, T the teacher's vocabulary, G depths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

CHUNK_ELEMENTS = 1 << 22
# The LK paper's setting.
LK_ETA = 3.0


@dataclass
class DrafterOutput(ModelOutput):
    """The loss that is trained on, and sums per depth that add up over batches and processes."""

    loss: Tensor | None = None
    depth_loss_sum: Tensor | None = None  # [G] cross entropy in nats, summed over labels
    depth_correct: Tensor | None = None  # [G] labels that are the argmax
    depth_count: Tensor | None = None  # [G] labels
    correct_bgs: Tensor | None = None  # [B, G, S] bool: the argmax is the label of this group and depth
    correct_n: Tensor | None = None  # [N] the same of the rows whose loss it is


# ---- losses of rows: (logits [N, V], labels [N], teacher's logits [N, V] or None) -> [N] ----


def ce(logits: Tensor, labels: Tensor, teacher_logits: Tensor | None = None) -> Tensor:
    """-log q(label)."""
    return -_log_softmax(logits).gather(1, labels.unsqueeze(1)).squeeze(1)


def kl(logits: Tensor, labels: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(p || q)."""
    return _kl(_log_softmax(teacher_logits), _log_softmax(logits))


def tv(logits: Tensor, labels: Tensor, teacher_logits: Tensor) -> Tensor:
    """Total variation, 1 - alpha."""
    return _tv(_log_softmax(teacher_logits), _log_softmax(logits))


def lk_alpha(logits: Tensor, labels: Tensor, teacher_logits: Tensor) -> Tensor:
    """-log alpha. Summed in the logarithm: alpha itself underflows where p and q share nothing, as they do at first."""
    return -torch.minimum(_log_softmax(teacher_logits), _log_softmax(logits)).logsumexp(-1)


def lk_lambda(logits: Tensor, labels: Tensor, teacher_logits: Tensor, eta: float = LK_ETA) -> Tensor:
    """From KL, whose gradient is large where little is accepted, to TV as alpha grows."""
    log_p, log_q = _log_softmax(teacher_logits), _log_softmax(logits)
    total_variation = _tv(log_p, log_q)
    weight = torch.exp(-eta * (1.0 - total_variation.detach()))
    return weight * _kl(log_p, log_q) + (1.0 - weight) * total_variation


def smooth_l1(features: Tensor, teacher_features: Tensor) -> Tensor:
    """[..., D] twice -> [...]: EAGLE's regression to the target's features, beta = 1, mean over D."""
    dtype = _softmax_dtype(features.dtype)
    return F.smooth_l1_loss(features.to(dtype), teacher_features.to(dtype), reduction="none").mean(-1)


LossName = Literal["ce", "kl", "tv", "lk_alpha", "lk_lambda"]
LOSSES: dict[str, Callable[..., Tensor]] = {"ce": ce, "kl": kl, "tv": tv, "lk_alpha": lk_alpha, "lk_lambda": lk_lambda}
TEACHER_LOSSES = frozenset(LOSSES) - {"ce"}


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    # Exactly zero at p = q, where 1 - sum(min) is left with a rounding error.
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=_softmax_dtype(logits.dtype))


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# ---- through the LM head ----


class HeadLoss(NamedTuple):
    """What the head makes of N rows. Only `loss` carries a gradient."""

    loss: Tensor  # [] weighted sum
    losses_n: Tensor  # [N] of the chosen loss
    correct_n: Tensor  # [N] bool: the label is the argmax
    cross_entropy_n: Tensor  # [N] in nats, whatever the loss


def head_loss(
    hidden_nd: Tensor,
    head: nn.Module,
    labels_n: Tensor,
    weights_n: Tensor,
    loss: str = "ce",
    teacher_nd: Tensor | None = None,
    teacher_head: nn.Module | None = None,
    teacher_columns: Tensor | None = None,
) -> HeadLoss:
    """Weighted sum of a row loss of `head(hidden)`; its gradient reaches `hidden_nd` and, if that is trained, the head.

    Softmaxes are in fp32 at least, products in the head weight's dtype (with an fp32 head: in autocast's, if on). In
    fp16 the row weights meet the gradient only where the loss scale does, so that neither rounds it to zero.

    Args:
        hidden_nd: [N, D].
        head: A linear layer [V, D] whose bias, if any, is frozen.
        labels_n: [N] rows of the head.
        weights_n: [N] weight of each row in the sum.
        loss: A key of `LOSSES`.
        teacher_nd: [N, D] the target's final features that predict these labels, for `TEACHER_LOSSES`.
        teacher_head: The target's head, a linear layer [T, D]; `head` by default.
        teacher_columns: [V] the head's rows as ids of the teacher's, for a reduced draft vocabulary: p is then the
            softmax over those alone.
    """
    head = _linear(head)
    teacher = None
    if loss in TEACHER_LOSSES:
        if teacher_nd is None:
            raise ValueError(f"loss `{loss}` compares with the teacher: pass teacher_nd")
        teacher = _Teacher.of(teacher_nd, head if teacher_head is None else _linear(teacher_head), teacher_columns)
    weight_vd: Tensor = head.weight
    if not torch.is_grad_enabled():
        hidden_nd, weight_vd = hidden_nd.detach(), weight_vd.detach()
    dtype = _product_dtype(weight_vd)
    with torch.autocast(hidden_nd.device.type, enabled=False):
        return HeadLoss(*_HeadLoss.apply(hidden_nd, weight_vd, head.bias, labels_n, weights_n, loss, teacher, dtype))


def depth_loss(
    hidden_nd: Tensor,
    depth_n: Tensor,
    labels_n: Tensor,
    head: nn.Module,
    depth_weights_g: Tensor | Sequence[float],
    loss: str = "ce",
    teacher_nd: Tensor | None = None,
    teacher_head: nn.Module | None = None,
    teacher_columns: Tensor | None = None,
    counts_g: Tensor | None = None,
) -> DrafterOutput:
    """A drafter's training loss: the mean over each depth's rows, these weighted with `depth_weights_g`.

    Args:
        depth_n: [N] depth of each row, counted from 0.
        labels_n: [N] rows of the head, or a negative number for a token that a reduced head does not have: `ce` then
            ignores the row, the other losses use its teacher; it counts as wrong, with no cross entropy.
        depth_weights_g: [G], sum 1. A depth without rows adds nothing.
        counts_g: [G] what each depth's sum is divided by, where the rows are part of a larger batch: its rows, of which
            those with an ignored label are none. The rows here by default.

    The others are those of `head_loss`.
    """
    weight_g = numbers_beside(hidden_nd, depth_weights_g)
    zeros_g = torch.zeros_like(weight_g)
    known_n = (labels_n >= 0).to(weight_g.dtype)
    counts_n = known_n if loss == "ce" else torch.ones_like(known_n)
    rows_g = zeros_g.index_add(0, depth_n, counts_n) if counts_g is None else counts_g.to(weight_g.dtype)
    weights_n = (weight_g / one_for_none(rows_g))[depth_n] * counts_n
    labels_n = labels_n.clamp(min=0)
    result = head_loss(hidden_nd, head, labels_n, weights_n, loss, teacher_nd, teacher_head, teacher_columns)
    return DrafterOutput(
        loss=result.loss,
        depth_loss_sum=zeros_g.index_add(0, depth_n, result.cross_entropy_n * known_n),
        depth_correct=zeros_g.index_add(0, depth_n, result.correct_n * known_n),
        depth_count=torch.zeros_like(weight_g, dtype=depth_n.dtype).index_add(0, depth_n, torch.ones_like(depth_n)),
        correct_n=result.correct_n & (known_n > 0),
    )


def one_for_none(counts: Tensor) -> Tensor:
    """Counts to divide by: expected ones may lie below 1, and where there is none there is nothing to divide."""
    return torch.where(counts > 0, counts, 1)


def numbers_beside(tensor: Tensor, numbers: Tensor | Sequence[float]) -> Tensor:
    """A few numbers in fp32 at least on a tensor's device, without waiting for that."""
    return torch.as_tensor(numbers, dtype=_softmax_dtype(tensor.dtype)).to(tensor.device, non_blocking=True)


def chunk_rows(vocabulary: int, hidden_size: int, head_is_trained: bool = False) -> int:
    """Rows whose logits exist at once.

    As many as fill CHUNK_ELEMENTS, or a sixteenth of the head's own size where that is more: the products of fewer rows
    would wait for the head to be read from memory. Half its size where it is trained: every chunk reads and writes all
    of its gradient, beside which that is little.
    """
    return max(1, CHUNK_ELEMENTS // vocabulary, hidden_size // (2 if head_is_trained else 16))


@dataclass
class _Teacher:
    """p of a chunk at a time."""

    hidden_nd: Tensor
    weight_vd: Tensor
    bias_v: Tensor | None

    @staticmethod
    def of(hidden_nd: Tensor, head: nn.Linear, columns_v: Tensor | None) -> "_Teacher":
        # The columns once, rather than products with the whole vocabulary in every chunk.
        columns = slice(None) if columns_v is None else columns_v
        dtype = _product_dtype(head.weight)
        bias_v = None if head.bias is None else head.bias[columns].to(dtype)
        return _Teacher(hidden_nd.detach(), head.weight.detach()[columns].to(dtype), bias_v)

    def logits(self, rows: slice) -> Tensor:
        return F.linear(self.hidden_nd[rows].to(self.weight_vd.dtype), self.weight_vd, self.bias_v)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_nd: Tensor,
        weight_vd: Tensor,
        bias_v: Tensor | None,
        labels_n: Tensor,
        weights_n: Tensor,
        loss: str,
        teacher: _Teacher | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        # Of the unweighted losses: a weight is 1 / N or less, and beside it fp16 needs the loss scale of the backward.
        grad_nd = torch.empty_like(hidden_nd, dtype=dtype) if wants_hidden else None
        # A sum over chunks, so in fp32 at least.
        grad_vd = torch.zeros_like(weight_vd, dtype=_softmax_dtype(weight_vd.dtype)) if wants_weight else None
        # What the weights are divided by before they enter a product in fp16.
        unit = weights_n.new_ones(())
        if dtype == torch.float16:
            unit = (weights_n.abs().sum() / max(1, len(weights_n))).clamp(min=torch.finfo(torch.float32).tiny)
        losses_n = torch.empty(len(labels_n), dtype=_softmax_dtype(hidden_nd.dtype), device=hidden_nd.device)
        cross_entropy_n = torch.empty_like(losses_n)
        correct_n = torch.empty_like(losses_n, dtype=torch.bool)
        head_vd, head_bias_v = weight_vd.to(dtype), None if bias_v is None else bias_v.to(dtype)
        vocabulary, hidden_size = weight_vd.shape
        chunk = chunk_rows(vocabulary, hidden_size, head_is_trained=wants_weight)
        for begin in range(0, len(labels_n), chunk):
            rows = slice(begin, begin + chunk)
            hidden, labels = hidden_nd[rows].to(dtype), labels_n[rows]
            logits = F.linear(hidden, head_vd, head_bias_v).to(losses_n.dtype)
            correct_n[rows] = _is_argmax(logits, labels)
            teacher_logits = None if teacher is None else teacher.logits(rows)
            wants_grad = wants_hidden or wants_weight
            if loss == "ce":
                losses, grad_logits = _cross_entropy(logits, labels, wants_grad)
                cross_entropy_n[rows] = losses
            elif loss == "kl" and teacher_logits is not None:
                losses, grad_logits, cross_entropy_n[rows] = _divergence(logits, labels, teacher_logits, wants_grad)
            else:
                cross_entropy_n[rows] = ce(logits, labels)
                losses, grad_logits = _any_loss(loss, logits, labels, teacher_logits, wants_grad)
            losses_n[rows] = losses
            if grad_logits is None:
                continue
            # The weights enter on D's side, not on V's: less to multiply, and nothing small to round before a product.
            grad_logits = grad_logits.to(dtype)
            if grad_nd is not None:
                torch.mm(grad_logits, head_vd, out=grad_nd[rows])
            if grad_vd is not None:
                weighted = (hidden * (weights_n[rows, None] / unit)).to(dtype)
                if grad_vd.dtype == dtype:
                    grad_vd.addmm_(grad_logits.t(), weighted)  # no product of the head's size beside the sum
                else:
                    grad_vd += grad_logits.t() @ weighted
        ctx.save_for_backward(grad_nd, grad_vd, weights_n, unit)
        ctx.dtypes = hidden_nd.dtype, weight_vd.dtype
        ctx.mark_non_differentiable(losses_n, correct_n, cross_entropy_n)
        return (losses_n * weights_n).sum(), losses_n, correct_n, cross_entropy_n

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        grad_nd, grad_vd, weights_n, unit = ctx.saved_tensors
        if grad_nd is not None:
            grad_nd = torch.mul(grad_nd, weights_n[:, None] * scale, out=torch.empty_like(grad_nd, dtype=ctx.dtypes[0]))
        if grad_vd is not None:
            grad_vd = torch.mul(grad_vd, unit * scale, out=torch.empty_like(grad_vd, dtype=ctx.dtypes[1]))
        return grad_nd, grad_vd, None, None, None, None, None, None


def _is_argmax(logits: Tensor, labels: Tensor) -> Tensor:
    """[N] bool. An argmax costs several maxima on a CPU: it is taken only where the label is one of them."""
    if logits.device.type != "cpu":  # where choosing rows would wait for the device
        return logits.argmax(-1) == labels
    correct = logits.gather(1, labels.unsqueeze(1)).squeeze(1) == logits.amax(-1)
    may_be = correct.nonzero().squeeze(1)
    correct[may_be] = logits[may_be].argmax(-1) == labels[may_be]
    return correct


def _cross_entropy(logits: Tensor, labels: Tensor, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Losses and d loss / d logits = softmax - one-hot, the latter in log q's own memory."""
    log_q, columns = logits.log_softmax(-1), labels.unsqueeze(1)
    losses = -log_q.gather(1, columns).squeeze(1)
    if not wants_grad:
        return losses, None
    return losses, log_q.exp_().scatter_add_(1, columns, log_q.new_full(columns.shape, -1.0))


def _divergence(
    logits: Tensor, labels: Tensor, teacher_logits: Tensor, wants_grad: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """KL(p || q), its gradient q - p, and the cross entropy: one softmax of each."""
    log_q, log_p = logits.log_softmax(-1), _log_softmax(teacher_logits)
    cross_entropy = -log_q.gather(1, labels.unsqueeze(1)).squeeze(1)
    losses = _kl(log_p, log_q)
    return losses, log_q.exp_().sub_(log_p.exp_()) if wants_grad else None, cross_entropy


def _any_loss(
    loss: str, logits: Tensor, labels: Tensor, teacher_logits: Tensor | None, wants_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses and d loss / d logits of any row loss."""
    if not wants_grad:
        return LOSSES[loss](logits, labels, teacher_logits), None
    with torch.enable_grad():
        losses = LOSSES[loss](logits.requires_grad_(), labels, teacher_logits)
        return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


def _product_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    under_autocast = torch.is_autocast_enabled(device) and weight.dtype == torch.float32
    return torch.get_autocast_dtype(device) if under_autocast else weight.dtype


def _linear(head: nn.Module) -> nn.Linear:
    if not isinstance(head, nn.Linear):
        raise ValueError(f"a loss needs a plain linear LM head, not a {type(head).__name__}")
    if head.bias is not None and head.bias.requires_grad:
        raise ValueError("a loss does not train the bias of an LM head: freeze it, or make the head with bias=False")
    return head
