"""Checks of `drafter.options`, shared by the drafters' configs: each error names its key."""

from typing import Any

from draftsmith.recipes.errors import UserError


def whole_number(key: str, value: Any, at_least: int) -> int:
    """`value`, if it is an int of at least this."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise UserError(f"key `drafter.options.{key}` must be a whole number of at least {at_least}, not {value!r}")
    return value


def number(
    key: str, value: Any, above: float | None = None, at_least: float | None = None, at_most: float = 1e9
) -> float:
    """`value`, if it is a number in that range."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and value <= at_most
    if not good or (above is not None and value <= above) or (at_least is not None and value < at_least):
        low = f"above {above}" if above is not None else f"of at least {at_least}"
        high = f" and at most {at_most}" if at_most < 1e9 else ""
        raise UserError(f"key `drafter.options.{key}` must be a number {low}{high}, not {value!r}")
    return float(value)


def one_of(key: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """`value`, if it is one of these."""
    if value not in allowed:
        raise UserError(f"key `drafter.options.{key}` must be one of {', '.join(map(str, allowed))}, not {value!r}")
    return value


def layer_numbers(value: Any, num_layers: int, final: int | None = None) -> list[int]:
    """`value`, if it lists layers of the target in ascending order; `final` may stand at the end for its last norm."""
    layers = value[:-1] if isinstance(value, list) and value and value[-1] == final else value
    good = isinstance(layers, list) and value and all(isinstance(layer, int) for layer in layers)
    if not good or layers != sorted(set(layers)) or not all(0 <= layer < num_layers for layer in layers):
        end = "" if final is None else f" (and {final} at the end for the final hidden states)"
        raise UserError(
            f"key `drafter.options.feature_layers` must be a list of ascending layer numbers from 0 to "
            f"{num_layers - 1}{end}, not {value!r}"
        )
    return list(value)


def normalized_weights(key: str, value: float | list[float], num_depths: int) -> list[float]:
    """Depth weights that sum to 1, from `num_depths` numbers, or from one number d that stands for d**0, d**1, ..."""
    weights = [float(value) ** j for j in range(num_depths)] if isinstance(value, int | float) else value
    if not isinstance(weights, list) or len(weights) != num_depths or not all(_positive(w) for w in weights):
        raise UserError(
            f"key `drafter.options.{key}` must be one positive number or {num_depths} of them (one for each depth), "
            f"not {value!r}"
        )
    return [weight / sum(weights) for weight in weights]


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
