"""Frozen linear layers in oneDNN's packed layout, for decoding in fp32 on a CPU.

A tree's handful of rows through a plain product packs the weight anew every time; packed once, the product costs what
reading the weight costs, or little more. A second copy of the weights is the price (`packable_bytes`). From how many
rows on it pays differs from shape to shape and from machine to machine, so a short measurement decides.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import product, takewhile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = (1, 3, 6, 12)  # a single token, and draft trees
MEASURED_BYTES = 2**29  # of weights; enough that caches do not hold them where they do not hold the model
TRIALS = 3
LEAST_GAIN = 1.1  # in time, for a second copy of the weight


class PackedLinear(nn.Linear):
    """A frozen linear layer with a second, packed copy of its weight; where that cannot serve, it is a plain one.

    A layer becomes one in place, by its class (`pack_linears`), so that whoever borrows the module has the packed one.
    """

    packed_from = 1  # rows; fewer go through the plain weight
    _packed: Tensor | None = None
    _packed_version = -1

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name
        trains = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        # The compiler cannot see packed weights; it chooses its own product.
        if (
            trains
            or torch.compiler.is_compiling()
            or input.dtype != torch.float32
            or self.weight.dtype != torch.float32
            or self.weight.device.type != "cpu"
            or input.numel() < self.packed_from * self.in_features
        ):
            return super().forward(input)
        # Weights may change in place, as when an adapter is merged; the copy would be the old ones.
        if self._packed is None or self._packed_version != self.weight._version:
            self._packed, self._packed_version = _pack(self.weight), self.weight._version
        return _packed_product(input, self._packed, self.bias)


def pack_linears(model: nn.Module) -> None:
    """Pack the frozen linear layers of every shape that a short measurement on them says to gain by it, in place.

    Nothing happens elsewhere than in fp32 on a CPU.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear and _can_be_packed(module)]
    pays_from = _rows_from_which_it_pays(layers)
    for layer in layers:
        if layer.weight.shape in pays_from:
            layer.__class__ = PackedLinear
            layer.packed_from = pays_from[layer.weight.shape]  # type: ignore[assignment]


def packable_bytes(model: nn.Module) -> int:
    """What packed copies take at most: of every frozen linear layer, as fp32."""
    weights = {
        id(module.weight): module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad
    }
    return sum(4 * weight.numel() for weight in weights.values())


def _can_be_packed(linear: nn.Linear) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    weight = linear.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.requires_grad


def _rows_from_which_it_pays(layers: list[nn.Linear]) -> dict[torch.Size, int]:
    """By shape; shapes that gain at no number of rows are absent.

    Layers are read one after the other, as in the model, so that their weights are in the caches if they are there too.
    """
    measured: list[tuple[Tensor, Tensor]] = []
    size = 0
    for layer in layers:
        if size < MEASURED_BYTES or all(layer.weight.shape != weight.shape for weight, _ in measured):
            measured.append((layer.weight, _pack(layer.weight)))
            size += 4 * layer.weight.numel()
    trials: list[Counter[tuple[torch.Size, int, bool]]] = [Counter() for _ in range(TRIALS)]
    with torch.inference_mode():
        for spent_ns, rows, packs in product(trials, ROWS, (False, True)):
            for weight, packed in measured:
                x = torch.zeros(rows, weight.shape[1])
                began = time.perf_counter_ns()
                _packed_product(x, packed, None) if packs else F.linear(x, weight)
                spent_ns[weight.shape, rows, packs] += time.perf_counter_ns() - began
    best = {key: min(spent_ns[key] for spent_ns in trials) for key in trials[0]}
    pays_from: dict[torch.Size, int] = {}
    for shape in {weight.shape for weight, _ in measured}:
        gains = list(takewhile(lambda n, of=shape: LEAST_GAIN * best[of, n, True] < best[of, n, False], reversed(ROWS)))  # type: ignore[misc]
        if gains:
            pays_from[shape] = gains[-1]
    return pays_from


# torch's own compiler packs weights with these two; they have no public name.
def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())


def _packed_product(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
