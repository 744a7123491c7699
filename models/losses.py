"""The losses of the field, by the names that a recipe gives them.

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

They are taken through the LM head in `head_loss.py`.

Shapes: N rows (labelled positions), D hidden, V vocabulary, G depths, B batch, S sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import ModelOutput

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
    # In place of `loss`, where the rows' weights are still to come:
    losses_n: Tensor | None = None  # [N]
    cross_entropy_n: Tensor | None = None  # [N] in nats; infinite for labels that cannot be drafted
    overlap_n: Tensor | None = None  # [N] alpha of these rows, where it is asked for


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
    dtype = softmax_dtype(features.dtype)
    return F.smooth_l1_loss(features.to(dtype), teacher_features.to(dtype), reduction="none").mean(-1)


LossName = Literal["ce", "kl", "tv", "lk_alpha", "lk_lambda"]
LOSSES: dict[str, Callable[..., Tensor]] = {"ce": ce, "kl": kl, "tv": tv, "lk_alpha": lk_alpha, "lk_lambda": lk_lambda}
TEACHER_LOSSES = frozenset(LOSSES) - {"ce"}


# ---- the same with gradients, in place of the logits ----


def losses_in_place(
    loss: str,
    logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor | None,
    results: Sequence[Tensor],
    wants_grad: bool,
) -> None:
    """Fill in losses, whether the label is the argmax, and cross entropies [n]; their gradient replaces the logits.

    With a teacher there may be a fourth result, alpha [n].
    """
    losses, correct, cross_entropy, *overlap = results
    correct.copy_(_is_argmax(logits, labels))
    if loss == "kl" and teacher_logits is not None:
        _divergence(logits, labels, teacher_logits, [losses, cross_entropy, *overlap], wants_grad)
        return
    if overlap and teacher_logits is not None:
        log_p, log_q = _log_softmax(teacher_logits), _log_softmax(logits)
        overlap[0].copy_(torch.minimum(log_p, log_q).exp_().sum(-1))
    if loss == "ce":
        _cross_entropy(logits, labels, losses, wants_grad)
        cross_entropy.copy_(losses)
    else:
        cross_entropy.copy_(ce(logits, labels))
        _any_loss(loss, logits, labels, teacher_logits, losses, wants_grad)


def _is_argmax(logits: Tensor, labels: Tensor) -> Tensor:
    """[N] bool. An argmax costs several maxima on a CPU: it is taken only where the label is one of them."""
    if logits.device.type != "cpu":  # where choosing rows would wait for the device
        return logits.argmax(-1) == labels
    correct = logits.gather(1, labels.unsqueeze(1)).squeeze(1) == logits.amax(-1)
    may_be = correct.nonzero().squeeze(1)
    correct[may_be] = logits[may_be].argmax(-1) == labels[may_be]
    return correct


def _cross_entropy(logits: Tensor, labels: Tensor, losses: Tensor, wants_grad: bool) -> None:
    """Losses, and in place of the logits d loss / d logits = softmax - one-hot."""
    columns, log_q = labels.unsqueeze(1), logits.log_softmax(-1, dtype=losses.dtype)
    losses.copy_(log_q.gather(1, columns).squeeze(1)).neg_()
    if wants_grad:
        logits.copy_(log_q.exp_().scatter_add_(1, columns, log_q.new_full(columns.shape, -1.0)))


def _divergence(
    logits: Tensor, labels: Tensor, teacher_logits: Tensor, results: Sequence[Tensor], wants_grad: bool
) -> None:
    """KL(p || q), the cross entropy and, if asked for, alpha; the gradient q - p replaces the logits."""
    losses, cross_entropy, *overlap = results
    log_q, log_p = (part.log_softmax(-1, dtype=losses.dtype) for part in (logits, teacher_logits))
    cross_entropy.copy_(log_q.gather(1, labels.unsqueeze(1)).squeeze(1)).neg_()
    p = log_p.exp()
    losses.copy_(torch.linalg.vecdot(p, log_p.sub_(log_q)))
    q = log_q.exp_()
    if overlap:
        overlap[0].copy_(torch.minimum(p, q).sum(-1))
    if wants_grad:
        logits.copy_(q.sub_(p))


def _any_loss(
    loss: str, logits: Tensor, labels: Tensor, teacher_logits: Tensor | None, losses: Tensor, wants_grad: bool
) -> None:
    """Losses, and in place of the logits d loss / d logits, of any row loss."""
    logits_there = logits.to(losses.dtype)
    if not wants_grad:
        losses.copy_(LOSSES[loss](logits_there, labels, teacher_logits))
        return
    with torch.enable_grad():
        logits_there = logits_there.detach().requires_grad_()
        losses_there = LOSSES[loss](logits_there, labels, teacher_logits)
        (grad,) = torch.autograd.grad(losses_there.sum(), logits_there)
    losses.copy_(losses_there.detach())
    logits.copy_(grad)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    # Exactly zero at p = q, where 1 - sum(min) is left with a rounding error.
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=softmax_dtype(logits.dtype))


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def one_for_none(counts: Tensor) -> Tensor:
    """Counts to divide by: expected ones may lie below 1, and where there is none there is nothing to divide."""
    return torch.where(counts > 0, counts, 1)


def numbers_beside(tensor: Tensor, numbers: Tensor | Sequence[float]) -> Tensor:
    """A few numbers in fp32 at least on a tensor's device, without waiting for that."""
    return torch.as_tensor(numbers, dtype=softmax_dtype(tensor.dtype)).to(tensor.device, non_blocking=True)
