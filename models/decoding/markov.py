"""Decoding with a Markov head: one forward drafts all depths, and each path adds what its own tokens say.

Shapes: G depths, W nodes of a call, F features, V columns of the logits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.models.compiling import BACKEND
from draftsmith.models.decoding.growing_tree import depths_below
from draftsmith.models.decoding.protocols import Compilable, DrafterDecoder
from draftsmith.models.decoding.transfers import index_on, to_device


class MarkovDecoder:
    """A `StepwiseDecoder` over one that drafts all depths at once; no layer runs after `begin`.

    Args:
        decoder: Its logits are those before the bias.
        bias_of: Tokens [W], those before, to what they add to the logits [W, V].
        num_depths: G.
        device: The drafter's.
    """

    one_forward = True

    def __init__(
        self, decoder: DrafterDecoder, bias_of: Callable[[Tensor], Tensor], num_depths: int, device: torch.device
    ) -> None:
        self.num_depths, self.columns = num_depths, decoder.columns
        self._decoder, self._bias_of, self._device = decoder, bias_of, device
        self._newest_1 = torch.empty(0)
        self._logits_gv = torch.empty(0)
        self._depths: list[int] = []  # of every node

    def compile(self, backend: str = BACKEND) -> None:
        """Compile the one forward, where it can be; a bias is three small operations."""
        if isinstance(self._decoder, Compilable):
            self._decoder.compile(backend)

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        self._decoder.start(prompt_ids, features, position_offset)
        self._newest_1 = prompt_ids[-1:]

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        self._decoder.observe(committed_ids, features)
        if len(committed_ids):
            self._newest_1 = committed_ids[-1:]

    @torch.inference_mode()
    def begin(self) -> Tensor:
        """fp32 logits [1, V] of the children of the newest committed token."""
        self._logits_gv, self._depths = self._decoder.draft(), [0]
        return self._logits_gv[:1] + self._bias_of(self._newest_1)

    @torch.inference_mode()
    def expand(self, tokens: Tensor | list[int], parents: list[int]) -> Tensor:
        """fp32 logits [W, V] of the children of W new nodes below `parents`."""
        depths = depths_below(parents, self._depths, self.num_depths, f"{self.num_depths} depths are drafted")
        self._depths += depths
        tokens_w = tokens if isinstance(tokens, Tensor) else to_device(tokens, self._device)
        if len(set(depths)) == 1:  # a level of the tree, as trees are grown
            logits = self._logits_gv[depths[0] : depths[0] + 1]
        else:
            logits = self._logits_gv.index_select(0, index_on(tuple(depths), self._device))
        return logits + self._bias_of(tokens_w)
