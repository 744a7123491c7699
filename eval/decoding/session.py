"""The target in decoding: it owns the KV cache, runs draft trees in one forward and keeps the accepted paths.

A session works with any decoder-only `AutoModelForCausalLM` that takes a 4-D attention mask and a transformers `Cache`;
a probe makes sure of it, once per target. `Forward` runs the target, `KVCache` stores the sequence's keys and values.

The RoPE of some targets changes at a certain length (`rope_switch`): no tree crosses that length, and at it the whole
sequence is read again, so that every token's logits are those of one forward over all tokens up to it.

Shapes: P prompt, N nodes of a tree, F features, V vocabulary.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError, reason
from draftsmith.eval.trees.verify import DraftTree, TreeShape, root_only
from draftsmith.models.compiling import compiles_by_default
from draftsmith.models.decoding.forward import Compiler, Forward
from draftsmith.models.decoding.kv_cache import LONGEST_TREE_NODES, KVCache
from draftsmith.models.decoding.recurrent import MOST_UNREAD_TOKENS, ChainStates, chains_only, check_states
from draftsmith.models.kernels.cpu_kernels import has_kernels
from draftsmith.models.kernels.cpu_layers import FAMILIES
from draftsmith.models.kernels.cuda_attention import without_cudnn_attention
from draftsmith.models.target.features import FINAL_FEATURES
from draftsmith.models.target.loading import longest_sequence_tokens
from draftsmith.models.target.windows import architecture, has_recurrent_layers, rope_switch

WORKING_TARGETS = "decoder-only transformers with standard attention work: Llama, Qwen, Mistral, Gemma, Phi, GPT-2, ..."
PROBE_ELDERS = 24

_probed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TargetStep:
    """Result of one forward of the target.

    logits: [N, V] at a tree's nodes, or [1, V] at a prompt's last token. features: [N, F] or [P, F], the hidden states
    of the session's feature layers *at* each token, from which the target predicts the token after it.
    """

    logits: Tensor
    features: Tensor


def open_session(
    target: Any, max_length_tokens: int, compiles: bool | None, same_size: bool | None = None
) -> TargetSession:
    """Open a session on the target, on CUDA compiled as the recipe's `eval.compile` says.

    Args:
        compiles: False: not compiled. True: a target that cannot be compiled is an error. None: as
            `compiles_by_default` says; a target that then fails to compile runs uncompiled, after a warning.
        same_size: Whether trees and single steps are padded to one size; None: as `Compiler` chooses.

    Raises:
        UserError: The target cannot hold that many tokens, run draft trees or, with `compiles`, be compiled.
    """
    is_compiled = compiles
    if compiles is None:
        cannot_be = has_recurrent_layers(target) or rope_switch(target) is not None
        is_compiled = compiles_by_default(target.device) and not cannot_be
    on_cuda = target.device.type == "cuda"
    compiler = Compiler(must=bool(compiles), same_size=same_size) if is_compiled and on_cuda else None
    session = TargetSession(target, max_length_tokens, compiler=compiler)
    if target.device.type == "cpu" and has_kernels() and session.forward.cpu_target is None:
        logger.warning(
            "%s is none of the architectures that run in one call on a CPU (%s): the same answers take longer",
            type(target).__name__,
            ", ".join(FAMILIES.values()),
        )
    return session


class TargetSession:
    """One sequence on one target: `prefill`, then rounds of `forward_tree` and `commit`.

    Args:
        target: The model, in eval mode.
        max_length_tokens: Most tokens of prompt and answer together; memory for them is allocated once.
        feature_layers: Layers that the drafter reads; see `draftsmith.models.target.features.FeatureTap`.
        compiler: How forwards of trees are compiled, unless they run in one call on a CPU; None: not compiled.

    Raises:
        UserError: The target cannot hold that many tokens, has no such layers, or cannot run draft trees. Also in
            `forward_tree`, if it cannot be compiled and must be.
    """

    def __init__(
        self,
        target: Any,
        max_length_tokens: int,
        feature_layers: tuple[int, ...] = (FINAL_FEATURES,),
        compiler: Compiler | None = None,
    ) -> None:
        limit = longest_sequence_tokens(target)
        if limit is not None and max_length_tokens > limit:
            raise UserError(
                f"prompt and answer of {max_length_tokens} tokens do not fit into the target's {limit} positions: "
                "lower eval.max_new_tokens or shorten the prompt"
            )
        if has_recurrent_layers(target):
            if compiler is not None:
                raise UserError(
                    f"a target with recurrent layers ({architecture(target.config)}) runs without compilation: leave "
                    "out eval.compile"
                )
            if target not in _probed:
                check_states(target)
                _probed.add(target)
        self.max_length_tokens, self.device, self._target = max_length_tokens, target.device, target
        self.cache = KVCache(max_length_tokens + 1 + LONGEST_TREE_NODES)
        self.forward = Forward(target, self.cache, feature_layers, compiler)
        # Where RoPE changes; the tokens in the cache; the last tree; whether their angles are those beyond the switch.
        self._switch, self._ids, self._tree, self._is_beyond = rope_switch(target), list[int](), root_only(0), False
        if target not in _probed:
            self._probe()
            _probed.add(target)

    def close(self) -> None:
        """Remove the feature hooks from the target."""
        self.forward.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_room(self, prompt_ids: list[int], new_tokens: int = 0) -> None:
        """Check that a prompt, with an answer of `new_tokens`, fits.

        Raises:
            UserError: Prompt and answer are too long.
        """
        if not 0 < len(prompt_ids) <= self.max_length_tokens - new_tokens:
            answer = f" and an answer of {new_tokens} do" if new_tokens else " does"
            raise UserError(
                f"a prompt of {len(prompt_ids)} tokens{answer} not fit into a session of {self.max_length_tokens}: "
                "lower eval.max_new_tokens or shorten the prompt"
            )

    def synchronize(self) -> None:
        """Wait until the device has finished its work; call it before reading a clock."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def read_layers(self, feature_layers: tuple[int, ...]) -> None:
        """Set the layers whose hidden states are returned as features; call it before the `prefill` of a sequence."""
        self.forward.read_layers(feature_layers)

    @without_cudnn_attention()
    @torch.inference_mode()
    def prefill(self, prompt_ids: list[int]) -> TargetStep:
        """Drop the current sequence and read a prompt; return logits [1, V] and features [P, F]."""
        self.check_room(prompt_ids)
        if self._switch is not None:
            self._ids, self._is_beyond = list(prompt_ids), len(prompt_ids) > self._switch
        return TargetStep(*self.forward.read_prompt(prompt_ids))

    @property
    def deepest_draft(self) -> int:
        """Return the largest depth that the next draft tree may have."""
        if self._switch is None or self.cache.length >= self._switch:
            return LONGEST_TREE_NODES
        return self._switch - self.cache.length - 1

    @without_cudnn_attention()
    @torch.inference_mode()
    def forward_tree(self, tree: DraftTree) -> TargetStep:
        """Run the target on all nodes of a tree; none of them joins the sequence until `commit`."""
        if self.forward.states is not None:
            return self._run_chain(tree, self.forward.states)
        if self._switch is not None:
            if tree.shape.max_depth > self.deepest_draft:
                raise ValueError(f"RoPE changes after {self._switch} tokens: cut the tree to depth `deepest_draft`")
            length, self._tree = self.cache.length, tree
            if length >= self._switch and not self._is_beyond:
                self.forward.read_prompt([*self._ids, tree.tokens[0]])
                self.cache.length, self._is_beyond = length, True
        return TargetStep(*self.forward(tree.tokens, tree.parents, tree.depths, tree.drafted))

    def _run_chain(self, chain: DraftTree, states: ChainStates) -> TargetStep:
        """Run a chain after the tokens that the states have not read.

        Raises:
            UserError: It is no chain.
        """
        size, length = len(chain), self.cache.length
        if chain.parents != tuple(range(-1, size - 1)):
            raise UserError(f"{chains_only(self._target)}: use tree: chain")
        if chain.drafted is not None:
            chain.read(chain.drafted[:0])
        if len(states.unread) > MOST_UNREAD_TOKENS:
            self.forward.run_chain(states.begin([]), length - len(states.unread))
            states.commit(0)
        tokens = states.begin(chain.tokens)
        logits, features = self.forward.run_chain(tokens, length + size - len(tokens))
        return TargetStep(logits[-size:], features[-size:])

    @torch.inference_mode()
    def commit(self, path: list[int]) -> None:
        """Add the accepted nodes (root first) of the last tree to the sequence; its tokens must be on the host."""
        if self._switch is not None:
            self._ids += [self._tree.tokens[node] for node in path]
        self.cache.keep(path)
        if self.forward.states is not None:
            self.forward.states.commit(len(path))

    @torch.inference_mode()
    def _probe(self) -> None:
        """Make sure that two siblings in a tree see their ancestors and not each other."""
        name = self._target.config.name_or_path or type(self._target).__name__
        vocabulary = self._target.config.get_text_config().vocab_size
        # Spread over the vocabulary: the first ids are often special tokens, which models predict badly.
        *prompt, root, elder, younger = (place * vocabulary // 6 for place in range(1, 6))
        compiler, self.forward.compiler = self.forward.compiler, None
        try:
            self.prefill(prompt)
            # Many elder siblings: if columns count and not positions, as with ALiBi, the younger one is far off its
            # place.
            tree = DraftTree([root, *[elder] * PROBE_ELDERS, younger], TreeShape.of((-1, *[0] * (PROBE_ELDERS + 1))))
            in_tree = self.forward_tree(tree).logits[-1]
            # Result of a target that ignores the mask: the younger sibling at its position also sees the elder ones.
            self.prefill(prompt)
            wrong = self.forward([root, elder, younger], (-1, 0, 1), (0, 1, 1))[0][2]
            self.prefill(prompt)
            self.forward_tree(root_only(root))
            self.commit([0])
            right = self.forward_tree(root_only(younger)).logits[0]
            self.cache.length = 0
            # The same result by another kernel, as a measure of rounding in half precision.
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
        self.forward.compiler = compiler
        effect = float((right - wrong).abs().max())
        least = min(float((in_tree - each).abs().max()) for each in (right, also_right))
        if least > 0.25 * effect + 1e-6:
            self.close()
            raise UserError(
                f"target {name} ignores 4-D attention masks or position ids, which draft trees need; "
                "use target.attn_implementation=sdpa or eager, or a target without ALiBi"
            )
