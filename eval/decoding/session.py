"""The target in decoding: it owns the KV cache, runs a draft tree in one forward and keeps the accepted path.

A session works with any decoder-only `AutoModelForCausalLM` that takes a 4-D attention mask and a transformers `Cache`;
a probe makes sure of it, once per target.

Shapes: P prompt, N tree nodes, S tokens in the cache, L layers, B batch (1), H heads, D head size, F features, V
vocabulary.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from draftsmith.errors import UserError, reason
from draftsmith.eval.trees.verify import DraftTree, TreeShape, root_only
from draftsmith.models.cpu_kernels import MOST_ROWS
from draftsmith.models.decoding.decoders import LONGEST_TREE_NODES
from draftsmith.models.decoding.kv_cache import aligned, open_mask, to_device
from draftsmith.models.target.features import FINAL_FEATURES, FeatureTap
from draftsmith.models.target.few_rows import CpuTarget
from draftsmith.models.target.loading import longest_sequence_tokens
from draftsmith.models.target.windows import Masks, has_recurrent_layers, windows_of

WORKING_TARGETS = "decoder-only transformers with standard attention work: Llama, Qwen, Mistral, Gemma, Phi, GPT-2, ..."
MOST_SHAPES = 4096  # whose masks are remembered
PROBE_ELDERS = 24
MASK_NODES = 64  # of the mask's buffer, which grows for larger trees

_probed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class TreeCache(Cache):
    """The cache of one transformers model: a forward writes after the committed tokens, `keep` keeps the accepted path.

    All layers are views of one tensor, so that moving an accepted path is two operations, whatever their number.
    `committed` tokens are kept; whatever a forward wrote after them is a proposal.

    `ahead` rows after the committed ones are part of the proposal too: the next forward writes after them. Zero where
    a tree is run in one forward.

    With `places` [n] a forward writes there and attends to the first `view_tokens` columns, whatever is committed; what
    it writes attends to itself alone where these are 0.

    Args:
        static: Whether there will be such forwards.
    """

    def __init__(self, num_layers: int, capacity_tokens: int, static: bool = False) -> None:
        self.capacity_tokens = self.view_tokens = capacity_tokens
        self.static = static
        self.places: Tensor | None = None
        self.committed = self.ahead = 0
        # [L, B, H, S, D], made when the first forward shows the sizes.
        self.all_keys: Tensor | None = None
        self.all_values: Tensor | None = None
        super().__init__(layers=[TreeCacheLayer(self, index) for index in range(num_layers)])

    def keep(self, path: list[int]) -> None:
        """Commit the nodes of `path` (root first, ascending) of what the last forward wrote; forget the rest."""
        in_place = 0
        while in_place < len(path) and path[in_place] == in_place:
            in_place += 1
        start = self.committed
        if in_place < len(path):
            assert self.all_keys is not None
            assert self.all_values is not None
            source = to_device(path[in_place:], self.all_keys.device) + start
            for slab in (self.all_keys, self.all_values):
                slab.narrow(3, start + in_place, len(source)).copy_(slab.index_select(3, source))
        self.committed, self.ahead = start + len(path), 0

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.committed = self.ahead = 0


class TreeCacheLayer(CacheLayerMixin):
    """One layer's view of the `TreeCache`."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        self._cache, self._index, self.is_compileable = cache, index, cache.static

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take this layer's part of the cache's memory, which the first layer makes. Both [B, H, n, D]."""
        cache = self._cache
        if cache.all_keys is None or cache.all_values is None:
            cache.all_keys, cache.all_values = (
                part.new_zeros(len(cache.layers), *part.shape[:2], cache.capacity_tokens, part.shape[3])
                for part in (key_states, value_states)
            )
        self.keys, self.values = cache.all_keys[self._index], cache.all_values[self._index]
        for room, states in ((self.keys, key_states), (self.values, value_states)):
            if (room.shape[1], room.shape[3], room.device) != (states.shape[1], states.shape[3], states.device):
                raise UserError(
                    "the target's layers differ in key-value heads, head size or device, which the tree cache does not "
                    "support: use a target with equal layers on one device, such as Llama, Qwen, Mistral or GPT-2"
                )
            if cache.static:
                torch._dynamo.mark_static_address(room)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write n tokens after what is there; returns views of both together, [B, H, committed + ahead + n, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        places, end = self._cache.places, self._cache.view_tokens
        if places is not None:
            self.keys.index_copy_(2, places, key_states)
            self.values.index_copy_(2, places, value_states)
            if end == 0:
                return key_states, value_states
        else:
            start, count = self.get_seq_length(), key_states.shape[2]
            end = start + count
            self.keys.narrow(2, start, count).copy_(key_states)
            self.values.narrow(2, start, count).copy_(value_states)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def get_seq_length(self) -> int:
        # Positions are always given, so nobody computes with this: a number that changes would compile anew.
        return 0 if self._cache.places is not None else self._cache.committed + self._cache.ahead

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._cache.capacity_tokens


@dataclass(slots=True)
class TargetStep:
    """What one forward of the target gave.

    logits: [N, V], or [1, V] of the prompt's last token; features: [N, F] or [P, F], the session's feature layers *at*
    each token: what the token after it is predicted from.
    """

    logits: Tensor
    features: Tensor


def cached_logits(
    model: Any, cache: TreeCache, ids: Tensor, positions: Tensor, mask: Masks | None, **options: Any
) -> Tensor:
    """[1, N, V] of a causal language model at ids and positions [1, N], whose keys and values join the cache."""
    return model(
        input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True, **options
    ).logits


class TargetSession:
    """One sequence at a time on one target: `prefill`, then rounds of `forward_tree` and `commit`.

    While a session is open, cuDNN's attention is off: on Hopper torch prefers it, and it plans anew for every length.

    Args:
        target: The model, in eval mode.
        max_length_tokens: Prompt and answer together must fit; memory for them is allocated once.
        feature_layers: What the drafter reads; see `draftsmith.models.target.features.FeatureTap`.

    Raises:
        UserError: The target cannot hold that many tokens, has no such layers, or cannot run draft trees.
    """

    current = 0
    _static_cache: ClassVar[bool] = False
    _num_open: ClassVar[int] = 0
    _cudnn_before: ClassVar[bool] = True

    def __init__(
        self, target: Any, max_length_tokens: int, feature_layers: tuple[int, ...] = (FINAL_FEATURES,)
    ) -> None:
        limit = longest_sequence_tokens(target)
        if limit is not None and max_length_tokens > limit:
            raise UserError(
                f"prompt and answer of {max_length_tokens} tokens do not fit into the target's {limit} positions: "
                "lower eval.max_new_tokens or shorten the prompt"
            )
        self.max_length_tokens, self.device, self._target = max_length_tokens, target.device, target
        takes = inspect.signature(target.forward).parameters
        self._prefill_options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._feature_layers, self._tap = feature_layers, FeatureTap(target, feature_layers)
        if TargetSession._num_open == 0:
            TargetSession._cudnn_before = torch.backends.cuda.cudnn_sdp_enabled()
        TargetSession._num_open += 1
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Once: at `close`, or when the session is gone that nobody closed.
        self._cudnn_off = weakref.finalize(self, TargetSession._one_less)
        self._windows = windows_of(target)
        layers = target.config.get_text_config().num_hidden_layers
        self._cache = TreeCache(layers, self._capacity_tokens(max_length_tokens), self._static_cache)
        self._positions = torch.arange(self._cache.capacity_tokens, device=self.device)[None]
        # What runs few rows on a CPU; None: the target itself does.
        self._few_rows = CpuTarget.of(target, self._cache.capacity_tokens)
        # The additive mask [1, 1, N, S], zero where a node may look: at everything committed, and in its tree.
        self._closed = torch.finfo(target.dtype).min
        self._mask = self._closed_mask(MASK_NODES)
        self._bias_of: dict[TreeShape, Tensor] = {}
        if target not in _probed:
            self._probe()
            _probed.add(target)

    def _capacity_tokens(self, max_length_tokens: int) -> int:
        """Return how many columns the cache has, for sequences of this length."""
        return aligned(max_length_tokens + 1 + LONGEST_TREE_NODES)

    @staticmethod
    def _one_less() -> None:
        TargetSession._num_open -= 1
        if TargetSession._num_open == 0:
            torch.backends.cuda.enable_cudnn_sdp(TargetSession._cudnn_before)

    def close(self) -> None:
        """Take the feature hooks off the target again."""
        self._tap.close()
        self._cudnn_off()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_room(self, prompt_ids: list[int], new_tokens: int = 0) -> None:
        """
        Raises:
            UserError: The prompt, or it and an answer of so many tokens, do not fit.
        """
        if not 0 < len(prompt_ids) <= self.max_length_tokens - new_tokens:
            answer = f" and an answer of {new_tokens} do" if new_tokens else " does"
            raise UserError(
                f"a prompt of {len(prompt_ids)} tokens{answer} not fit into a session of {self.max_length_tokens}: "
                "lower eval.max_new_tokens or shorten the prompt"
            )

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read afterwards is true."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def _run(self, ids: Tensor, positions: Tensor, mask: Masks | None, **options: Any) -> TargetStep:
        """ids and positions [1, N] to logits [1, N, V] and features [1, N, F]."""
        if not options and not isinstance(mask, dict) and self._is_one_call(ids.shape[1]):
            places = self._cache.places
            given = {"mask": None if mask is None else mask[0, 0], "places": places}
            step = self._in_one_call(ids[0].tolist(), positions[0].tolist(), **given)
            return TargetStep(step.logits[None], step.features[None])
        return TargetStep(cached_logits(self._target, self._cache, ids, positions, mask, **options), self._tap.take())

    def _is_one_call(self, rows: int) -> bool:
        """Whether `CpuTarget` runs this many rows; the first prompt makes the cache that it writes into."""
        return self._few_rows is not None and rows <= MOST_ROWS and self._cache.all_keys is not None

    def _in_one_call(self, tokens: list[int], positions: list[int], **rows: Any) -> TargetStep:
        """Logits [N, V] and features [N, F] of tokens at these positions; `rows` as in `CpuTarget.forward`."""
        cache = self._cache
        assert self._few_rows is not None
        features, logits = self._few_rows.forward(
            tokens, positions, cache.all_keys, cache.all_values, cache.get_seq_length(), self._feature_layers, **rows
        )
        return TargetStep(logits, features)

    def _tree_in_one_call(self, tree: DraftTree, positions: list[int]) -> TargetStep:
        return self._in_one_call(tree.tokens, positions, parents=tree.parents)

    def read_layers(self, feature_layers: tuple[int, ...]) -> None:
        """Give other features from now on; called before a sequence, for the method that will decode it."""
        if feature_layers != self._feature_layers:
            self._tap.close()
            self._feature_layers, self._tap = feature_layers, FeatureTap(self._target, feature_layers)

    @property
    def runs_in_one_call(self) -> bool:
        """Whether a draft tree is one call of `CpuTarget`."""
        return self._few_rows is not None

    @property
    def length_tokens(self) -> int:
        """Committed tokens in the cache: all but the newest."""
        return self._cache.committed

    @torch.inference_mode()
    def prefill(self, prompt_ids: list[int]) -> TargetStep:
        """Forget the last sequence and read a prompt."""
        self.check_room(prompt_ids)
        self._cache.reset()
        if self._few_rows is not None:
            self._few_rows.refresh()
        self._mask.fill_(self._closed)
        self._mask_columns = (0, 0)
        prompt_length = len(prompt_ids)
        ids = to_device([prompt_ids], self.device)
        step = self._run(ids, self._positions[:, :prompt_length], None, **self._prefill_options)
        self._cache.committed = prompt_length
        return TargetStep(step.logits[0, -1:], step.features[0])

    @torch.inference_mode()
    def forward_tree(self, tree: DraftTree) -> TargetStep:
        """Run all nodes in one forward. Nothing is kept until `commit`."""
        start, end = self._cache.committed, self._cache.committed + len(tree)
        if end > self._cache.capacity_tokens:
            raise UserError(f"a draft tree of {len(tree)} nodes is too large: use at most {LONGEST_TREE_NODES}")
        places = [start + depth for depth in tree.depths]
        if self._is_one_call(len(tree)) and not self._windows.reached(end):
            return self._tree_in_one_call(tree, places)
        columns = self._columns_of(end)
        ids, positions = to_device([tree.tokens, places], self.device)
        # One token looks at the whole cache: without a mask the fastest attention kernels apply. Beyond a window
        # transformers makes a mask itself, and `CpuTarget` does not.
        mask: Masks | None = None
        slides = self._windows.reached(end)
        if len(tree) > 1 or columns != end or (slides and self._few_rows is not None):
            mask = self._tree_mask(tree.shape, columns)
            if slides:  # what columns of nodes hold stands at the nodes' own depths
                mask = self._windows.masks(mask, positions, torch.cat([self._positions[0, :start], positions]))
        step = self._run(ids[None], positions[None], mask)
        return TargetStep(step.logits[0], step.features[0])

    def forward_trees(self, trees: Sequence[tuple[int, DraftTree]]) -> list[TargetStep]:
        return [self.forward_tree(tree) for _, tree in trees]

    @torch.inference_mode()
    def commit(self, path: list[int], sequence: int = 0) -> None:
        """Keep the accepted nodes (root first) of the last `forward_tree`."""
        self._cache.keep(path)

    def _columns_of(self, end: int) -> int:
        """Return how many columns of the cache are attended to, given where a tree ends."""
        return end

    def _tree_mask(self, shape: TreeShape, columns: int) -> Tensor:
        """[1, 1, N, columns] additive: a view of one buffer, of which only what has changed is written."""
        bias = self._bias_of.get(shape)
        if bias is None:
            if len(self._bias_of) >= MOST_SHAPES:
                self._bias_of.clear()
            seen = shape.attention_mask
            bias = torch.zeros(seen.shape, dtype=self._mask.dtype).masked_fill_(~seen, self._closed)
            bias = self._bias_of[shape] = to_device(bias, self.device)
        start, nodes = self._cache.committed, len(shape)
        if nodes > self._mask.shape[2]:
            self._mask = self._closed_mask(nodes)
        first, last = self._mask_columns  # of the last tree, whose path has been committed since
        self._mask[..., start:last] = self._closed
        self._mask[..., first:start] = 0
        self._mask[0, 0, :nodes, start : start + nodes] = bias
        self._mask_columns = (start, start + nodes)
        return self._mask[:, :, :nodes, :columns]

    def _closed_mask(self, nodes: int) -> Tensor:
        self._mask_columns = (0, 0)
        shape = (1, 1, nodes, self._cache.capacity_tokens)
        return open_mask(*shape, dtype=self._target.dtype, device=self.device).fill_(self._closed)

    @torch.inference_mode()
    def _probe(self) -> None:
        """Make sure that two siblings in a tree see their ancestors and not each other."""
        name = self._target.config.name_or_path or type(self._target).__name__
        if has_recurrent_layers(self._target):
            self.close()
            raise UserError(
                f"target {name} has layers of linear attention or another state that a draft tree cannot share: "
                "drafters for it train and export, but this loop cannot verify their trees; use an engine, as with "
                "`draftsmith eval --engine vllm`"
            )
        vocabulary = self._target.config.get_text_config().vocab_size
        # Spread over the vocabulary: first in it are often special tokens, at which models are at their worst.
        *prompt, root, elder, younger = (place * vocabulary // 6 for place in range(1, 6))
        try:
            self.prefill(prompt)
            # Many elders: where a column counts and not the position, as with ALiBi, the younger is far from its place.
            tree = DraftTree([root, *[elder] * PROBE_ELDERS, younger], TreeShape.of((-1, *[0] * (PROBE_ELDERS + 1))))
            seen = self.forward_tree(tree).logits[-1]
            # What a target gives that does not see the mask: the younger at its place, looking at the elder.
            self.prefill(prompt)
            ids, positions = torch.tensor([[root, elder, younger], [2, 3, 3]], device=self.device)
            wrong = self._run(ids[None], positions[None], self._tree_mask(TreeShape.chain(2), 5)).logits[0, 2]
            self.prefill(prompt)
            self.forward_tree(root_only(root))
            self.commit([0])
            right = self.forward_tree(root_only(younger)).logits[0]
            self._cache.reset()
            # Another way to compute the same: in half precision kernels differ.
            ids = torch.tensor([[*prompt, root, younger]], device=self.device)
            also_right = self._target(input_ids=ids, use_cache=False).logits[0, -1]
        except UserError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise UserError(
                f"target {name} cannot run draft trees ({type(error).__name__}: {reason(error)}); {WORKING_TARGETS}"
            ) from error
        effect = float((right - wrong).abs().max())
        least = min(float((seen - each).abs().max()) for each in (right, also_right))
        if least > 0.25 * effect + 1e-6:
            self.close()
            raise UserError(
                f"target {name} ignores 4-D attention masks or position ids, which draft trees need; "
                "use target.attn_implementation=sdpa or eager, or a target without ALiBi"
            )
