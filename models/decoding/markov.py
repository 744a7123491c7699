"""Decoding with a Markov head: one forward drafts all depths, and each path adds what its own tokens say.

Shapes: G depths, W nodes of a call, F features, V columns of the logits.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
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
        confidence_of: Tokens [W], those before, to what they add to a depth's confidence [W], a logit, which then is a
            last column of what `decoder` drafts; None: there is none.
    """

    one_forward = True

    def __init__(
        self,
        decoder: DrafterDecoder,
        bias_of: Callable[[Tensor], Tensor],
        num_depths: int,
        device: torch.device,
        confidence_of: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.num_depths, self.columns = num_depths, decoder.columns
        self._decoder, self._bias_of, self._device = decoder, bias_of, device
        self._confidence_of = confidence_of
        self._newest_1 = torch.empty(0)
        self._logits_gv, self._confidence_g = torch.empty(0), torch.empty(0)
        self._depths: list[int] = []  # of every node
        self._last: tuple[Tensor, slice | Tensor] = (self._newest_1, slice(0, 0))  # the last call's nodes

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
        rows, self._depths = self._decoder.draft(), [0]
        own = rows.shape[1] - (self._confidence_of is not None)
        self._logits_gv, self._confidence_g = rows[:, :own], rows[:, own:].flatten()
        return self._children(self._newest_1, slice(0, 1))

    @torch.inference_mode()
    def expand(self, tokens: Tensor | list[int], parents: list[int]) -> Tensor:
        """fp32 logits [W, V] of the children of W new nodes below `parents`."""
        depths = depths_below(parents, self._depths, self.num_depths, f"{self.num_depths} depths are drafted")
        self._depths += depths
        tokens_w = tokens if isinstance(tokens, Tensor) else to_device(tokens, self._device)
        level = len(set(depths)) == 1  # of the tree, as trees are grown
        place = slice(depths[0], depths[0] + 1) if level else index_on(tuple(depths), self._device)
        return self._children(tokens_w, place)

    @torch.inference_mode()
    def log_acceptance(self) -> Tensor | None:
        """What the confidence head says of the last call's nodes, fp32 [W]; None: there is none."""
        if self._confidence_of is None:
            return None
        tokens_w, place = self._last
        return F.logsigmoid(self._confidence_g[place] + self._confidence_of(tokens_w))

    def _children(self, tokens_w: Tensor, place: slice | Tensor) -> Tensor:
        self._last = tokens_w, place
        return self._logits_gv[place] + self._bias_of(tokens_w)
