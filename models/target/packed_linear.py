"""Frozen linear layers with a packed copy of their weight, for decoding in fp32 or bf16 on a CPU.

torch reads a weight at a third to a half of the memory's speed when a few rows are multiplied by it; from a packed copy
`cpu_kernels.cpp` reads it at all of it, and a tree's rows cost what one costs until arithmetic is what counts. The copy
is the price: `packable_bytes`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftsmith.models.cpu_kernels import DTYPES, has_kernels

MOST_ROWS = 512  # of one product: beyond it torch's own is as fast


class PackedLinear(nn.Linear):
    """A frozen linear layer with a second, packed copy of its weight; where that cannot serve, it is a plain one.

    A layer becomes one in place, by its class (`pack_linears`), so that whoever borrows the module has the packed one.
    """

    _packed: Tensor | None = None
    _packed_bias: Tensor | None = None  # in fp32
    _packed_of: tuple[object, ...] = ()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name
        trains = torch.is_grad_enabled() and (input.requires_grad or _trains(self))
        rows = input.numel() // self.in_features
        if trains or input.dtype != self.weight.dtype or rows > MOST_ROWS or not _can_be_packed(self):
            return super().forward(input)
        if not torch.compiler.is_compiling():  # what is compiled was called before
            self._pack_again_if_changed()
        return torch.ops.draftsmith.linear(input, self._packed, self.out_features, self._packed_bias)

    def _pack_again_if_changed(self) -> None:
        """Weights may change in place, as when an adapter is merged, or be others; the copy would be the old ones."""
        weight, bias = self.weight, self.bias
        of = (weight.data_ptr(), weight._version, weight.dtype, bias is not None and (bias.data_ptr(), bias._version))
        if self._packed_of != of:
            self._packed, self._packed_of = torch.ops.draftsmith.pack(weight.detach()), of
            self._packed_bias = None if bias is None else bias.detach().float()


def pack_linears(model: nn.Module) -> None:
    """Pack the frozen linear layers in place, each when it is first called.

    Nothing happens elsewhere than in fp32 and bf16 on a CPU, or where there is no compiler to build the products with.
    """
    for module in model.modules():
        if type(module) is nn.Linear and not _trains(module) and _can_be_packed(module) and has_kernels():
            module.__class__ = PackedLinear


def packable_bytes(model: nn.Module) -> int:
    """What packed copies take at most: of every frozen linear layer, in fp32 or bf16."""
    weights = {
        id(module.weight): module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad and module.weight.dtype in DTYPES
    }
    return sum(weight.element_size() * weight.numel() for weight in weights.values())


def _trains(linear: nn.Linear) -> bool:
    return linear.weight.requires_grad or (linear.bias is not None and linear.bias.requires_grad)


def _can_be_packed(linear: nn.Linear) -> bool:
    return linear.weight.device.type == "cpu" and linear.weight.dtype in DTYPES
