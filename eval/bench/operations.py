"""Arithmetic of the models' linear layers: two operations for each parameter that a row touches.

Attention's own products are left out, on every device: they depend on the context's length, and every kernel counts
them differently. Leviathan's c-hat (arXiv 2211.17192, definition 3.10) is a ratio of such counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

aten = torch.ops.aten


class LinearOperations:
    """Adds up the operations of all forwards within `with` blocks: `total`."""

    def __init__(self) -> None:
        self.total = 0
        self._counter: FlopCounterMode | None = None

    def __enter__(self) -> None:
        self._counter = FlopCounterMode(display=False, custom_mapping=_formulas())
        self._counter.__enter__()

    def __exit__(self, *error: Any) -> None:
        assert self._counter is not None
        self._counter.__exit__(*error)
        self.total += self._counter.get_total_flops()


def _formulas() -> dict[Any, Any]:
    """What torch's counter lacks, and what it must not count."""
    formulas: dict[Any, Any] = {op: _nothing for op in flop_registry if "attention" in str(op)}
    formulas |= {aten.bmm: _nothing, aten.baddbmm: _nothing, aten.mv: _matrix_vector, aten.addmv: _added_matrix_vector}
    if hasattr(torch.ops.draftsmith, "linear"):  # loaded, when something is packed
        formulas[torch.ops.draftsmith.linear] = _packed_linear
    return formulas


def _nothing(*_: Any, **__: Any) -> int:
    return 0


def _matrix_vector(matrix: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(matrix)


def _added_matrix_vector(_bias: Any, matrix: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(matrix)


def _packed_linear(rows: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
    """rows [..., D] to out [..., V]; the packed weight does not tell its shape."""
    return 2 * math.prod(out_shape) * rows[-1]
