"""A drafter's layers and logits, compiled: rows padded to a few numbers, attention over the whole cache.

Padding stands behind the rows that are wanted: causal order hides it from them, and the next forward overwrites it.

Shapes: R rows, k of them kept, W nodes of a call, M nodes so far, S capacity, E input width, D hidden, V columns of the
logits.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.compiling import compiled
from draftsmith.models.decoding.kv_cache import CachedAttention

LONGEST_STATIC_ROWS = 32
Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class StaticLayers:
    """Runs the rows of a round.

    Args:
        drafter: Has `run_layers` and `logits_of`, as `GroupWiseDrafter` has.
        cache: With room for `LONGEST_STATIC_ROWS` behind the rows that are ever wanted.
        backend: Of `torch.compile`.
    """

    def __init__(self, drafter: Any, cache: CachedAttention, backend: str) -> None:
        self._cache, self._dtype = cache, drafter.dtype
        cache.hold_still()
        self._columns = torch.arange(cache.capacity, device=drafter.device)
        self._copies = drafter.device.type == "cuda"

        def run(
            inputs: Tensor, cos: Tensor, sin: Tensor, places: Tensor, mask: Tensor, kept: Tensor
        ) -> tuple[Tensor, Tensor]:
            cache.begin_static_step(places, mask)
            hidden = drafter.run_layers(inputs, (cos, sin), cached_attention=cache)[0].index_select(0, kept)
            cache.end_static_step()
            return hidden, drafter.logits_of(hidden).float()

        self._run = compiled(run, drafter.device, f"drafter {type(drafter).__name__}", backend)

    def causal(self, inputs_re: Tensor, first_kept: int, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """Rows that follow the cached ones in order: hidden [k, D] and fp32 logits [k, V] from `first_kept` on."""
        begin, rows = self._cache.length, len(inputs_re)
        places = self._columns[begin : begin + padded_rows(rows)]
        kept = self._columns[first_kept:rows]
        return self._forward(inputs_re, places, places, self._columns > places[:, None], kept, rotate)

    def tree(self, inputs_we: Tensor, positions: Tensor, seen: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """New nodes of a draft tree: hidden [W, D] and fp32 logits [W, V]; seen [W, M] as in `CachedAttention`."""
        (nodes, known), size = seen.shape, padded_rows(len(inputs_we))
        begin = self._cache.length + known - nodes
        places = self._columns[begin : begin + size]
        hidden = (self._columns >= self._cache.length).expand(size, -1).clone()
        hidden[:nodes, self._cache.length : self._cache.length + known] = ~seen.to(hidden.device)
        positions = F.pad(positions, (0, size - nodes))
        kept = self._columns[:size]
        hidden_wd, logits_wv = self._forward(inputs_we, places, positions, hidden, kept, rotate)
        return hidden_wd[:nodes], logits_wv[:nodes]

    def _forward(
        self, inputs_re: Tensor, places: Tensor, positions: Tensor, hidden: Tensor, kept: Tensor, rotate: Rotate
    ) -> tuple[Tensor, Tensor]:
        """hidden: [R, S], what a row may not see."""
        inputs = F.pad(inputs_re, (0, 0, 0, len(places) - len(inputs_re)))[None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
        # Of their own, not views: what is compiled may depend on where in a larger tensor an input begins.
        rotary = [part.clone() for part in rotate(inputs, positions)]
        results = self._run(inputs, *rotary, places.clone(), mask, kept.clone())
        # Results are kept over the next call, which on CUDA may reuse their memory.
        return tuple(result.clone() for result in results) if self._copies else results


def padded_rows(rows: int) -> int:
    """The next power of two: few shapes, and at most as much again of what costs little."""
    return 1 << (rows - 1).bit_length()
