"""Frozen linear layers in a packed layout, for decoding in fp32 or bf16 on a CPU.

A tree's handful of rows through a plain product packs the weight anew every time; packed once, the product costs what
reading the weight costs, or little more. A second copy of the weights is the price (`packable_bytes`). Which of MKL's
and oneDNN's layouts is faster, and from how many rows on, differs from shape to shape, from dtype to dtype and from
machine to machine: a short measurement decides.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import product, takewhile
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = (1, 3, 6, 12)  # a single token, and draft trees
MEASURED_BYTES = 2**29  # of weights; enough that caches do not hold them where they do not hold the model
TRIALS = 3
LEAST_GAIN = 1.1  # in time, for a second copy of the weight
# Of a product with a layout, relative to the largest value; in bf16 its last bit.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-7}


class Layout(Protocol):
    """How a weight [out, in] is packed, and rows [..., in] are multiplied by it to [..., out]."""

    def pack(self, weight: Tensor) -> Tensor: ...

    def product(self, rows: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class Plain:
    """The weight as it is: what the others are measured against."""

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def product(self, rows: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(rows, weight, bias)


# torch's own compiler packs weights with these operations; they have no public name.
@dataclass(frozen=True)
class OneDnn:
    """Of oneDNN, the best for many columns and for bf16, where the processor multiplies tiles of it."""

    def pack(self, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def product(self, rows: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


@dataclass(frozen=True)
class Mkl:
    """Of MKL, the best for few rows and columns; fp32 alone. It is told a number of rows, on which the layout does not
    depend."""

    def pack(self, weight: Tensor) -> Tensor:
        return torch.ops.mkl._mkl_reorder_linear_weight(weight.detach().contiguous(), ROWS[-1])

    def product(self, rows: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkl._mkl_linear(rows, packed, weight, bias, rows.numel() // weight.shape[1])


class Packing(NamedTuple):
    """A layout, and from how many rows on it is used."""

    layout: Layout
    from_rows: int


class PackedLinear(nn.Linear):
    """A frozen linear layer with a second, packed copy of its weight; where that cannot serve, it is a plain one.

    A layer becomes one in place, by its class (`pack_linears`), so that whoever borrows the module has the packed one.
    """

    packing = Packing(OneDnn(), 1)
    _packed: Tensor | None = None
    _packed_version = -1

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name
        layout, from_rows = self.packing
        trains = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        # The compiler cannot see packed weights; it chooses its own product.
        if (
            trains
            or torch.compiler.is_compiling()
            or input.dtype != self.weight.dtype
            or self.weight.dtype not in TOLERANCE
            or self.weight.device.type != "cpu"
            or input.numel() < from_rows * self.in_features
        ):
            return super().forward(input)
        # Weights may change in place, as when an adapter is merged; the copy would be the old ones.
        if self._packed is None or self._packed_version != self.weight._version:
            self._packed, self._packed_version = layout.pack(self.weight), self.weight._version
        return layout.product(input, self._packed, self.weight, self.bias)


def pack_linears(model: nn.Module) -> None:
    """Pack the frozen linear layers of every shape that a short measurement on them says to gain by it, in place.

    Nothing happens elsewhere than in fp32 and bf16 on a CPU.
    """
    packable = [module for module in model.modules() if type(module) is nn.Linear and _can_be_packed(module)]
    for dtype in TOLERANCE:
        layers = [layer for layer in packable if layer.weight.dtype == dtype]
        packings = _packings(layers, layouts(dtype)) if layers else {}
        for layer in layers:
            if layer.weight.shape in packings:
                layer.__class__ = PackedLinear
                layer.packing = packings[layer.weight.shape]  # type: ignore[assignment]


def packable_bytes(model: nn.Module) -> int:
    """What packed copies take at most: of every frozen linear layer, in fp32 or bf16."""
    weights = {
        id(module.weight): module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad and module.weight.dtype in TOLERANCE
    }
    return sum(weight.element_size() * weight.numel() for weight in weights.values())


def _can_be_packed(linear: nn.Linear) -> bool:
    weight = linear.weight
    return weight.device.type == "cpu" and weight.dtype in TOLERANCE and not weight.requires_grad


@cache
def layouts(dtype: torch.dtype = torch.float32) -> tuple[Layout, ...]:
    """Those that this torch and processor have and that give the plain product, for every number of rows."""
    torch_has: list[Layout] = []
    if _one_dnn_multiplies(dtype) and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        torch_has.append(OneDnn())
    if dtype == torch.float32 and torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear"):
        torch_has.append(Mkl())
    return tuple(layout for layout in torch_has if _gives_the_plain_product(layout, dtype))


def _one_dnn_multiplies(dtype: torch.dtype) -> bool:
    """Not every processor has instructions for bf16."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _gives_the_plain_product(layout: Layout, dtype: torch.dtype) -> bool:
    drawn = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(130, *columns, generator=drawn).to(dtype) for columns in ((70,), ()))
    packed = layout.pack(weight)
    for rows in (*ROWS, 5 * ROWS[-1]):
        x = torch.randn(rows, 70, generator=drawn).to(dtype)
        plain = F.linear(x, weight, bias)
        if (layout.product(x, packed, weight, bias) - plain).abs().max() > TOLERANCE[dtype] * plain.abs().max():
            return False
    return True


def _packings(layers: list[nn.Linear], of: tuple[Layout, ...]) -> dict[torch.Size, Packing]:
    """By shape the fastest layout for trees; shapes that gain by none are absent.

    Layers are read one after the other, as in the model, so that their weights are in the caches if they are there too.
    """
    measured: list[Tensor] = []
    size = 0
    for layer in layers:
        if size < MEASURED_BYTES or all(layer.weight.shape != weight.shape for weight in measured):
            measured.append(layer.weight)
            size += 4 * layer.weight.numel()
    plain = Plain()
    best = {(layout, *key): spent for layout in (plain, *of) for key, spent in _nanoseconds(measured, layout).items()}
    packings: dict[torch.Size, Packing] = {}
    for shape in {weight.shape for weight in measured}:
        fastest = min(of, key=lambda layout, at=shape: sum(best[layout, at, n] for n in ROWS[1:]), default=None)  # type: ignore[misc]
        if fastest is not None:
            gains = takewhile(
                lambda n, by=fastest, at=shape: LEAST_GAIN * best[by, at, n] < best[plain, at, n],  # type: ignore[misc]
                reversed(ROWS),
            )
            from_rows = min(gains, default=None)
            if from_rows is not None:
                packings[shape] = Packing(fastest, from_rows)
    return packings


def _nanoseconds(weights: list[Tensor], layout: Layout) -> dict[tuple[torch.Size, int], int]:
    """The shortest of a few trials, by shape and number of rows."""
    packed = [layout.pack(weight) for weight in weights]
    trials: list[Counter[tuple[torch.Size, int]]] = [Counter() for _ in range(TRIALS)]
    with torch.inference_mode():
        for spent_ns, rows in product(trials, ROWS):
            for weight, copy in zip(weights, packed, strict=True):
                x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype)
                began = time.perf_counter_ns()
                layout.product(x, copy, weight, None)
                spent_ns[weight.shape, rows] += time.perf_counter_ns() - began
    return {key: min(spent_ns[key] for spent_ns in trials) for key in trials[0]}
