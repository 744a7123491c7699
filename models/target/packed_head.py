"""LM heads in oneDNN's packed layout, for decoding in fp32 on a CPU.

The LM head is most of a small target's weights. Read by a handful of rows, as verification and drafting do, a plain
product packs it anew every time; packed once, it costs a half to a quarter of the time, and no more for a single row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Linear):
    """A frozen linear layer with a second, packed copy of its weight; where that cannot serve, it is a plain one.

    Args:
        linear: fp32 on the CPU; its parameters are shared, not copied.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        # torch's own compiler packs weights with these two; they have no public name.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name
        trains = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        # The compiler cannot see packed weights; it chooses its own product.
        if (
            trains
            or torch.compiler.is_compiling()
            or input.dtype != torch.float32
            or self.weight.dtype != torch.float32
        ):
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")


def pack_heads(model: nn.Module, vocab_size: int) -> None:
    """Pack every frozen linear layer with a row for each of `vocab_size` tokens, in place.

    Nothing happens elsewhere than in fp32 on a CPU.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.out_features == vocab_size:
                weight = child.weight
                if weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.requires_grad:
                    setattr(parent, name, PackedLinear(child))
