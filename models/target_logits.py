"""From a target's LM head to its logits: some scale the product (Cohere, Granite), some cap it (Gemma 2 and later).

    logits = cap * tanh(scale * head(h) / cap),    without a cap: scale * head(h)

Used wherever the target's distribution is computed from its final features: for teachers, and for drafters that borrow
the head. Logits of a drafter's own heads are neither scaled nor capped. Which targets do: `target/architectures.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitShape:
    """Scale and soft cap that turn an LM head's product (the output of its linear layer) into logits."""

    scale: float = 1.0
    cap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Return True if the logits are the LM head's product itself, without scale or cap."""
        return self == PLAIN

    def __call__(self, product: Tensor) -> Tensor:
        """Map a head's product to logits of the same shape, with a gradient."""
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap

    def __str__(self) -> str:
        parts = [] if self.scale == 1.0 else [f"scaled by {self.scale:g}"]
        parts += [] if self.cap is None else [f"capped at {self.cap:g}"]
        return " and ".join(parts) or "as they are"


PLAIN = LogitShape()
