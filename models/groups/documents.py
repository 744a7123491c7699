"""Documents that lie one behind the other in the tokens that attention works on.

Shapes: D documents, T tokens.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Where they begin and end; some may have no token at all.

    Args:
        bounds_d: [D+1] int32, where each begins, and T.
        max_length_tokens: Of the longest.
    """

    bounds_d: Tensor
    max_length_tokens: int

    @cached_property
    def lengths(self) -> list[int]:
        """[D] tokens of each. Waits for the device."""
        return self.bounds_d.diff().tolist()

    def numbers(self, num_tokens: int) -> Tensor:
        """[T] the document of each token."""
        token_t = torch.arange(num_tokens, device=self.bounds_d.device, dtype=self.bounds_d.dtype)
        return torch.searchsorted(self.bounds_d[1:], token_t, right=True)
