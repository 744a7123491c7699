"""The losses of the field, by the names that a recipe gives them, through an LM head.

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

`head_loss` computes them in chunks of rows, so that no [M, V] tensor exists: autograd runs for each chunk in the
forward, and only the gradients of the rows and of the head are kept. (As Liger's fused linear cross entropy does, arXiv
2410.10989; `torch.nn.functional.linear_cross_entropy` gives no argmax without a second product.) A chunk is as
large as its product wants it, and its softmaxes are computed by blocks, which fit into a CPU's cache.

Shapes: M rows (labelled positions), m of a block, D hidden, V the head's vocabulary, T the teacher's vocabulary, P
tokens, G depths, B batch, S sequence, r rank.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.models.kernels.cpu_library import has_kernels
from draftsmith.models.target_logits import PLAIN, LogitShape

CHUNK_ELEMENTS = 1 << 22
MOST_ROWS = 512  # of a chunk, if its product needs no more
# Logits of a block on a CPU, so that they stay in its cache, and on other devices.
BLOCK_ELEMENTS = 1 << 19
DEVICE_BLOCK_ELEMENTS = 1 << 25
# Rows of a chunk on any device but a CPU, which needs some hundred operations for a byte of the head that it reads.
DEVICE_ROWS = 2048
# Rows of a weight's gradient in one sum.
WEIGHT_ROWS = 4096
# Never hold two gradients of a head of this size or more.
LARGE_GRADIENT_BYTES = 1 << 28


class DrafterOutput(NamedTuple):
    """The loss of a training step, and sums by depth that can be added over batches and processes."""

    loss: Tensor
    depth_loss_sum: Tensor  # [G] cross entropy in nats, summed over the labels that the head has
    depth_correct: Tensor  # [G] labels that are the argmax
    depth_count: Tensor  # [G] labels
    depth_count_in_head: Tensor  # [G] labels that the head has
    correct_bgs: Tensor  # [B, G, S] bool: the argmax is the label of this group and depth

    @property
    def depth_sums(self) -> Tensor:
        """Return loss sums, correct labels, labels, and labels in the head, by depth: [4, G] float64, no gradient."""
        sums = (self.depth_loss_sum, self.depth_correct, self.depth_count, self.depth_count_in_head)
        return torch.stack([part.detach().double() for part in sums])


# ---- losses of rows: (log q [m, V], labels [m], log p [m, V] or None) -> [m] ----


def ce(log_q: Tensor, labels: Tensor, log_p: Tensor | None = None) -> Tensor:
    """Compute the cross entropy -log q(label) of each row, [m]."""
    return F.nll_loss(log_q, labels, reduction="none")


def kl(log_q: Tensor, labels: Tensor, log_p: Tensor) -> Tensor:
    """Compute KL(p || q) of each row, [m]; p is the target's distribution, q the drafter's."""
    p = log_p.exp()
    return torch.linalg.vecdot(p, log_p) - torch.linalg.vecdot(p, log_q)


def tv(log_q: Tensor, labels: Tensor, log_p: Tensor) -> Tensor:
    """Compute the total variation 1 - alpha of each row, [m]; exactly 0 at p = q, unlike 1 - sum(min(p, q))."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def smooth_l1(features: Tensor, teacher_features: Tensor) -> Tensor:
    """Compute EAGLE's regression loss [...]: SmoothL1 (beta = 1) of features [..., D], mean over D."""
    dtype = softmax_dtype(features.dtype)
    return F.smooth_l1_loss(features.to(dtype), teacher_features.to(dtype), reduction="none").mean(-1)


LossName = Literal["ce", "kl", "tv"]
LOSSES: dict[str, Callable[..., Tensor]] = {"ce": ce, "kl": kl, "tv": tv}
LABEL_LOSSES = {"ce"}
LossWeights = Mapping[str, float]


def loss_weights(loss: str | LossWeights) -> LossWeights:
    """Return a recipe's `loss` as weights by the losses' names; a single name has weight 1."""
    return {loss: 1.0} if isinstance(loss, str) else loss


def has_teacher(loss: str | LossWeights) -> bool:
    """Return True if one of the losses compares with the target's distribution."""
    return not LABEL_LOSSES.issuperset(loss_weights(loss))


def is_on_cpu(tensor: Tensor) -> bool:
    """Return True if the tensor is on the CPU, where reading a value does not wait for a device."""
    return tensor.device.type == "cpu"


def is_argmax(logits: Tensor, labels: Tensor) -> Tensor:
    """Return [m] bool, True where a label is the argmax of its row. On a CPU, few argmaxes are computed."""
    if not is_on_cpu(logits):  # where choosing rows would wait for the device
        return logits.argmax(-1) == labels
    correct = logits.gather(1, labels.unsqueeze(1)).squeeze(1) == logits.amax(-1)
    may_be = correct.nonzero().squeeze(1)
    correct[may_be] = logits[may_be].argmax(-1) == labels[may_be]
    return correct


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which softmaxes are computed: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def safe_denominator(counts: Tensor) -> Tensor:
    """Replace counts of 0 by 1, so that they can be divisors; expected counts between 0 and 1 stay."""
    return torch.where(counts > 0, counts, 1)


def as_tensor_like(numbers: Tensor | Sequence[float], tensor: Tensor) -> Tensor:
    """Return numbers as a tensor on the device of `tensor`, in fp32 at least, without waiting for the device."""
    return torch.as_tensor(numbers, dtype=softmax_dtype(tensor.dtype)).to(tensor.device, non_blocking=True)


# ---- through an LM head ----


class Teacher(NamedTuple):
    """The target's final features and LM head, from which losses compute p."""

    features_pd: Tensor  # [P, D] of all tokens
    head: nn.Linear  # [T, D]
    columns_v: Tensor | None = None  # [V] a reduced head's tokens among the T: p is the softmax over those alone
    shape: LogitShape = PLAIN  # from its product to logits


class HeadRows(NamedTuple):
    """The labelled rows of one LM head, with labels and weights; the rows of a group are ordered by depth."""

    label_m: Tensor  # columns of the logits; below 0 where the head does not have the label
    weight_m: Tensor  # of the losses
    before_m: Tensor  # place among the P tokens of the token before the label, whose feature predicts it
    group_m: Tensor  # number of the group
    depth_m: Tensor  # from 0
    token_m: Tensor  # the token before the label
    every_weight_m: Tensor  # `weight_m` as if the head had all labels

    @classmethod
    def flat(cls, label_m: Tensor, weight_m: Tensor, before_m: Tensor) -> "HeadRows":
        """Return rows for groups of one depth, without auxiliary losses."""
        depth_m = before_m.new_zeros(()).expand_as(before_m)
        return cls(label_m, weight_m, before_m, before_m, depth_m, before_m, weight_m)

    def at(self, rows: slice | Tensor) -> "HeadRows":
        """Return the rows that a slice or indices select."""
        return HeadRows(*(field[rows] for field in self))


class HeadBlock(NamedTuple):
    """Input of an auxiliary loss: tensors of a block of rows. The drafter gets gradients through the first three."""

    hidden_md: Tensor  # inputs of the LM head
    previous_mr: Tensor | None  # see `head_loss`
    logits_mv: Tensor
    log_q_mv: Tensor
    log_p_mv: Tensor | None
    rows: HeadRows


class AuxiliaryLoss(NamedTuple):
    """A loss that a kind adds to the loss of an LM head's rows."""

    losses_m: Tensor
    weights_m: Tensor
    is_correct_m: Tensor | None = None  # bool, the label is drafted; None: the label is the head's argmax


class HeadLoss(NamedTuple):
    """Losses of M rows through an LM head; only `loss` has a gradient."""

    loss: Tensor  # [] weighted sum
    cross_entropy_m: Tensor  # in nats, whatever the loss; inf where the head does not have the label
    correct_m: Tensor  # bool: the label is drafted


def head_loss(
    head: nn.Module,
    hidden_md: Tensor,
    rows: HeadRows,
    loss: str | LossWeights = "ce",
    teacher: Teacher | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    shape: LogitShape = PLAIN,
    auxiliary: Callable[[HeadBlock], AuxiliaryLoss | None] | None = None,
    parameters: Sequence[Tensor] = (),
    wrong_pg: Tensor | None = None,
) -> HeadLoss:
    """Sum the weighted losses of M rows through an LM head; `hidden_md`, head and `parameters` get gradients.

    Softmaxes are in fp32 at least, products in the head weight's dtype (with an fp32 head: in autocast's, if on).

    Args:
        head: A linear layer [V, D] whose bias, if any, is frozen.
        hidden_md: Its inputs [M, D].
        rows: Labels and weights. In fp16, whose gradients underflow, use weights near 1 and divide the sum later.
        loss: Name of a loss in `LOSSES`, or weights of several by name.
        teacher: Gives p, for losses with a teacher (`has_teacher`) and auxiliary losses that read p.
        low_rank: Factors [M, r] and [V, r] of a bias that is added to the logits (Markov head).
        shape: Scale and cap of the head's product, applied before `low_rank` is added.
        auxiliary: Returns an additional loss of a block of rows, or None.
        parameters: Trained parameters that only `auxiliary` reads.
        wrong_pg: Bool [P, G], set here to True where a prediction is wrong. Deeper rows of that group then have no
            loss (accept-until-fail training, 2607.01893). None: all rows have a loss.

    Raises:
        ValueError: The head is no linear layer or has a trained bias, or a loss needs a teacher and none is given.
    """
    if not isinstance(head, nn.Linear):
        raise ValueError(f"a loss needs a plain linear LM head, not a {type(head).__name__}")
    if head.bias is not None and head.bias.requires_grad:
        raise ValueError("a loss does not train the bias of an LM head: freeze it, or make the head with bias=False")
    loss = loss_weights(loss)
    if has_teacher(loss) and teacher is None:
        raise ValueError(f"loss `{' and '.join(loss)}` compares with the target's distribution: pass `teacher`")
    inputs, weights = [hidden_md], [head.weight]
    if low_rank is not None:
        inputs, weights = [hidden_md, low_rank[0]], [head.weight, low_rank[1]]
    order_m = None
    if teacher is not None and is_on_cpu(hidden_md):  # so that rows of the same token are neighbours
        order_m = rows.before_m.argsort(stable=True)
        inputs, rows = [rows_mx.index_select(0, order_m) for rows_mx in inputs], rows.at(order_m)
    sums = _HeadSums(head, rows, loss, teacher, shape, auxiliary, wrong_pg, len(inputs), bool(parameters))
    tensors = [*inputs, *weights, *parameters]
    if not torch.is_grad_enabled():  # of which a Function's `needs_input_grad` knows nothing
        tensors = [each.detach() for each in tensors]
    with torch.autocast(hidden_md.device.type, enabled=False):
        total = _SumOfChunks.apply(sums, *tensors)
    nats_m, correct_m = sums.nats_m.masked_fill_(rows.label_m < 0, float("inf")), sums.correct_m
    if order_m is not None:
        back_m = order_m.argsort()
        nats_m, correct_m = nats_m[back_m], correct_m[back_m]
    return HeadLoss(total, nats_m, correct_m)


class _HeadSums:
    """The losses of an LM head's rows and their gradients, summed over chunks; inside a chunk over blocks of rows.

    Autograd computes the gradients of logits and auxiliary losses. Those of the products are computed here, so that a
    weight's is summed without a second tensor of its size.

    Arguments are those of `head_loss`; `num_inputs` tensors have a row for each of the M rows.
    """

    def __init__(
        self,
        linear: nn.Linear,
        rows: HeadRows,
        loss: LossWeights,
        teacher: Teacher | None,
        shape: LogitShape,
        auxiliary: Callable[[HeadBlock], AuxiliaryLoss | None] | None,
        wrong_pg: Tensor | None,
        num_inputs: int,
        has_parameters: bool,
    ) -> None:
        self.rows, self.loss, self.teacher, self.shape, self.auxiliary = rows, loss, teacher, shape, auxiliary
        self.wrong_pg, self.num_inputs, self.dtype = wrong_pg, num_inputs, product_dtype(linear.weight)
        device, num_rows = linear.weight.device, len(rows.label_m)
        self._is_on_cpu, self._known_m = is_on_cpu(linear.weight), rows.label_m >= 0
        self._label_m = rows.label_m.clamp(min=0)
        self._weights = {
            name: weight * rows.weight_m * (self._known_m if name in LABEL_LOSSES else 1.0)
            for name, weight in loss.items()
        }
        if wrong_pg is not None:
            self._is_earlier_mg = torch.arange(wrong_pg.shape[1], device=device) < rows.depth_m[:, None]
        self._bias_v = None if linear.bias is None else linear.bias.detach().to(self.dtype)
        self.nats_m = torch.empty(num_rows, dtype=softmax_dtype(self.dtype), device=device)
        self.correct_m = torch.empty_like(self.nats_m, dtype=torch.bool)
        vocabulary, hidden_size = linear.weight.shape
        chunk = chunk_rows(vocabulary, hidden_size, linear.weight.requires_grad, device.type)
        self.chunks = [slice(begin, min(begin + chunk, num_rows)) for begin in range(0, num_rows, chunk)]
        # Cross entropy of bf16 on a CPU, and its gradient, are one pass over each row.
        is_ce = loss.keys() == {"ce"} and auxiliary is None
        self._has_one_pass = is_ce and self._is_on_cpu and self.dtype == torch.bfloat16 and has_kernels()
        # The gradients of further parameters are as large as the vocabulary, so there is one for a chunk.
        self._block_rows = chunk
        if not (self._has_one_pass or (self._is_on_cpu and has_parameters)):
            self._block_rows = max(1, (BLOCK_ELEMENTS if self._is_on_cpu else DEVICE_BLOCK_ELEMENTS) // vocabulary)
        if teacher is not None:
            # The columns once, rather than products with the whole vocabulary in every chunk.
            columns = slice(None) if teacher.columns_v is None else teacher.columns_v
            self._teacher_vd, bias_v = teacher.head.weight.detach()[columns].to(self.dtype), teacher.head.bias
            self._teacher_bias_v = None if bias_v is None else bias_v.detach()[columns].to(self.dtype)

    def sum_chunks(self, tensors: Sequence[Tensor], required: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """Return the sum of the losses of all rows, and its gradients by the tensors that need one.

        Tensors are the inputs [M, ...], a weight [V, ...] for each of them, and further parameters.
        """
        split, total, needs_grad = self.num_inputs, self.nats_m.new_zeros(()), any(required)
        inputs, weights = tensors[:split], [each.detach().to(self.dtype) for each in tensors[split : 2 * split]]
        # Of what has no row for each row, the gradient is a sum over chunks, so in fp32 at least.
        grads = [
            torch.zeros_like(each, dtype=each.dtype if place < split else softmax_dtype(each.dtype)) if needs else None
            for place, (each, needs) in enumerate(zip(tensors, required, strict=True))
        ]
        read_by_auxiliary = [place for place, needs in enumerate(required) if needs and not split <= place < 2 * split]
        for chunk in self.chunks:
            parts = [each[chunk].detach().to(self.dtype) for each in inputs]
            products = [F.linear(parts[0], weights[0], self._bias_v)]
            products += [F.linear(*pair) for pair in zip(parts[1:], weights[1:], strict=True)]
            with torch.set_grad_enabled(needs_grad):
                shaped = self.shape(products[0].requires_grad_(needs_grad))
                logits = shaped if split == 1 else shaped + products[1].requires_grad_(needs_grad)
            held = logits.detach()  # no operation reads the logits again: their gradient takes their place
            self._read_teacher(chunk)
            for begin in range(chunk.start, chunk.stop, self._block_rows):
                block = slice(begin, min(begin + self._block_rows, chunk.stop))
                block_mv = held[block.start - chunk.start : block.stop - chunk.start]
                if self._has_one_pass:
                    total.add_(self._loss_in_place(block, block_mv))
                    continue
                read = [each[block].detach().requires_grad_(needs_grad) for each in inputs] if self.auxiliary else []
                leaf = block_mv.detach().requires_grad_(needs_grad)
                with torch.set_grad_enabled(needs_grad):
                    loss = self._block_loss(block, block.start - chunk.start, leaf, read)
                total.add_(loss.detach())
                if needs_grad:
                    places = read_by_auxiliary if self.auxiliary else []
                    sources = [read[place] if place < split else tensors[place] for place in places]
                    gradient_mv, *found = torch.autograd.grad(loss, [leaf, *sources], allow_unused=True)
                    block_mv.copy_(gradient_mv)
                    for place, gradient in zip(places, found, strict=True):
                        whole = grads[place]
                        if gradient is not None and whole is not None:
                            (whole[block] if place < split else whole).add_(gradient)
            if not needs_grad:
                continue
            for place, gradient in enumerate(torch.autograd.grad(logits, products, held)):
                of_rows, of_weight = grads[place], grads[split + place]
                if of_rows is not None:
                    of_rows[chunk] += gradient @ weights[place]
                if of_weight is not None:
                    # By rows of the weight, so that a product that is added in fp32 stays in a CPU's cache.
                    for total_vd, gradient_vm in zip(
                        of_weight.split(WEIGHT_ROWS), gradient.T.split(WEIGHT_ROWS), strict=True
                    ):
                        if total_vd.dtype == self.dtype:
                            total_vd.addmm_(gradient_vm, parts[place])
                        else:
                            total_vd += gradient_vm @ parts[place]
        return total, grads

    def _read_teacher(self, chunk: slice) -> None:
        """Compute the teacher's logits of a chunk."""
        if self.teacher is None:
            return
        token_c, self._place_c = self.rows.before_m[chunk], None
        if self._is_on_cpu:  # neighbours that read the same features are computed once
            token_c, self._place_c = token_c.unique_consecutive(return_inverse=True)
        features = self.teacher.features_pd.detach().index_select(0, token_c).to(self.dtype)
        self._teacher_logits = self.teacher.shape(F.linear(features, self._teacher_vd, self._teacher_bias_v))

    def _block_loss(self, block: slice, begin: int, logits: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return the loss of a block of rows, which begins at row `begin` of its chunk, and note which are right."""
        known_m, label_m, log_p = self._known_m[block], self._label_m[block], None
        log_q = logits.log_softmax(-1, dtype=self.nats_m.dtype)
        if self.teacher is not None:
            place: slice | Tensor = slice(begin, begin + len(logits))
            place = place if self._place_c is None else self._place_c[place]
            log_p = self._teacher_logits[place].log_softmax(-1, dtype=self.nats_m.dtype)
        correct_m, losses = is_argmax(logits.detach(), label_m) & known_m, list[Tensor]()
        nats_m = ce(log_q, label_m)
        for name, weight_m in self._weights.items():
            losses_m = nats_m if name == "ce" else LOSSES[name](log_q, label_m, log_p)
            losses.append(weight_m[block] * losses_m)
        if self.auxiliary is not None:
            previous_mr = inputs[1] if len(inputs) > 1 else None
            rows = HeadBlock(inputs[0], previous_mr, logits, log_q, log_p, self.rows.at(block))
            auxiliary = self.auxiliary(rows)
            if auxiliary is not None:
                losses.append(auxiliary.losses_m * auxiliary.weights_m)
                correct_m = correct_m if auxiliary.is_correct_m is None else auxiliary.is_correct_m
        self.nats_m[block], self.correct_m[block] = nats_m.detach(), correct_m
        reached = self._reached(block)
        total_m = losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)
        return total_m.sum() if reached is None else (total_m * reached).sum()

    def _loss_in_place(self, block: slice, logits: Tensor) -> Tensor:
        """Return the cross entropy of a block of rows, note which are right, and replace the logits by its gradient."""
        weight_m, nats_m, correct_m = self._weights["ce"][block], self.nats_m[block], self.correct_m[block]
        torch.ops.draftsmith.cross_entropy(logits, self._label_m[block], weight_m, nats_m, correct_m)
        correct_m &= self._known_m[block]
        reached = self._reached(block)
        if reached is not None:
            logits.mul_(reached[:, None])
        return (nats_m * weight_m if reached is None else nats_m * weight_m * reached).sum()

    def _reached(self, block: slice) -> Tensor | None:
        """Note which rows are wrong; return False for rows after their group's first error, None if all rows count."""
        if self.wrong_pg is None:
            return None
        group_m = self.rows.group_m[block]
        self.wrong_pg[group_m, self.rows.depth_m[block]] = ~self.correct_m[block]
        return ~(self.wrong_pg[group_m] & self._is_earlier_mg[block]).any(1)


class _SumOfChunks(torch.autograd.Function):
    """Sum of the losses of M rows, whose gradients are computed in the forward, chunk by chunk.

    The gradients of weights are in memory until the backward. A large one that would be added to that of an earlier
    micro-batch is computed in the backward instead, by one more pass.
    """

    @staticmethod
    def forward(ctx: Any, sums: _HeadSums, *tensors: Tensor) -> Tensor:
        needed = list(zip(ctx.needs_input_grad[1:], tensors, strict=True))
        ctx.later = [needs and _would_hold_two_large_gradients(each) for needs, each in needed]
        at_once = [needs and not later for (needs, _), later in zip(needed, ctx.later, strict=True)]
        total, ctx.grads = sums.sum_chunks(tensors, at_once)
        ctx.sums = sums if any(ctx.later) else None
        ctx.save_for_backward(*tensors)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        tensors, grads = ctx.saved_tensors, ctx.grads
        if any(ctx.later):
            _, computed = ctx.sums.sum_chunks(tensors, ctx.later)
            grads = [now if later is None else later for now, later in zip(grads, computed, strict=True)]
        ctx.grads = None
        for grad in grads:
            if grad is not None:
                grad.mul_(grad_outputs[0])
        return None, *(None if grad is None else grad.to(each.dtype) for grad, each in zip(grads, tensors, strict=True))


def _would_hold_two_large_gradients(weight: Tensor) -> bool:
    """Return True if the weight is large and already holds the gradient of an earlier micro-batch."""
    is_large = weight.numel() * softmax_dtype(weight.dtype).itemsize >= LARGE_GRADIENT_BYTES
    return is_large and weight.is_leaf and weight.grad is not None


def chunk_rows(vocabulary: int, hidden_size: int, head_is_trained: bool = False, device_type: str = "cpu") -> int:
    """Return the number of rows in a chunk, whose logits are in memory at the same time.

    Their logits fill CHUNK_ELEMENTS, or a sixteenth of the head's size if that is more: products of fewer rows would
    wait for the head to be read from memory. For a trained head it is half its size, since every chunk reads and writes
    the head's whole gradient, which costs much more. On devices other than a CPU it is DEVICE_ROWS at least.
    """
    filling = min(MOST_ROWS, CHUNK_ELEMENTS // vocabulary)
    rows = max(1, filling, hidden_size // (2 if head_is_trained else 16))
    return rows if device_type == "cpu" else max(rows, DEVICE_ROWS)


def product_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of products with this weight: autocast's for fp32 weights, if it is on."""
    device = weight.device.type
    under_autocast = torch.is_autocast_enabled(device) and weight.dtype == torch.float32
    return torch.get_autocast_dtype(device) if under_autocast else weight.dtype
