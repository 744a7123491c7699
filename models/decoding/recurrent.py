"""States of recurrent layers in decoding: of linear attention, state-space models and short convolutions.

A state has read every token of its sequence and cannot forget one. So a draft is a chain, and before a chain is run the
states are saved; unless all of it is accepted they are restored, and the next forward reads the accepted tokens again,
in front of the new chain.

Shapes: R sequences, the rows of a batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from draftsmith.errors import UserError, reason
from draftsmith.models.target.windows import architecture, has_recurrent_layers

MOST_UNREAD_TOKENS = 16  # that a forward reads again in front of a chain
TOLERANCE_FRAC = 0.25  # of the difference that a mistake makes


class StateLayer(LinearAttentionLayer):
    """Recurrent states of one layer for R sequences. A forward reads and writes those of the selected sequences."""

    def __init__(self, sequences: int, number_of_states: int) -> None:
        super().__init__(number_of_states)
        self._sequences, self._selected = sequences, slice(0, 1)
        self.held: dict[tuple[str, int], Tensor] = {}  # by name and number, [R, ...]

    def lazy_initialization(self, *tensors: Any, state_idx: int = 0, **options: Any) -> None:
        """Allocate states for all R sequences, in the sizes of `tensors`, the states of the selected sequences."""
        super().lazy_initialization(*tensors, state_idx=state_idx, **options)
        for name in ("conv_states", "recurrent_states"):
            state = getattr(self, name)[state_idx]
            if state is not None and (name, state_idx) not in self.held:
                self.held[name, state_idx] = state.new_zeros(self._sequences, *state.shape[1:])
                getattr(self, name)[state_idx] = self.held[name, state_idx][self._selected]

    def select(self, sequences: slice, are_new: bool = False) -> None:
        """Select sequences whose states the next forwards read and write; `are_new`: all of them are new sequences."""
        self._selected = sequences
        for (name, number), held in self.held.items():
            getattr(self, name)[number] = held[sequences]
            self.has_previous_state[number] = not are_new

    def move(self, source: int, destination: int) -> None:
        """Copy the states of sequence `source` over those of sequence `destination`."""
        for held in self.held.values():
            held[destination] = held[source]


class StateAndAttentionLayer(StateLayer, CacheLayerMixin):
    """Cache of a layer with recurrent states and attention, as in Falcon-H1; `attention` caches its keys and values."""

    is_sliding = False

    def __init__(self, sequences: int, number_of_states: int, attention: CacheLayerMixin) -> None:
        StateLayer.__init__(self, sequences, number_of_states)
        self.attention = attention

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.attention.update(key_states, value_states)

    def get_seq_length(self) -> int:
        return self.attention.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.attention.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return self.attention.get_max_length()


def cache_layers(target: Any, sequences: int, make_attention: Callable[[int, int], CacheLayerMixin]) -> list[Any]:
    """Return the layers of a transformers `Cache` for this target.

    Args:
        make_attention: Makes the cache of an attention layer, from its number and the number of attention layers.
    """
    if not has_recurrent_layers(target):
        num_layers = target.config.get_text_config().num_hidden_layers
        return [make_attention(number, num_layers) for number in range(num_layers)]
    kinds = DynamicCache(config=target.config).layers
    attends = [isinstance(kind, CacheLayerMixin) for kind in kinds]
    layers: list[Any] = []
    for place, kind in enumerate(kinds):
        attention = make_attention(sum(attends[:place]), sum(attends)) if attends[place] else None
        if not isinstance(kind, LinearAttentionCacheLayerMixin):
            layers.append(attention)
        elif attention is None:
            layers.append(StateLayer(sequences, kind.number_of_states))
        else:
            layers.append(StateAndAttentionLayer(sequences, kind.number_of_states, attention))
    return layers


def state_layers(layers: Sequence[Any]) -> list[StateLayer]:
    """Return the cache layers that hold recurrent states."""
    return [layer for layer in layers if isinstance(layer, StateLayer)]


class ChainStates:
    """The recurrent states of one sequence, while draft chains are run and partly accepted.

    unread: committed tokens that the states have not read.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = state_layers(layers)
        self._saved: dict[tuple[int, str, int], Tensor] = {}
        self._run: list[int] = []  # by a forward that nothing was committed of
        self.unread: list[int] = []

    def reset(self) -> None:
        """Forget the sequence: no token is unread, and the next forward starts from new states."""
        self.unread, self._run = [], []
        for layer in self._layers:
            layer.select(slice(0, 1), are_new=True)

    def begin(self, chain: Sequence[int]) -> list[int]:
        """Return the tokens that the next forward must run: the unread ones, then those of the chain."""
        if self._run:
            self._copy(to_saved=False)
        elif not self.unread:
            self._copy(to_saved=True)
        self._run = [*self.unread, *chain]
        return self._run

    def commit(self, accepted: int) -> None:
        """Commit the first `accepted` tokens of the chain that `begin` was given."""
        tokens = self._run[: len(self.unread) + accepted]
        if len(tokens) == len(self._run):
            tokens = []
        else:
            self._copy(to_saved=False)
        self.unread, self._run = tokens, []

    def _copy(self, to_saved: bool) -> None:
        for number, layer in enumerate(self._layers):
            for name, held in layer.held.items():
                saved = self._saved.setdefault((number, *name), torch.empty_like(held))
                (saved if to_saved else held).copy_(held if to_saved else saved)


def chains_only(target: PreTrainedModel | PreTrainedConfig) -> str | None:
    """Return why drafts for this target must be chains; None: it verifies trees too."""
    if not has_recurrent_layers(target):
        return None
    config = target if isinstance(target, PreTrainedConfig) else target.config
    return f"the target's recurrent layers ({architecture(config)}) keep one state, which holds one path of tokens"


@torch.no_grad()
def check_states(target: Any) -> None:
    """Check with a few tokens that the target's states can be saved and restored.

    Raises:
        UserError: The target keeps its states elsewhere than in a transformers cache, or ignores those in it.
    """
    name = f"target {target.config.name_or_path or type(target).__name__} ({architecture(target.config)})"
    advice = "use vLLM: data.distill.engine=vllm, and `draftsmith bench --engine vllm`"
    vocabulary = target.get_input_embeddings().weight.shape[0]
    tokens = [place * vocabulary // 8 for place in range(1, 8)]
    prompt, chain, rest = tokens[:3], tokens[3:5], tokens[5:]
    length = 0

    def run(ids: list[int], **options: Any) -> Tensor:
        where = torch.arange(length, length + len(ids), device=target.device)[None]
        ids_1s = torch.tensor([ids], device=target.device)
        logits: Tensor = target(input_ids=ids_1s, position_ids=where, **options).logits[0, -len(rest) :]
        return logits

    try:
        right, wrong = run([*prompt, *rest], use_cache=False), run([*prompt, *chain, *rest], use_cache=False)
        layers = cache_layers(target, 1, lambda *_: DynamicLayer())
        cache, states = Cache(layers=layers), ChainStates(layers)
        run(prompt, past_key_values=cache, use_cache=True)
        length = len(prompt)
        run(states.begin(chain), past_key_values=cache, use_cache=True)
        states.commit(0)
        for layer in layers:
            attention = getattr(layer, "attention", layer)
            if isinstance(attention, DynamicLayer):
                attention.crop(-len(chain))
        actual = run(states.begin(rest), past_key_values=cache, use_cache=True)
    except Exception as error:  # of any type, from a class with its own kind of cache
        raise UserError(
            f"{name} does not run with saved states ({type(error).__name__}: {reason(error)}); {advice}"
        ) from error
    is_right = float((right - actual).abs().max()) <= TOLERANCE_FRAC * float((right - wrong).abs().max()) + 1e-6
    if not any(layer.held for layer in state_layers(layers)) or not is_right:
        raise UserError(f"{name} keeps states that draftsmith cannot save and restore; {advice}")
