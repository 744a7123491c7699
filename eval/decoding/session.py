"""The target in decoding: it owns the KV cache, runs a draft tree in one forward and keeps the accepted path.

Works with any decoder-only `AutoModelForCausalLM` that takes a 4-D attention mask and a transformers `Cache`; a probe
makes sure of it, once per target.

Shapes: P prompt, N tree nodes, S tokens in the cache, F features, V vocabulary. The batch is 1.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from draftsmith.eval.trees.tree import DraftTree, TreeShape, root_only
from draftsmith.models.decoding.decoders import LONGEST_TREE_NODES
from draftsmith.models.decoding.kv_cache import TreeCache, aligned, open_mask, to_device
from draftsmith.models.target.features import FINAL_FEATURES, FeatureTap
from draftsmith.models.target.loading import longest_sequence_tokens
from draftsmith.recipes.errors import UserError, reason

WORKING_TARGETS = "decoder-only transformers with standard attention work: Llama, Qwen, Mistral, Gemma, Phi, GPT-2, ..."
MOST_SHAPES = 4096  # whose masks are remembered
MASK_NODES = 64  # of the mask's buffer, which grows for larger trees

_probed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass(slots=True)
class TargetStep:
    """What one forward of the target gave.

    logits: [N, V], or [1, V] of the prompt's last token; features: [N, F] or [P, F], the session's feature layers *at*
    each token: what the token after it is predicted from.
    """

    logits: Tensor
    features: Tensor


def cached_logits(
    model: Any, cache: TreeCache, ids: Tensor, positions: Tensor, mask: Tensor | None, **options: Any
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

    cache_class: type[TreeCache] = TreeCache
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
        capacity = aligned(max_length_tokens + 1 + LONGEST_TREE_NODES)
        self._cache = self.cache_class(target.config.get_text_config().num_hidden_layers, capacity)
        self._positions = torch.arange(self._cache.capacity_tokens, device=self.device)[None]
        # The additive mask [1, 1, N, S], zero where a node may look: at everything committed, and in its tree.
        self._closed = torch.finfo(target.dtype).min
        self._mask = self._closed_mask(MASK_NODES)
        self._bias_of: dict[TreeShape, Tensor] = {}
        if target not in _probed:
            self._probe()
            _probed.add(target)

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
    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, **options: Any) -> TargetStep:
        """ids and positions [1, N] to logits [1, N, V] and features [1, N, F]."""
        return TargetStep(cached_logits(self._target, self._cache, ids, positions, mask, **options), self._tap.take())

    def read_layers(self, feature_layers: tuple[int, ...]) -> None:
        """Give other features from now on: before a sequence, for the method that will decode it."""
        if feature_layers != self._feature_layers:
            self._tap.close()
            self._feature_layers, self._tap = feature_layers, FeatureTap(self._target, feature_layers)

    @property
    def length_tokens(self) -> int:
        """Committed tokens in the cache: all but the newest."""
        return self._cache.committed

    @torch.inference_mode()
    def prefill(self, prompt_ids: list[int]) -> TargetStep:
        """Forget the last sequence and read a prompt."""
        self.check_room(prompt_ids)
        self._cache.reset()
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
        columns = self._columns_of(end)
        ids, positions = to_device([tree.tokens, [start + depth for depth in tree.depths]], self.device)
        # One token looks at the whole cache: without a mask the fastest attention kernels apply.
        mask = None if len(tree) == 1 and columns == end else self._tree_mask(tree.shape, columns)
        step = self._run(ids[None], positions[None], mask)
        return TargetStep(step.logits[0], step.features[0])

    @torch.inference_mode()
    def commit(self, path: list[int]) -> None:
        """Keep the accepted nodes (root first) of the last `forward_tree`."""
        self._cache.keep(path)

    def _columns_of(self, end: int) -> int:
        """How many columns of the cache are attended to, given where a tree ends."""
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
        vocabulary = self._target.config.get_text_config().vocab_size
        # Spread over the vocabulary: first in it are often special tokens, at which models are at their worst.
        *prompt, root, elder, younger = (place * vocabulary // 6 for place in range(1, 6))
        try:
            self.prefill(prompt)
            tree = DraftTree([root, elder, younger], TreeShape.of((-1, 0, 0)))
            seen = self.forward_tree(tree).logits[2]
            # What a target gives that does not see the mask: the younger at its place, looking at the elder.
            self.prefill(prompt)
            ids, positions = torch.tensor([tree.tokens, [2, 3, 3]], device=self.device)
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
                "use target.attn_implementation=sdpa or eager"
            )
