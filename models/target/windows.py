"""Sliding windows and chunks of a target's layers, which a mask for draft trees must repeat.

transformers builds these masks itself, except if it gets a 4-D mask, which it uses unchanged in every layer. So we
build a mask for each type of layer: `{"full_attention": ..., "sliding_attention": ...}`, or one for a single type.

Shapes: A rows of a batch, N queries, S keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from draftsmith.models.target.architectures import SLIDING, is_known
from draftsmith.models.target.view import FULL_ATTENTION, target_value
from draftsmith.recipes.schema import MOST_NODES

Masks = Tensor | dict[str, Tensor]
# Parts of names of layer types with a state instead of keys and values, which the nodes of a tree cannot share.
RECURRENT = ("linear", "mamba", "recurrent", "conv", "ssm", "hybrid")


@dataclass(frozen=True)
class Window:
    """Window in which a token attends to the last `tokens` tokens, itself included; `chunked`: to its own chunk."""

    tokens: int
    chunked: bool = False

    def hides(self, query_n: Tensor, key_s: Tensor) -> Tensor:
        """Return a bool mask [..., N, S], True if a key is outside a query's window; both are given by position."""
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
        by_type: The window of each type of layer (a name in `layer_types`) that has one.
        types: All types of layers, sorted.
        unknown: The smallest window that our masks cannot express: of another form, or of an unknown `model_type`.
    """

    by_type: Mapping[str, Window]
    types: tuple[str, ...]
    unknown: int | None = None

    @property
    def smallest(self) -> int | None:
        """Return the length in tokens up to which every layer attends to the whole sequence; None: no limit."""
        sizes = [window.tokens for window in self.by_type.values()]
        return min([*sizes, *([] if self.unknown is None else [self.unknown])], default=None)

    @property
    def shared(self) -> int | None:
        """Return the sliding window that all layers have, in tokens; None if they have none, or differ."""
        windows = [*self.by_type.values()]
        return windows[0].tokens if len(self.types) == 1 and windows and not windows[0].chunked else None

    def reached(self, length_tokens: int) -> bool:
        """Return whether some layer does not attend to all of `length_tokens` tokens."""
        return self.smallest is not None and length_tokens > self.smallest

    def masks(self, mask: Tensor, query_n: Tensor, key_s: Tensor) -> Masks:
        """Build the attention mask of each type of layer from that of full attention.

        Args:
            mask: Mask [B, 1, N, S] of full attention, added to the scores.
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
        """Build the attention masks of a forward of one token per row of a batch, for rows of different lengths.

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
        """Describe the layers' sliding attention windows in a few words, for messages."""
        if self.smallest is None:
            return "all layers see the whole text"
        sizes = sorted({str(window) for window in self.by_type.values()})
        some = "all" if len(self.types) == 1 and self.unknown is None else "some"
        return f"{some} layers see {' or '.join(sizes) or f'a window of {self.unknown:,} tokens'}"


def get_windows(target: PreTrainedModel | PreTrainedConfig) -> Windows:
    """Return the windows of a target's layers: those of its config, if its class uses them (`architectures.py`)."""
    text: Any = (target if isinstance(target, PreTrainedConfig) else target.config).get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or []))
    sliding, chunk = (_size(text, name) for name in ("sliding_window", "attention_chunk_size"))
    windows = {}
    for kind in kinds:
        if chunk is not None and "chunked" in kind:
            windows[kind] = Window(chunk, True)
        elif sliding is not None and "sliding" in kind:
            windows[kind] = Window(sliding)
    known = is_known(text)
    is_used = text.model_type in SLIDING if known else getattr(text, "use_sliding_window", True)
    if not kinds and sliding is not None and is_used:
        windows, kinds = {"all": Window(sliding)}, ["all"]
    types = tuple(kinds or [FULL_ATTENTION])
    if windows and not known:  # its class may ignore the key, or our masks
        return Windows({}, types, min(window.tokens for window in windows.values()))
    # GPT-Neo's local layers mask by themselves, by columns.
    is_local = "local" in (getattr(text, "attention_layers", None) or [])
    return Windows(windows, types, _size(text, "window_size") if is_local else None if kinds else chunk)


def _size(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def takes_masks(target: PreTrainedModel | PreTrainedConfig) -> bool:
    """Return True if this package can build the target's attention masks, one for each type of layer."""
    return get_windows(target).unknown is None


def get_max_positions(target: Any) -> int | None:
    """Return the target's maximum number of positions; None if its config has no limit."""
    value = target_value(target.config, "max_position_embeddings")
    limits = [value] if isinstance(value, int) else []
    # Llama 4 scales its queries by the place of a row in a forward, which for a tree's nodes is not their position: up
    # to this length all scales are 1.
    text: Any = target.config.get_text_config()
    if getattr(text, "attn_temperature_tuning", None):
        limits.append(int(text.floor_scale) - 1 - MOST_NODES)
    return min([*limits, *filter(None, [hiding_from(text)])], default=None)


def hiding_from(config: PreTrainedConfig) -> int | None:
    """Return the length in tokens beyond which Doge hides tokens, not the same in every forward; None: no limit."""
    return _size(config.get_text_config(), "keep_window_size")


def tokens_within_windows(target: Any) -> int | None:
    """Return the length in tokens up to which windows leave attention full; None if there is no limit."""
    known = [limit for limit in (get_max_positions(target), get_windows(target).smallest) if limit is not None]
    return min(known) if known else None


def rope_switch(target: PreTrainedModel | PreTrainedConfig) -> int | None:
    """Return the length in tokens beyond which RoPE changes its angles at all positions (`longrope`); None: never.

    Cached keys then have the old angles, so that the whole sequence must be read again.
    """
    config = target if isinstance(target, PreTrainedConfig) else target.config
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # some have one for each type of layer
    switches = [part.get("original_max_position_embeddings") for part in parts if part.get("rope_type") == "longrope"]
    return min(filter(None, switches), default=None)


def has_recurrent_layers(target: PreTrainedModel | PreTrainedConfig) -> bool:
    """Return whether some layers keep a state instead of keys and values, such as linear attention or Mamba."""
    text = (target if isinstance(target, PreTrainedConfig) else target.config).get_text_config()
    model_class = AutoModelForCausalLM._model_mapping.get(type(text), target)
    kinds = getattr(text, "layer_types", None) or []
    return getattr(model_class, "_is_stateful", False) or any(part in kind for kind in kinds for part in RECURRENT)


def architecture(config: PreTrainedConfig) -> str:
    """Return the name of a config's architecture: that of its class, or its `model_type`."""
    return str((config.architectures or [config.model_type])[0])
