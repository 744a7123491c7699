"""Fused projections: linear layers that read the same input are one product in compiled forwards.

A layer of Llama's kind has seven products, of queries, keys and values, of the output, and three of the MLP. For a few
rows on a GPU each takes 3.5 us to start and finish however small it is, and 1.1 us pass between two kernels: 90 of the
210 products of SmolLM2 are saved. vLLM loads such weights as one tensor; here the layers' own parameters become views
of one, so that everything else, which reads, saves, trains and exports them by name, sees what it saw before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.models.kernels.cpu_layers import is_of_family

# By the class's ending: layers that such a module calls with one input, in this order.
FUSED = {"Attention": ("q_proj", "k_proj", "v_proj"), "MLP": ("gate_proj", "up_proj")}


class Fused:
    """The weights of several linear layers as one tensor, and, within a forward, their product with the last input."""

    def __init__(self, linears: list[Any]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self.weight = _joined([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears]
        self.bias = None if biases[0] is None else _joined(biases)
        self.input: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused:
        return self  # a copied model has other parameters, which `fuse_projections` joins before it is compiled

    def is_of(self, linears: list[Any]) -> bool:
        """Return True if the layers' parameters are still views of these tensors."""
        joined = [(self.weight, [linear.weight for linear in linears])]
        if self.bias is not None:
            joined.append((self.bias, [linear.bias for linear in linears]))
        return all(
            view.data_ptr() == part.data_ptr() and view.dtype == part.dtype
            for whole, parts in joined
            for view, part in zip(whole.split(self.sizes), parts, strict=True)
        )


class FusedProjection(nn.Linear):
    """A linear layer whose product is a part of a fused one in compiled forwards; elsewhere a plain one.

    `fuse_projections` changes a layer's class in place, and moving or casting the layer changes it back.
    """

    fused: Fused
    place: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name
        if not torch.compiler.is_compiling():
            return super().forward(input)
        fused, last = self.fused, len(self.fused.sizes) - 1
        if self.place == 0:
            fused.input = input
            fused.parts = F.linear(input, fused.weight, fused.bias).split(fused.sizes, dim=-1)
        if fused.input is not input:  # a layer alone, such as DFlash's keys and values of the context
            return super().forward(input)
        part = fused.parts[self.place]
        if self.place == last:
            fused.input, fused.parts = None, ()
        return part

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.__class__ = nn.Linear  # type: ignore[assignment]
        del self.fused
        return self._apply(fn, recurse)


def fuse_projections(model: nn.Module) -> None:
    """Fuse the projections of all attention and MLP modules of Llama's, Mistral's and Qwen's kind, in place.

    Called before a forward is compiled. Layers of other classes, quantised ones and adapters' are left as they are.
    No weight is kept twice.
    """
    for module in model.modules():
        for ending, names in FUSED.items():
            if is_of_family(module, ending):
                _fuse([getattr(module, name) for name in names])


def _fuse(linears: list[Any]) -> None:
    if any(type(linear) not in (nn.Linear, FusedProjection) for linear in linears):
        return
    if len({(linear.weight.dtype, linear.weight.device, linear.bias is None) for linear in linears}) > 1:
        return
    if isinstance(linears[0], FusedProjection) and linears[0].fused.is_of(linears):
        return
    fused = Fused(linears)
    for place, linear in enumerate(linears):
        linear.__class__ = FusedProjection
        linear.fused, linear.place = fused, place


@torch.inference_mode(False)
@torch.no_grad()
def _joined(parameters: list[nn.Parameter]) -> Tensor:
    """Return the parameters as one tensor, of which they become views."""
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, view in zip(parameters, whole.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = view
    torch._dynamo.mark_static_address(whole)
    return whole
