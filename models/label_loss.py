"""Cross entropy through a frozen LM head, for labelled positions only, in chunks.

No [S(K+1), V] tensor exists: a chunk's logits give its loss, its argmax and, since the head is frozen and the weight of
every label is known beforehand, the gradient of its hidden states, and are then dropped. (As Liger's fused linear cross
entropy does, arXiv 2410.10989; `torch.nn.functional.linear_cross_entropy` gives no argmax without a second product.)

Shapes: N labelled positions, D hidden, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK_ELEMENTS = 1 << 22


def frozen_head_cross_entropy(
    hidden_nd: Tensor, lm_head: nn.Module, labels_n: Tensor, weights_n: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross entropy of `lm_head(hidden)`.

    Args:
        hidden_nd: [N, D].
        lm_head: A linear layer whose weight is frozen.
        labels_n: [N] token ids.
        weights_n: [N] weight of each label in the loss.

    Returns:
        The weighted sum (carries the gradient to `hidden_nd` only), losses [N] in fp32 nats, and whether the argmax is
        the label [N].
    """
    return _FrozenHeadCrossEntropy.apply(hidden_nd, lm_head, labels_n, weights_n)


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_nd: Tensor, lm_head: nn.Module, labels_n: Tensor, weights_n: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_weight: Tensor = lm_head.weight  # type: ignore[assignment]
        wants_grad = ctx.needs_input_grad[0]
        grad_nd = torch.empty_like(hidden_nd) if wants_grad else None
        # Softmax in fp32 at least.
        dtype = torch.promote_types(hidden_nd.dtype, torch.float32)
        losses_n = torch.empty(len(labels_n), dtype=dtype, device=hidden_nd.device)
        correct_n = torch.empty(len(labels_n), dtype=torch.bool, device=hidden_nd.device)
        chunk = max(1, CHUNK_ELEMENTS // head_weight.shape[0])
        for begin in range(0, len(labels_n), chunk):
            rows = slice(begin, begin + chunk)
            logits = lm_head(hidden_nd[rows].to(head_weight.dtype)).to(dtype)
            labels = labels_n[rows, None]
            correct_n[rows] = logits.argmax(-1) == labels_n[rows]
            log_sum_exp = logits.logsumexp(-1, keepdim=True)
            losses_n[rows] = (log_sum_exp - logits.gather(1, labels)).squeeze(1)
            if grad_nd is not None:
                # d loss / d logits = softmax - one-hot, in the logits' own memory
                grad_logits = logits.sub_(log_sum_exp).exp_()
                grad_logits.scatter_add_(1, labels, grad_logits.new_full(labels.shape, -1.0))
                grad_logits.mul_(weights_n[rows, None])
                grad_nd[rows] = F.linear(grad_logits.to(head_weight.dtype), head_weight.t()).to(grad_nd.dtype)
        if grad_nd is not None:
            ctx.save_for_backward(grad_nd)
        ctx.mark_non_differentiable(losses_n, correct_n)
        return (losses_n * weights_n).sum(), losses_n, correct_n

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (grad_nd,) = ctx.saved_tensors
        return grad_nd * grad_outputs[0].to(grad_nd.dtype), None, None, None
