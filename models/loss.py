"""The losses of the field, by the names that a recipe gives them.

p = target (the teacher), q = drafter. alpha = sum_v min(p_v, q_v) = 1 - TV(p, q) is the probability that a token which
was drafted from q is accepted (Leviathan et al., arXiv 2211.17192, section 3.2).

| name | loss of a row                                                      | source             |
|------|--------------------------------------------------------------------|--------------------|
| `ce` | -log q(label)                                                      | Medusa, 2401.10774 |
| `kl` | KL(p, q); its gradient is that of cross entropy with soft labels p | EAGLE, 2401.15077  |
| `tv` | 1 - alpha                                                          | 2211.17192         |

A loss is a function of this file and its name in `LossName` and `LOSSES`; those of `LABEL_LOSSES` have no teacher. A
recipe may also give several with a weight each (`{ce: 0.1, tv: 1.8}`): a row's loss is then their weighted sum, and a
single name is that name with weight 1.

With a reduced draft vocabulary V', p is the teacher's distribution restricted to V' and renormalised, and every row
counts. EAGLE-3's authors leave out the rows whose most likely token under the target is outside (SafeAILab/EAGLE,
eagle/traineagle3/cnets.py, and SpecForge, specforge/algorithms/eagle3/model.py: `position_mask`), and divide by all
tokens, prompts included; we by the labelled rows. A label outside V' has no `ce`.

`head_loss` computes them through an LM head in chunks of rows, so that no [N, V] tensor exists. A chunk's logits give
its losses, its argmax and, if the weight of every row is known beforehand, the gradient of its hidden states and its
share of the head's gradient; then they are dropped. (As Liger's fused linear cross entropy does, arXiv 2410.10989;
`torch.nn.functional.linear_cross_entropy` gives no argmax without a second product.)

The gradient of a trained head is computed in the forward and passed on unchanged by the backward, so that it is in
memory once. If it is large and would be added to an earlier micro-batch's, the backward computes it instead: one more
product, which saves as many bytes as the head has in fp32, for each of Medusa's heads.

If a target scales or caps its logits (`models/target_logits.py`), the product is scaled and capped in place before
anything is added. A low-rank term is a second product into the same chunk, also without an [N, V] tensor.

Rows of several depths predict the same token and have the same teacher. On a CPU such rows are processed together, with
one row of the teacher's product for all of them; on other devices every chunk would have to wait for their number.

Shapes: N rows (labelled positions), D hidden, V the head's vocabulary, T the teacher's vocabulary, P tokens, G depths,
B batch, S sequence, r rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.models.kernels.cpu_library import has_kernels
from draftsmith.models.target_logits import PLAIN, LogitShape

CHUNK_ELEMENTS = 1 << 22
# Logits in a chunk on a CPU, so that they stay in its cache.
BLOCK_ELEMENTS = 1 << 19
# Rows of a chunk on any other device, which needs some hundred operations for a byte of the head that it reads.
DEVICE_ROWS = 2048
# Never hold two gradients of a head of this size or more.
LARGE_GRADIENT_BYTES = 1 << 28


class DrafterOutput(NamedTuple):
    """The loss that is trained on, and sums per depth that add up over batches and processes."""

    loss: Tensor
    depth_loss_sum: Tensor  # [G] cross entropy in nats, summed over the labels that the head has
    depth_correct: Tensor  # [G] labels that are the argmax
    depth_count: Tensor  # [G] labels
    depth_count_in_head: Tensor  # [G] labels that the head has
    correct_bgs: Tensor  # [B, G, S] bool: the argmax is the label of this group and depth

    @property
    def depth_sums(self) -> Tensor:
        """Return the losses, correct labels, labels, and labels that the head has, [4, G] float64 without gradient."""
        sums = (self.depth_loss_sum, self.depth_correct, self.depth_count, self.depth_count_in_head)
        return torch.stack([part.detach().double() for part in sums])


# ---- losses of rows: (logits [N, V], labels [N], teacher's logits [N, V] or None) -> [N] ----


def ce(logits: Tensor, labels: Tensor, teacher_logits: Tensor | None = None) -> Tensor:
    """Compute -log q(label)."""
    return -_log_softmax(logits).gather(1, labels.unsqueeze(1)).squeeze(1)


def kl(logits: Tensor, labels: Tensor, teacher_logits: Tensor) -> Tensor:
    """Compute KL(p || q)."""
    return _kl(_log_softmax(teacher_logits), _log_softmax(logits))


def tv(logits: Tensor, labels: Tensor, teacher_logits: Tensor) -> Tensor:
    """Compute the total variation, 1 - alpha."""
    return _tv(_log_softmax(teacher_logits), _log_softmax(logits))


def smooth_l1(features: Tensor, teacher_features: Tensor) -> Tensor:
    """Compute EAGLE's regression to the target's features, beta = 1, mean over D: [..., D] twice -> [...]."""
    dtype = softmax_dtype(features.dtype)
    return F.smooth_l1_loss(features.to(dtype), teacher_features.to(dtype), reduction="none").mean(-1)


LossName = Literal["ce", "kl", "tv"]
LOSSES: dict[str, Callable[..., Tensor]] = {"ce": ce, "kl": kl, "tv": tv}
LABEL_LOSSES = {"ce"}
LossWeights = Mapping[str, float]


def loss_weights(loss: str | LossWeights) -> LossWeights:
    """Return the weight of each loss, keys of `LOSSES`, from a recipe's value."""
    return {loss: 1.0} if isinstance(loss, str) else loss


def has_teacher(loss: str | LossWeights) -> bool:
    """Return True if one of the losses compares with the target's distribution."""
    return not LABEL_LOSSES.issuperset(loss_weights(loss))


# Weights of the losses of N rows with a reduced vocabulary: [N] those of labels, 0 where the head has not the label;
# those with a teacher, None for 1.
Factors = tuple[Tensor, None]


def row_losses(
    loss: LossWeights,
    logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor | None = None,
    factors: Factors | None = None,
) -> Tensor:
    """Return the weighted sum of the losses of rows [N], each loss times its own factor of the row."""
    terms = []
    for name, weight in loss.items():
        losses, factor = LOSSES[name](logits, labels, teacher_logits), None
        if factors is not None:
            factor = factors[has_teacher(name)]
        terms.append(weight * (losses if factor is None else losses * factor))
    return torch.stack(terms).sum(0)


# ---- losses of rows with their gradients, which take the place of the logits ----


def losses_in_place(
    loss: LossWeights,
    logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor | None,
    factors: Factors | None,
    results: Sequence[Tensor],
    wants_grad: bool,
) -> None:
    """Write losses, hits (label is argmax) and cross entropies [n] to `results`; the gradient replaces the logits.

    A fourth tensor in `results` gets alpha [n]; it needs a teacher.
    """
    losses, correct, cross_entropy, *overlap = results
    is_ce = loss == {"ce": 1.0} and factors is None
    is_bf16_on_cpu = _is_on_cpu(logits) and logits.dtype == torch.bfloat16
    if is_ce and wants_grad and not overlap and is_bf16_on_cpu and has_kernels():
        # In one pass over each row, which stays in the processor's first cache.
        torch.ops.draftsmith.cross_entropy(logits, labels, losses, correct)
        cross_entropy.copy_(losses)
        return
    correct.copy_(_is_argmax(logits, labels))
    if loss == {"kl": 1.0} and teacher_logits is not None and factors is None:
        _divergence(logits, labels, teacher_logits, [losses, cross_entropy, *overlap], wants_grad)
        return
    if overlap and teacher_logits is not None:
        log_p, log_q = _log_softmax(teacher_logits), _log_softmax(logits)
        overlap[0].copy_(torch.minimum(log_p, log_q).exp_().sum(-1))
    if is_ce:
        _cross_entropy(logits, labels, losses, wants_grad)
        cross_entropy.copy_(losses)
    else:
        cross_entropy.copy_(ce(logits, labels))
        _any_loss(loss, logits, labels, teacher_logits, factors, losses, wants_grad)


def _is_argmax(logits: Tensor, labels: Tensor) -> Tensor:
    """Return [N] bool. On a CPU the costly argmax is computed only for rows whose label has the maximum."""
    if not _is_on_cpu(logits):  # where choosing rows would wait for the device
        return logits.argmax(-1) == labels
    correct = logits.gather(1, labels.unsqueeze(1)).squeeze(1) == logits.amax(-1)
    may_be = correct.nonzero().squeeze(1)
    correct[may_be] = logits[may_be].argmax(-1) == labels[may_be]
    return correct


def _cross_entropy(logits: Tensor, labels: Tensor, losses: Tensor, wants_grad: bool) -> None:
    """Compute losses, and in place of the logits d loss / d logits = softmax - one-hot."""
    columns, log_q = labels.unsqueeze(1), logits.log_softmax(-1, dtype=losses.dtype)
    losses.copy_(log_q.gather(1, columns).squeeze(1)).neg_()
    if wants_grad:
        logits.copy_(log_q.exp_().scatter_add_(1, columns, log_q.new_full(columns.shape, -1.0)))


def _divergence(
    logits: Tensor, labels: Tensor, teacher_logits: Tensor, results: Sequence[Tensor], wants_grad: bool
) -> None:
    """Compute KL(p || q), the cross entropy and, if needed, alpha; the gradient q - p replaces the logits."""
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
    loss: LossWeights,
    logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor | None,
    factors: Factors | None,
    losses: Tensor,
    wants_grad: bool,
) -> None:
    """Compute any row loss, and in place of the logits d loss / d logits."""
    precise_logits = logits.to(losses.dtype)
    if not wants_grad:
        losses.copy_(row_losses(loss, precise_logits, labels, teacher_logits, factors))
        return
    with torch.enable_grad():
        precise_logits = precise_logits.detach().requires_grad_()
        precise_losses = row_losses(loss, precise_logits, labels, teacher_logits, factors)
        (grad,) = torch.autograd.grad(precise_losses.sum(), precise_logits)
    losses.copy_(precise_losses.detach())
    logits.copy_(grad)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    # Exactly zero at p = q, where 1 - sum(min) is left with a rounding error.
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=softmax_dtype(logits.dtype))


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmaxes: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def safe_denominator(counts: Tensor) -> Tensor:
    """Return counts with 1 in place of 0; expected counts below 1 stay."""
    return torch.where(counts > 0, counts, 1)


def as_tensor_like(numbers: Tensor | Sequence[float], tensor: Tensor) -> Tensor:
    """Return a few numbers in fp32 at least on a tensor's device, without waiting for that."""
    return torch.as_tensor(numbers, dtype=softmax_dtype(tensor.dtype)).to(tensor.device, non_blocking=True)


# ---- through an LM head ----


class Teacher(NamedTuple):
    """The target's final features and LM head, which give p for N rows."""

    features_pd: Tensor  # [P, D] of all tokens
    token_n: Tensor  # [N] the token whose features predict a row's label
    head: nn.Linear | None = None  # [T, D]; None for the head that is trained through
    columns_v: Tensor | None = None  # [V] a reduced head's tokens among the T: p is the softmax over those alone
    shape: LogitShape | None = None  # from its product to logits; None: as the other head's


class HeadLoss(NamedTuple):
    """Losses of N rows through a head. Only `loss` carries a gradient; without weights only `losses_n` does."""

    loss: Tensor  # [] weighted sum
    losses_n: Tensor  # [N] of the chosen loss
    correct_n: Tensor  # [N] bool: the label is the argmax
    cross_entropy_n: Tensor  # [N] in nats, whatever the loss; 0 where the head has not the label
    acceptance_n: Tensor | None = None  # [N] alpha, on request


def head_loss(
    hidden_nd: Tensor,
    head: nn.Module,
    labels_n: Tensor,
    weights_n: Tensor | None,
    loss: str | LossWeights = "ce",
    teacher: Teacher | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    shape: LogitShape = PLAIN,
    is_reduced: bool = False,
    needs_acceptance: bool = False,
) -> HeadLoss:
    """Sum a weighted row loss of `head(hidden)`; its gradient reaches `hidden_nd` and, if that is trained, the head.

    Softmaxes are in fp32 at least, products in the head weight's dtype (with an fp32 head: in autocast's, if on). In
    fp16 the row weights meet the gradient only where the loss scale does, so that neither rounds it to zero.

    Args:
        hidden_nd: [N, D].
        head: A linear layer [V, D] whose bias, if any, is frozen.
        labels_n: [N] rows of the head.
        weights_n: [N] weight of each row in the sum. None: the caller sums `losses_n` itself, once it knows the
            weights. The gradient of a head that is trained then takes a product more.
        loss: A key of `LOSSES`, or weights of several.
        teacher: For losses with a teacher (`has_teacher`), and for `needs_acceptance`.
        low_rank: [N, r] and [V, r], whose product is added to the logits; gradients reach both.
        shape: Applied to the head's product before `low_rank` is added.
        is_reduced: Whether the head may not have a label, which is below 0 then.
        needs_acceptance: Return every row's alpha too, whatever the loss.
    """
    head, loss, is_summed = _linear(head), loss_weights(loss), weights_n is not None
    if weights_n is None:
        weights_n = torch.ones_like(labels_n, dtype=softmax_dtype(hidden_nd.dtype))
    order_n = common_n = known_n = factors = None
    if is_reduced:
        known_n = (labels_n >= 0).to(softmax_dtype(hidden_nd.dtype))
        labels_n, factors = labels_n.clamp(min=0), (known_n, None)
    if factors is not None and len({has_teacher(name) for name in loss}) == 1:
        # If all losses share one factor, multiply the rows by it, and no tensor of [N, V].
        common_n, factors = factors[has_teacher(loss)], None
        weights_n = weights_n if common_n is None else weights_n * common_n
    if has_teacher(loss) or needs_acceptance:
        if teacher is None:
            raise ValueError(f"loss `{' and '.join(loss)}` compares with the teacher: pass its rows")
        teacher = teacher._replace(features_pd=teacher.features_pd.detach(), head=_linear(teacher.head or head))
        if _is_on_cpu(hidden_nd):  # so that rows of the same token are neighbours
            order_n = teacher.token_n.argsort()
            teacher = teacher._replace(token_n=teacher.token_n[order_n])
    else:
        teacher = None
    products: list[Tensor] = [hidden_nd, head.weight, *(low_rank or ())]
    if order_n is not None:
        products[::2] = [rows.index_select(0, order_n) for rows in products[::2]]
        labels_n, weights_n, factors = labels_n[order_n], weights_n[order_n], _factors_of(factors, order_n)
    detached = [factor.detach() for factor in products]
    terms, dtype = list(zip(detached[::2], detached[1::2], strict=True)), _product_dtype(head.weight)
    with torch.autocast(hidden_nd.device.type, enabled=False):
        rows = _Rows(terms, head.bias, labels_n, weights_n, loss, factors, shape, teacher, needs_acceptance, dtype)
        loss_sum, *results = _HeadLoss.apply(rows, is_summed, *(products if torch.is_grad_enabled() else detached))
    if order_n is not None:
        back_n = order_n.argsort()
        results = [None if part is None else part.index_select(0, back_n) for part in results]
    losses_n, correct_n, cross_entropy_n, acceptance_n = results
    losses_n = losses_n if common_n is None else losses_n * common_n
    if known_n is not None:
        correct_n, cross_entropy_n = correct_n & (known_n > 0), cross_entropy_n * known_n
    return HeadLoss(loss_sum, losses_n, correct_n, cross_entropy_n, acceptance_n)


def _factors_of(factors: Factors | None, rows: Tensor | slice) -> Factors | None:
    """Return the factors of some rows."""
    return None if factors is None else (factors[0][rows], None)


def chunk_rows(vocabulary: int, hidden_size: int, head_is_trained: bool = False, device_type: str = "cpu") -> int:
    """Return the number of rows in a chunk, whose logits are in memory at the same time.

    As many as fill CHUNK_ELEMENTS, or a sixteenth of the head's own size where that is more: the products of fewer rows
    would wait for the head to be read from memory. Half its size where it is trained: every chunk reads and writes all
    of its gradient, a much larger cost. On devices other than a CPU DEVICE_ROWS at least.
    """
    rows = max(1, CHUNK_ELEMENTS // vocabulary, hidden_size // (2 if head_is_trained else 16))
    return rows if device_type == "cpu" else max(rows, DEVICE_ROWS)


@dataclass
class _Rows:
    """Inputs of an LM head for N rows, which pass through it in chunks."""

    # Products that add up to the logits, of rows [N, D] and a weight [V, D]: first the head's, with bias and shape.
    terms: list[tuple[Tensor, Tensor]]
    bias_v: Tensor | None
    labels_n: Tensor
    weights_n: Tensor
    loss: LossWeights
    factors: Factors | None
    shape: LogitShape
    teacher: Teacher | None
    needs_acceptance: bool
    dtype: torch.dtype  # of the products

    def __post_init__(self) -> None:
        self._teacher_vd = self._teacher_bias_v = None
        if self.teacher is not None and self.teacher.head is not None:
            # The columns once, rather than products with the whole vocabulary in every chunk.
            head, columns = self.teacher.head, slice(None) if self.teacher.columns_v is None else self.teacher.columns_v
            dtype = _product_dtype(head.weight)
            self._teacher_vd = head.weight.detach()[columns].to(dtype)
            self._teacher_bias_v = None if head.bias is None else head.bias[columns].to(dtype)

    def _teacher_logits(self, rows: slice, out_cv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Write the teacher's logits of these rows into `out_cv`.

        On a CPU neighbours that read the same features [P, D] are computed once; the second result then maps each row
        to its logits, and is None elsewhere.
        """
        assert self.teacher is not None
        assert self._teacher_vd is not None
        token_c, place_c = self.teacher.token_n[rows], None
        if _is_on_cpu(self.labels_n):
            token_c, place_c = token_c.unique_consecutive(return_inverse=True)
        logits = out_cv[: len(token_c)]
        hidden = self.teacher.features_pd.index_select(0, token_c).to(logits.dtype)
        _product(hidden, self._teacher_vd, self._teacher_bias_v, logits)
        shape = self.shape if self.teacher.shape is None else self.teacher.shape
        return shape.apply_(logits), place_c

    @property
    def unit(self) -> Tensor:
        """Return the scalar to divide the rows' weights by: fp16 would round the small weights to zero."""
        if self.dtype != torch.float16:
            return self.weights_n.new_ones(())
        mean = self.weights_n.abs().sum() / max(1, len(self.weights_n))
        return mean.clamp(min=torch.finfo(torch.float32).tiny)

    def take(
        self, needs_grad: Sequence[tuple[bool, bool]]
    ) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None]]:
        """Compute losses and gradients of all rows, chunk by chunk.

        Args:
            needs_grad: For each term whether gradients of its rows and of its weight are needed.

        Returns:
            `losses_in_place`'s results [N]; of each term the gradients [N, D] of the unweighted losses by its rows, and
            of the weighted sum by its weight.
        """
        hidden_nd, weight_vd = self.terms[0]
        # Of the unweighted losses: a weight is 1 / N or less, and with it fp16 needs the loss scale of the backward.
        row_grads = [
            torch.empty_like(rows_nd, dtype=self.dtype) if of_rows else None
            for (rows_nd, _), (of_rows, _) in zip(self.terms, needs_grad, strict=True)
        ]
        # A sum over chunks, so in fp32 at least.
        weight_grads = [
            torch.zeros_like(weight, dtype=softmax_dtype(weight.dtype)) if of_weight else None
            for (_, weight), (_, of_weight) in zip(self.terms, needs_grad, strict=True)
        ]
        weights_n = self.weights_n / self.unit
        losses_n = torch.empty(len(self.labels_n), dtype=softmax_dtype(hidden_nd.dtype), device=hidden_nd.device)
        results = [losses_n, torch.empty_like(losses_n, dtype=torch.bool), torch.empty_like(losses_n)]
        results += [torch.empty_like(losses_n)] if self.needs_acceptance else []
        head_bias_v = None if self.bias_v is None else self.bias_v.to(self.dtype)
        weights = [weight.to(self.dtype) for _, weight in self.terms]
        vocabulary, hidden_size = weight_vd.shape
        chunk = chunk_rows(vocabulary, hidden_size, needs_grad[0][1], hidden_nd.device.type)
        chunk = min(chunk, max(1, len(self.labels_n)))
        logits_cv = weights[0].new_empty(chunk, vocabulary)
        teacher_cv = None if self._teacher_vd is None else self._teacher_vd.new_empty(chunk, vocabulary)
        block_rows = max(1, BLOCK_ELEMENTS // vocabulary) if _is_on_cpu(hidden_nd) else chunk
        for begin in range(0, len(self.labels_n), chunk):
            rows = slice(begin, min(begin + chunk, len(self.labels_n)))
            size = rows.stop - begin
            logits, inputs = logits_cv[:size], [rows_nd[rows].to(self.dtype) for rows_nd, _ in self.terms]
            _product(inputs[0], weights[0], head_bias_v, logits)
            slope = self.shape.slope(self.shape.apply_(logits))
            for part, weight in zip(inputs[1:], weights[1:], strict=True):
                _product(part, weight, logits, logits)
            teacher_logits = place_c = None
            if teacher_cv is not None:
                teacher_logits, place_c = self._teacher_logits(rows, teacher_cv)
            labels, of_chunk, factors = self.labels_n[rows], [part[rows] for part in results], self.factors
            for first in range(0, size, block_rows):
                block = slice(first, first + block_rows)
                of_block = (
                    None if teacher_logits is None else teacher_logits[block if place_c is None else place_c[block]]
                )
                losses_in_place(
                    self.loss,
                    logits[block],
                    labels[block],
                    of_block,
                    _factors_of(_factors_of(factors, rows), block),
                    [part[block] for part in of_chunk],
                    any(map(any, needs_grad)),
                )
            # The weights enter on D's side, not on V's: less to multiply, and nothing small to round before a product.
            # The head's comes last: only what is before its shape has that slope.
            terms = [*zip(inputs, weights, row_grads, weight_grads, strict=True)]
            for place, (part, weight, grad_nd, grad_vd) in reversed([*enumerate(terms)]):
                if place == 0 and not self.shape.is_plain:
                    logits.mul_(slope)
                if grad_nd is not None:
                    torch.mm(logits, weight, out=grad_nd[rows])
                if grad_vd is not None:
                    _add_product(grad_vd, logits, (part * weights_n[rows, None]).to(self.dtype))
        return results, row_grads, weight_grads


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: _Rows, is_summed: bool, *factors: Tensor) -> tuple[Tensor | None, ...]:
        """Compute loss and gradients; factors: rows and weight of each term, with their gradients."""
        needed, weights_n, ctx.summed = ctx.needs_input_grad[2:], rows.weights_n, is_summed
        keeps = [
            needs and ctx.summed and not _would_hold_two_large_gradients(weight)
            for needs, weight in zip(needed[1::2], factors[1::2], strict=True)
        ]
        (losses_n, *others), row_grads, ctx.weight_grads = rows.take(list(zip(needed[::2], keeps, strict=True)))
        ctx.save_for_backward(weights_n, *row_grads)
        ctx.rows = rows if any(needed[1::2]) else None
        ctx.needed, ctx.dtypes = needed, [factor.dtype for factor in factors]
        loss_sum = (losses_n * weights_n).sum()
        ctx.mark_non_differentiable(losses_n if ctx.summed else loss_sum, *others)
        return loss_sum, losses_n, *others, *([] if rows.needs_acceptance else [None])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        weights_n, *row_grads = ctx.saved_tensors
        if not ctx.summed:
            weights_n, scale = grad_outputs[1], torch.ones_like(scale)
            if ctx.rows is not None:
                ctx.rows.weights_n = weights_n
        weight_grads = ctx.weight_grads
        ctx.weight_grads = [None] * len(row_grads)  # a second backward computes them again
        missing = [needs and grad is None for needs, grad in zip(ctx.needed[1::2], weight_grads, strict=True)]
        if any(missing):
            _, _, computed = ctx.rows.take([(False, needs) for needs in missing])
            weight_grads = [again if grad is None else grad for grad, again in zip(weight_grads, computed, strict=True)]
        grads: list[Tensor | None] = []
        for place, (grad_nd, grad_vd) in enumerate(zip(row_grads, weight_grads, strict=True)):
            if grad_nd is not None:
                scaled_nd = torch.empty_like(grad_nd, dtype=ctx.dtypes[2 * place])
                grad_nd = torch.mul(grad_nd, weights_n[:, None] * scale, out=scaled_nd)
            if grad_vd is not None:
                grad_vd = grad_vd.mul_(ctx.rows.unit * scale).to(ctx.dtypes[2 * place + 1])
            grads += [grad_nd, grad_vd]
        return None, None, *grads


def _would_hold_two_large_gradients(weight: Tensor) -> bool:
    """Return True if the weight is large and already holds the gradient of an earlier micro-batch."""
    is_large = weight.numel() * softmax_dtype(weight.dtype).itemsize >= LARGE_GRADIENT_BYTES
    return is_large and weight.is_leaf and weight.grad is not None


def _product(hidden: Tensor, weight_vd: Tensor, added: Tensor | None, out: Tensor) -> None:
    """Compute hidden W^T + `added`, [V] or `out` itself, into `out`."""
    if added is None:
        torch.mm(hidden, weight_vd.t(), out=out)
    else:
        torch.addmm(added, hidden, weight_vd.t(), out=out)


def _add_product(total_vd: Tensor, logits: Tensor, rows: Tensor) -> None:
    """Add logits^T rows to the total."""
    if total_vd.dtype == logits.dtype:
        torch.addmm(total_vd, logits.t(), rows, out=total_vd)  # no second tensor of the head's size
    else:
        total_vd += logits.t() @ rows


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _product_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of products with this weight: autocast's for fp32 weights, if it is on."""
    device = weight.device.type
    under_autocast = torch.is_autocast_enabled(device) and weight.dtype == torch.float32
    return torch.get_autocast_dtype(device) if under_autocast else weight.dtype


def _linear(head: nn.Module) -> nn.Linear:
    """Return the head if it is a linear layer whose bias is not trained; raise ValueError otherwise."""
    if not isinstance(head, nn.Linear):
        raise ValueError(f"a loss needs a plain linear LM head, not a {type(head).__name__}")
    if head.bias is not None and head.bias.requires_grad:
        raise ValueError("a loss does not train the bias of an LM head: freeze it, or make the head with bias=False")
    return head
