"""Temperature, top-k and top-p: from logits to the distribution that a token is drawn from.

The same for the target's p and the drafter's q, in decoding and where the target generates training data.

Shapes: V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.models.kernels.cpu_kernels import largest

LARGEST_LOGIT = 1e4  # those of models are below 100


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. `temperature=0` is greedy; `top_k=0` and `top_p=1` filter nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 keeps all tokens), not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def scaled(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] / temperature, shifted by a constant where low temperatures would give infinity."""
        numbers = torch.finfo(logits.dtype)
        if self.temperature >= LARGEST_LOGIT / numbers.max:
            return logits / self.temperature
        logits = logits - logits.max(-1, keepdim=True).values
        return (logits / max(self.temperature, numbers.tiny)).clamp_min(numbers.min)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities of logits [..., V], in fp32 (fp64 stays fp64).

        Greedy: all mass on the first largest logit.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.greedy:
            return torch.zeros_like(logits).scatter_(-1, largest(logits)[..., None], 1.0)
        logits = self.scaled(logits)
        if 0 < self.top_k < logits.shape[-1]:
            smallest_kept = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(dim=-1, descending=True)
            mass = ordered.softmax(-1)
            # A token is dropped when the tokens before it already hold top_p of the mass; the first never is.
            dropped = mass.cumsum(-1) - mass >= self.top_p
            logits = logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
        return logits.softmax(-1)


def race(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """Divide p [..., V] by Exp(1) noise: the argmax is a draw from p, descending order draws without replacement.

    (Gumbel-max trick.)
    """
    return probabilities / torch.empty_like(probabilities).exponential_(generator=generator)


def drawn(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one token [...] from each distribution [..., V], by a uniform number in its cumulative sum, on the device.

    torch's `multinomial` draws a number for each token: ten times as long on a CPU, 2 ms for a vocabulary of 49,152.
    The sums are in fp64, in which probabilities of 1e-8 are not lost when added to a sum near 1.
    """
    cumulated = probabilities.cumsum(-1, dtype=torch.float64)
    mass = cumulated[..., -1:]
    place = torch.rand(mass.shape, dtype=torch.float64, device=mass.device, generator=generator) * mass
    # Stay below the total mass after rounding, so that a token of probability > 0 is found; without any mass it is the
    # last.
    place = torch.minimum(place, torch.nextafter(mass, torch.zeros_like(mass)))
    return torch.searchsorted(cumulated, place, right=True)[..., 0].clamp_max(probabilities.shape[-1] - 1)


def first_token(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """Choose the next token from the target's logits [V], without a drafter."""
    return int(largest(logits) if sampling.greedy else drawn(sampling.probabilities(logits), generator))
