"""Sliding windows and chunks of a target's layers, which a mask for draft trees must repeat.

transformers builds these masks itself, except if it gets a 4-D mask, which it uses unchanged in every layer. So we
build a mask for each type of layer: `{"full_attention": ..., "sliding_attention": ...}`, or one for a single type.

Shapes: A rows of a batch, N queries, S keys.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from draftsmith.models.target.view import FULL_ATTENTION, target_value

Masks = Tensor | dict[str, Tensor]
WINDOW_KEYS = ("sliding_window", "attention_chunk_size")
# Parts of names of layer types with a state instead of keys and values, which the nodes of a tree cannot share.
RECURRENT = ("linear", "mamba", "recurrent", "conv", "ssm", "hybrid")


@dataclass(frozen=True)
class Window:
    """A token attends to the last `tokens` tokens, itself included; with `chunked` to its chunk of `tokens` tokens."""

    tokens: int
    chunked: bool = False

    def hides(self, query_n: Tensor, key_s: Tensor) -> Tensor:
        """Return [..., N, S]: True if a key is outside a query's window. Both are positions [..., n]."""
        query_n1, key_1s = query_n[..., :, None], key_s[..., None, :]
        if self.chunked:
            return key_1s // self.tokens != query_n1 // self.tokens
        return key_1s <= query_n1 - self.tokens

    def __str__(self) -> str:
        return f"{'chunks' if self.chunked else 'a window'} of {self.tokens:,} tokens"


@dataclass(frozen=True)
class Windows:
    """The windows of a target's layers.

    Args:
        by_type: Windows by type of layer, for the types that have one.
        types: All types of layers, sorted.
        unknown: The smallest window of a form that our masks do not support.
    """

    by_type: Mapping[str, Window]
    types: tuple[str, ...]
    unknown: int | None = None

    @property
    def smallest(self) -> int | None:
        """Return the tokens within which all layers attend to everything; None: always."""
        sizes = [window.tokens for window in self.by_type.values()]
        return min([*sizes, *([] if self.unknown is None else [self.unknown])], default=None)

    def reached(self, length_tokens: int) -> bool:
        """Return whether some layer does not attend to all of `length_tokens` tokens."""
        return self.smallest is not None and length_tokens > self.smallest

    def masks(self, mask: Tensor, query_n: Tensor, key_s: Tensor) -> Masks:
        """Build the masks of each type of layer from the mask of full attention.

        Args:
            mask: Additive, [B, 1, N, S].
            query_n: Positions of the queries [N], or [B, 1, N].
            key_s: Positions of the keys [S], or [B, 1, S].
        """
        closed = torch.finfo(mask.dtype).min
        made = {
            kind: mask.masked_fill(self.by_type[kind].hides(query_n, key_s), closed) if kind in self.by_type else mask
            for kind in self.types
        }
        return made[self.types[0]] if len(self.types) == 1 else made

    def row_masks(self, visible_as: Tensor, position_a: Tensor, dtype: torch.dtype) -> Masks:
        """Build the masks of a forward of one token per row, for rows of different lengths.

        Args:
            visible_as: [A, S] bool, the tokens of each row, at positions 0, 1, ...
            position_a: [A] position of each row's new token.
        """
        if not self.reached(visible_as.shape[1]):
            return visible_as
        mask = torch.zeros(visible_as.shape, dtype=dtype, device=visible_as.device)
        mask.masked_fill_(~visible_as, torch.finfo(dtype).min)
        places = torch.arange(visible_as.shape[1], device=visible_as.device)
        return self.masks(mask[:, None, None], position_a[:, None, None], places)

    def sentence(self) -> str:
        """Describe the windows in a few words."""
        if self.smallest is None:
            return "all layers see the whole text"
        sizes = sorted({str(window) for window in self.by_type.values()})
        some = "all" if len(self.types) == 1 and self.unknown is None else "some"
        return f"{some} layers see {' or '.join(sizes) or f'a window of {self.unknown:,} tokens'}"


def get_windows(target: Any) -> Windows:
    """Return the windows of a target's layers: those of its config, if its class uses them.

    For a target without weights, as in a plan, the class is not tested.
    """
    windows = _from_config(target.config.get_text_config())
    if not windows.by_type or target.get_input_embeddings().weight.is_meta:
        return windows
    if target not in _windows:
        _windows[target] = windows if _uses_windows(target) else Windows({}, windows.types, windows.unknown)
    return _windows[target]


@torch.no_grad()
def _uses_windows(target: Any) -> bool:
    """Return whether a window of one token changes the output, as some classes ignore their config's key."""
    text = target.config.get_text_config()
    original = {name: getattr(text, name) for name in WINDOW_KEYS if _size(text, name) is not None}
    ids, outputs = torch.arange(1, 4, device=target.device)[None], []
    try:
        for size in (len(ids[0]) + 1, 1):
            for name in original:
                setattr(text, name, size)
            outputs.append(target.base_model(input_ids=ids, use_cache=False)[0])
    finally:
        for name, value in original.items():
            setattr(text, name, value)
    return not torch.allclose(*outputs)


def _from_config(text: Any) -> Windows:
    """Return the windows that the config of a text model describes."""
    kinds = getattr(text, "layer_types", None) or []
    sliding, chunk = (_size(text, name) for name in WINDOW_KEYS)
    if kinds:
        windows = {}
        for kind in sorted(set(kinds)):
            size, chunked = (chunk, True) if "chunked" in kind else (sliding, False)
            if size is not None and ("chunked" in kind or "sliding" in kind):
                windows[kind] = Window(size, chunked)
        return Windows(windows, tuple(sorted(set(kinds))))
    if sliding is not None and getattr(text, "use_sliding_window", True):
        return Windows({"all": Window(sliding)}, ("all",))
    # GPT-Neo's local layers mask by themselves, by columns.
    local = "local" in (getattr(text, "attention_layers", None) or [])
    return Windows({}, (FULL_ATTENTION,), _size(text, "window_size") if local else chunk)


def _size(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


_windows: weakref.WeakKeyDictionary[nn.Module, Windows] = weakref.WeakKeyDictionary()
_taking_masks: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def takes_masks(target: Any) -> bool:
    """Return whether the target applies masks by type of layer; tested once on three tokens."""
    windows = get_windows(target)
    if windows.unknown is not None:
        return False
    if len(windows.types) == 1 or not windows.by_type or target.get_input_embeddings().weight.is_meta:
        return True
    if target not in _taking_masks:
        _taking_masks[target] = _accepts_masks(target, windows)
    return _taking_masks[target]


@torch.no_grad()
def _accepts_masks(target: Any, windows: Windows) -> bool:
    """Check whether masks that hide all but the own token change the output, as they should."""
    ids = torch.arange(1, 4, device=target.device)[None]
    mask = torch.zeros(1, 1, 3, 3, dtype=target.dtype, device=target.device)
    mask.masked_fill_(torch.ones_like(mask).triu(1) > 0, torch.finfo(mask.dtype).min)
    place = torch.arange(3, device=target.device)
    alone = Windows({kind: Window(1) for kind in windows.by_type}, windows.types)

    def output(masks: Masks) -> Tensor:
        hidden: Tensor = target.base_model(input_ids=ids, attention_mask=masks, use_cache=False)[0]
        return hidden

    plain = output(mask)
    try:
        same, other = (output(each) for each in (dict.fromkeys(windows.types, mask), alone.masks(mask, place, place)))
    except Exception:  # of any type, from a model that expects one mask
        return False
    return bool((plain - same).abs().amax() < 0.1 * (plain - other).abs().amax())


def get_max_positions(target: Any) -> int | None:
    """Return the target's maximum number of positions; None if its config has no limit."""
    value = target_value(target.config, "max_position_embeddings")
    return value if isinstance(value, int) else None


def tokens_within_windows(target: Any) -> int | None:
    """Return the length up to which full attention equals the windows; None if there is no limit."""
    known = [limit for limit in (get_max_positions(target), get_windows(target).smallest) if limit is not None]
    return min(known) if known else None


def has_recurrent_layers(target: PreTrainedModel | PreTrainedConfig) -> bool:
    """Return whether some layers keep a state instead of keys and values, such as linear attention or Mamba."""
    text = (target if isinstance(target, PreTrainedConfig) else target.config).get_text_config()
    model_class = AutoModelForCausalLM._model_mapping.get(type(text), target)
    kinds = getattr(text, "layer_types", None) or []
    return getattr(model_class, "_is_stateful", False) or any(part in kind for kind in kinds for part in RECURRENT)


def architecture(config: PreTrainedConfig) -> str:
    """Return the name of a config's architecture: that of its class, or its `model_type`."""
    return str((config.architectures or [config.model_type])[0])
