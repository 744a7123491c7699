"""From a target's LM head to its logits: some scale the product (Cohere, Granite), some cap it (Gemma 2 and later).

    logits = cap * tanh(scale * head(h) / cap),    without a cap: scale * head(h)

Used wherever the target's distribution is computed from its final features: for teachers, and for drafters that borrow
the head. Logits of a drafter's own heads are neither scaled nor capped.

Shapes: N rows, V vocabulary, D hidden.
"""

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from draftsmith.errors import UserError

# Keys of configs: factors, divisors, and soft caps.
FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling",)
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
KEYS = (*FACTORS, *DIVISORS, *CAPS)
NUM_TRIED = 4  # rows of hidden states
# Largest difference to the target's own logits, as a share of the largest logit: bf16 keeps 8 bits.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
TOLERANCE_OF_HALF = 0.03


@dataclass(frozen=True)
class LogitShape:
    """Scale and soft cap between an LM head's product and the logits."""

    scale: float = 1.0
    cap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Return True if the product is the logits."""
        return self == PLAIN

    def __call__(self, product: Tensor) -> Tensor:
        """Map a head's product to logits of the same shape, with a gradient."""
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap

    def apply_(self, product: Tensor) -> Tensor:
        """Replace a head's product by the logits."""
        if self.scale != 1.0:
            product.mul_(self.scale)
        return product if self.cap is None else product.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return d logits / d product, from the logits: a number, or a tensor of their shape where there is a cap."""
        return self.scale if self.cap is None else (1.0 - (logits / self.cap).square_()).mul_(self.scale)

    def __str__(self) -> str:
        parts = [] if self.scale == 1.0 else [f"scaled by {self.scale:g}"]
        parts += [] if self.cap is None else [f"capped at {self.cap:g}"]
        return " and ".join(parts) or "as they are"


PLAIN = LogitShape()

_measured: weakref.WeakKeyDictionary[nn.Module, LogitShape] = weakref.WeakKeyDictionary()


def logit_shape(target: PreTrainedModel) -> LogitShape:
    """Return the shape of the target's logits, read off its config and compared with its own logits.

    For a target without weights, as in a plan, the config alone decides.

    Raises:
        UserError: The target's logits are another function of the LM head's product.
    """
    if target not in _measured:
        shapes = _possible_shapes(target.config.get_text_config())
        if not _has_values(target):
            return shapes[0]
        _measured[target] = _compared(target, shapes)
    return _measured[target]


def _possible_shapes(config: Any) -> list[LogitShape]:
    """Return the shapes that a class may read from a config's keys, the likeliest first."""
    factor, divisor = (math.prod(_number(config, key) or 1.0 for key in keys) for keys in (FACTORS, DIVISORS))
    cap = next((cap for key in CAPS if (cap := _number(config, key))), None)
    # HyperCLOVA X multiplies by Granite's divisor; a class may look at some of these keys only, or at none.
    scales = [factor / divisor, factor * divisor, factor, 1.0 / divisor, divisor, 1.0]
    return [*dict.fromkeys(LogitShape(scale, each) for each in (cap, None) for scale in scales)]


def _number(config: Any, key: str) -> float | None:
    value = getattr(config, key, None)
    return float(value) if isinstance(value, int | float) else None


def _has_values(target: PreTrainedModel) -> bool:
    weight = target.get_output_embeddings().weight
    return not weight.is_meta


@torch.no_grad()
def _compared(target: PreTrainedModel, shapes: list[LogitShape]) -> LogitShape:
    """Return the shape that gives the target's logits.

    Raises:
        UserError: No shape gives them.
    """
    head = target.get_output_embeddings()
    weight = head.weight
    rows = torch.randn(NUM_TRIED, weight.shape[1], generator=torch.Generator().manual_seed(0))
    hidden = rows.to(weight.device, weight.dtype)
    # Large enough to show a cap.
    reach = 2.0 * (shapes[0].cap or 8.0) / abs(shapes[0].scale)
    hidden *= reach / head(hidden).abs().amax().clamp(min=1e-6)
    product = head(hidden)
    logits = _logits_from(target, hidden)
    tolerance = TOLERANCE.get(weight.dtype, TOLERANCE_OF_HALF) * float(logits.abs().amax())
    differences = [
        (float((shape(product) - logits).abs().amax()) if logits.shape == product.shape else float("inf"), place)
        for place, shape in enumerate(shapes)
    ]
    least, place = min(differences)
    if not least <= tolerance:
        raise UserError(
            f"the logits of {type(target).__name__} are not its LM head's, scaled or capped by {', '.join(KEYS)} of "
            f"its config (largest difference {least:.2g}), so that drafters would learn another distribution: use "
            "another target"
        )
    return shapes[place]


def get_text_decoder(target: PreTrainedModel) -> nn.Module:
    """Return the module whose output the LM head reads: the base model, or the decoder in it, as in OPT."""
    base = target.base_model
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
    return decoder if isinstance(decoder, nn.Module) else base


class _FinalStates(BaseModelOutputWithPast):
    """The output of a target's layers, with None for all other attributes."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def _logits_from(target: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Compute logits [N, V] of final hidden states [N, D] by the target's own forward; no layer runs."""
    base: Any = get_text_decoder(target)

    def final_states(*_: Any, **__: Any) -> Any:
        return _FinalStates(last_hidden_state=hidden[None])

    before = base.__dict__.get("forward")  # set if another wrapper replaced it
    base.forward = final_states
    try:
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        return target(input_ids=ids, use_cache=False).logits[0].to(hidden.dtype)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the logits of {type(target).__name__} cannot be computed from its final hidden states alone "
            f"({type(error).__name__}: {error}), which drafters are trained with: use another target"
        ) from None
    finally:
        del base.forward
        if before is not None:
            base.forward = before
