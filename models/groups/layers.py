"""Decoder layers of the target's own kind, with only the attention core replaced by ours.

The layers are transformers' own modules, built from the target's config, so that widths, heads, biases, QK norms and
RoPE match the target. transformers lets a model name its attention function; we register one that computes group
attention over packed rows of streams in training, and attention over a cache when decoding.

Sliding-window attention of a target is not carried over: the drafter's layers attend to the whole past.

Shapes: B batch, H heads, Hkv key/value heads, G streams, S positions, N packed rows, R rows of a decode step, Dh head
size.
"""

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftsmith.models.groups.attention import group_attention
from draftsmith.models.groups.rows import GroupRows
from draftsmith.recipes.errors import UserError

ATTENTION_NAME = "draftsmith_group"
# Architectures whose layer takes (hidden_states, position_embeddings=(cos, sin), **kwargs): each has a test.
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "olmo2")
# RoPE whose angles depend on nothing but the position, so that a table of them can be made once.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass
class TargetLayers:
    """`num_layers` untrained decoder layers and the final norm."""

    layers: nn.ModuleList
    norm: nn.Module


def layers_config(target_config: dict[str, Any], num_layers: int) -> PreTrainedConfig:
    """The target's config, cut down to this many layers of full attention and a vocabulary of one.

    Raises:
        UserError: The architecture is not supported; lists those that are.
    """
    model_type = target_config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            f"target architecture `{model_type}` is not supported by this drafter: use a target whose model_type is "
            f"one of {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    values = copy.deepcopy(target_config)
    for key in ("model_type", "layer_types", "dtype", "torch_dtype", "_name_or_path", "architectures"):
        values.pop(key, None)
    values.update(num_hidden_layers=num_layers, vocab_size=1, attention_dropout=0.0)
    values.update(pad_token_id=None, bos_token_id=None, eos_token_id=None)
    values.update(sliding_window=None, use_sliding_window=False)
    config = AutoConfig.for_model(model_type, **values)
    config._attn_implementation = ATTENTION_NAME
    return config


def build_target_layers(config: PreTrainedConfig) -> TargetLayers:
    """New layers from `layers_config`, initialised as transformers initialises that architecture."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend)
    skeleton = AutoModel.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.get_default_dtype())
    return TargetLayers(skeleton.layers, skeleton.norm)


class RememberedAttention(Protocol):
    """Attention to rows of earlier forwards, whose keys and values it keeps for every layer."""

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """[1, R, H, Dh] for queries [1, H, R, Dh]; keeps the new keys and values [1, Hkv, R, Dh]."""


def cache_shape(config: PreTrainedConfig, batch_size: int, capacity: int) -> tuple[int, ...]:
    """(layers, keys and values, B, Hkv, capacity, Dh) of what these layers remember."""
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return (config.num_hidden_layers, 2, batch_size, num_kv_heads, capacity, head_size)


class CachedAttention:
    """Keys and values of one sequence for all layers, and the mask of the step at work.

    A causal step (`begin_step`) has R rows: the pending real tokens, then the K masks. All are written behind the
    `length` real tokens that are there; only the real ones are kept, by the caller moving `length`. Causal order is
    exactly group attention here, since the masks of the newest group come after every real token.
    A tree step (`begin_tree_step`) adds R nodes of a draft tree behind the `length` tokens and the nodes before them.
    """

    def __init__(
        self, config: PreTrainedConfig, capacity: int, max_rows: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._keys_values = torch.zeros(cache_shape(config, 1, capacity), device=device, dtype=dtype)
        self.capacity, self.length = capacity, 0
        self._begin = 0  # where the rows of the step at work are written
        self._repeats = config.num_attention_heads // self._keys_values.shape[3]
        # Row r may see columns <= length + r. One band holds this mask for every length: slices of it, not new masks.
        band = torch.full((max_rows, 2 * capacity), float("-inf"), device=device, dtype=dtype)
        self._band = band.triu(capacity + 1)
        self._mask: Tensor | None = None
        self._places: Tensor | None = None

    def begin_static_step(self, places: Tensor, mask: Tensor) -> None:
        """Prepare a step that writes R rows at `places` and attends to the whole capacity; mask [R, capacity].

        For compiled forwards, whose shapes are then always the same; `end_static_step` goes back to the others.
        """
        self._places, self._mask = places, mask

    def end_static_step(self) -> None:
        """The step is done."""
        self._places = self._mask = None

    def begin_step(self, num_rows: int) -> None:
        """Prepare the causal mask that all layers of this step share."""
        self._begin = self.length
        end = self.length + num_rows
        if self.length == 0:
            self._mask = None
            return
        if num_rows <= self._band.shape[0]:
            mask = self._band[:num_rows, self.capacity - self.length : self.capacity + num_rows]
        else:
            mask = torch.full((num_rows, end), float("-inf"), device=self._band.device, dtype=self._band.dtype)
            mask = mask.triu(self.length + 1)
        self._mask = mask

    def begin_tree_step(self, ancestors: Tensor) -> None:
        """Prepare a step of R nodes. ancestors: [R, M] bool, whether a row sees each of the M nodes there will be then.

        The last R of the M nodes are the step's own; all real tokens are seen by every node.
        """
        num_rows, num_nodes = ancestors.shape
        self._begin = self.length + num_nodes - num_rows
        mask = self._keys_values.new_zeros(num_rows, self.length + num_nodes)
        mask[:, self.length :].masked_fill_(~ancestors.to(mask.device), float("-inf"))
        self._mask = mask

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """[1, R, H, Dh] for queries [1, H, R, Dh]; stores the new keys and values [1, Hkv, R, Dh]."""
        keys, values = self._keys_values[layer_index]
        if self._places is None:
            begin, end = self._begin, self._begin + q_bhrd.shape[2]
            keys[:, :, begin:end] = k_bhrd
            values[:, :, begin:end] = v_bhrd
        else:
            end = self.capacity
            keys.index_copy_(2, self._places, k_bhrd)
            values.index_copy_(2, self._places, v_bhrd)
        if self._mask is None:
            out = F.scaled_dot_product_attention(
                q_bhrd, k_bhrd, v_bhrd, is_causal=True, scale=scale, enable_gqa=self._repeats > 1
            )
            return out.transpose(1, 2)
        keys, values = keys[:, :, :end], values[:, :, :end]
        if self._repeats == 1:
            return F.scaled_dot_product_attention(q_bhrd, keys, values, self._mask, scale=scale).transpose(1, 2)
        # Key heads as the batch and the query heads that share one as its heads: no key is copied.
        q_grouped = q_bhrd[0].unflatten(0, (-1, self._repeats))
        keys, values = (part[0].unsqueeze(1).expand(-1, self._repeats, -1, -1) for part in (keys, values))
        out = F.scaled_dot_product_attention(q_grouped, keys, values, self._mask, scale=scale)
        return out.flatten(0, 1).transpose(0, 1).unsqueeze(0)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    group_rows: GroupRows | None = None,
    group_backend: str = "folded",
    cached_attention: RememberedAttention | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, N, Dh] -> ([1, N, H, Dh], no weights)."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cached_attention is not None:
        return cached_attention.attend(module.layer_idx, query, key, value, scale), None
    if group_rows is None:
        raise ValueError("the drafter's layers need `group_rows` in training or `cached_attention` in decoding")
    grids = (group_rows.to_grids(part) for part in (query, key, value))
    out = [group_attention(q, k, v, group_backend, scale) for q, k, v in zip(*grids, strict=True)]
    return group_rows.from_grids(out), None
