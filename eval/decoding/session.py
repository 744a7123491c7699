"""The target in decoding: it owns the KV cache, runs draft trees in one forward and keeps the accepted paths.

A session works with any decoder-only `AutoModelForCausalLM` that takes a 4-D attention mask and a transformers `Cache`;
a probe makes sure of it, once per target. How a forward is run is `CachedModel`'s (as the target is, or in one call on
a CPU) or `CompiledForward`'s; where the sequences' tokens lie is `KVCache`'s.

With several sequences one forward reads the weights for all of them. A mask hides from every row the tokens of the
others; our attention kernel reads the tokens that a row sees and nothing else, in the sequence's own order: a token has
the same bits alone and with others, wherever it lies.

Shapes: P prompt, N rows of a forward (the nodes of all trees), S columns of the cache, F features, V vocabulary.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.errors import UserError, reason
from draftsmith.eval.decoding.compiled_forward import CompiledForward, Compiler
from draftsmith.eval.trees.verify import BITS, DraftTree, TreeShape, root_only
from draftsmith.models.compiling import compiles_by_default
from draftsmith.models.decoding.cached_model import CachedModel
from draftsmith.models.decoding.decoders import LONGEST_TREE_NODES
from draftsmith.models.decoding.kv_cache import KVCache, to_device
from draftsmith.models.decoding.recurrent import MOST_UNREAD_TOKENS, ChainStates, chains_only, check_states
from draftsmith.models.kernels.cpu_layers import FAMILIES
from draftsmith.models.kernels.cpu_library import has_kernels
from draftsmith.models.target.features import FINAL_FEATURES
from draftsmith.models.target.loading import longest_sequence_tokens
from draftsmith.models.target.windows import Masks, architecture, get_windows, has_recurrent_layers

WORKING_TARGETS = "decoder-only transformers with standard attention work: Llama, Qwen, Mistral, Gemma, Phi, GPT-2, ..."
MOST_SHAPES = 4096  # whose masks are remembered
PROBE_ELDERS = 24
MASK_NODES = 64  # of the mask's buffer, which grows for larger trees

_probed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TargetStep:
    """Result of one forward of the target.

    logits: [N, V], or [1, V] of the prompt's last token; features: [N, F] or [P, F], the session's feature layers *at*
    each token: what the token after it is predicted from.
    """

    logits: Tensor
    features: Tensor


def open_session(
    target: Any, max_length_tokens: int, compiles: bool | None, sequences: int = 1, same_size: bool | None = None
) -> TargetSession:
    """Open the session that `eval.compile` asks for.

    Args:
        compiles: True: a target that cannot be compiled is an error; None: it is compiled where the machine has what
            that takes, and runs as it is, after a warning, if it cannot be.
        same_size: As in `Compiler`.

    Raises:
        UserError: As `TargetSession`.
    """
    is_compiled = compiles
    if compiles is None:
        is_compiled = compiles_by_default(target.device) and not has_recurrent_layers(target)
    compiler = Compiler(must=bool(compiles), same_size=same_size) if is_compiled else None
    session = TargetSession(target, max_length_tokens, sequences=sequences, compiler=compiler)
    if target.device.type == "cpu" and has_kernels() and not session.runs_in_one_call:
        logger.warning(
            "%s has other layers than %s, which run in one call on a CPU: a step takes longer%s",
            type(target).__name__,
            ", ".join(FAMILIES.values()),
            ", and compiling it takes up to a minute the first time" if is_compiled else "",
        )
    return session


class TargetSession:
    """One or several sequences on one target: `prefill`, then rounds of `forward_trees` and `commit`.

    Calls without a sequence's number are for the sequence `current`. While a session is open, cuDNN's attention is off:
    on Hopper torch prefers it, and it makes a plan for every length.

    Args:
        target: The model, in eval mode.
        max_length_tokens: Prompt and answer together must fit; memory for them is allocated once.
        feature_layers: Layers that the drafter reads; see `draftsmith.models.target.features.FeatureTap`.
        compiler: How forwards of trees are compiled, unless they run in one call on a CPU; None: they are not.

    Raises:
        UserError: The target cannot hold that many tokens, has no such layers, or cannot run draft trees. Also in
            `forward_trees`, if it cannot be compiled and must be.
    """

    _num_open: ClassVar[int] = 0
    _cudnn_before: ClassVar[bool] = True

    def __init__(
        self,
        target: Any,
        max_length_tokens: int,
        feature_layers: tuple[int, ...] = (FINAL_FEATURES,),
        sequences: int = 1,
        compiler: Compiler | None = None,
    ) -> None:
        limit = longest_sequence_tokens(target)
        if limit is not None and max_length_tokens > limit:
            raise UserError(
                f"prompt and answer of {max_length_tokens} tokens do not fit into the target's {limit} positions: "
                "lower eval.max_new_tokens or shorten the prompt"
            )
        is_recurrent = has_recurrent_layers(target)
        if is_recurrent and (sequences > 1 or compiler is not None):
            instead = "serve it with --at-once 1" if sequences > 1 else "leave out eval.compile"
            raise UserError(
                f"a target with recurrent layers ({architecture(target.config)}) runs one sequence at a time, without "
                f"compilation: {instead}"
            )
        if is_recurrent and target not in _probed:
            check_states(target)
            _probed.add(target)
        self.max_length_tokens, self.device, self._target = max_length_tokens, target.device, target
        self.sequences, self.current = sequences, 0
        self.cache = KVCache(max_length_tokens + 1 + LONGEST_TREE_NODES, sequences)
        self._feature_layers = feature_layers
        self.model = CachedModel(target, self.cache, feature_layers, is_static=compiler is not None)
        self.compiled: CompiledForward | None = None
        if TargetSession._num_open == 0:
            TargetSession._cudnn_before = torch.backends.cuda.cudnn_sdp_enabled()
        TargetSession._num_open += 1
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Runs once: at `close`, or when an unclosed session is garbage-collected.
        self._cudnn_off = weakref.finalize(self, TargetSession._release_session)
        self._windows = get_windows(target)
        self._positions = torch.arange(self.cache.longest_tokens, device=self.device)
        self._closed = torch.finfo(target.dtype).min
        self._mask_buffer = torch.empty(1, 1, 0, 0)
        self._bias_of: dict[TreeShape, Tensor] = {}
        if target not in _probed:
            self._probe()
            _probed.add(target)
        if compiler is not None and not self.runs_in_one_call:
            self.compiled = CompiledForward(self.model, compiler)

    @staticmethod
    def _release_session() -> None:
        TargetSession._num_open -= 1
        if TargetSession._num_open == 0:
            torch.backends.cuda.enable_cudnn_sdp(TargetSession._cudnn_before)

    def close(self) -> None:
        """Remove the feature hooks from the target."""
        self.model.tap.close()
        self._cudnn_off()

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
        """Wait for the device, so that a clock read afterwards is true."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def read_layers(self, feature_layers: tuple[int, ...]) -> None:
        """Return other features from now on; called before a sequence, for the method that will decode it.

        A compiled forward reads all that were ever requested; new ones are compiled from scratch.
        """
        self._feature_layers = feature_layers
        if self.compiled is None:
            self.model.read_layers(feature_layers)
        elif new := tuple(layer for layer in feature_layers if layer not in self.model.feature_layers):
            self.model.read_layers(self.model.feature_layers + new)
            self.compiled.forget_graph()

    def _step(self, logits: Tensor, features: Tensor) -> TargetStep:
        """Return a result with the features of the requested layers, of all that are read."""
        layers, read = self._feature_layers, self.model.feature_layers
        if layers != read:
            parts = features.chunk(len(read), dim=-1)
            features = torch.cat([parts[read.index(layer)] for layer in layers], dim=-1)
        return TargetStep(logits, features)

    @property
    def runs_in_one_call(self) -> bool:
        """Return whether a draft tree is one call of `CpuTarget`."""
        return self.model.cpu_target is not None

    @torch.inference_mode()
    def prefill(self, prompt_ids: list[int]) -> TargetStep:
        """Forget the current sequence and read a prompt."""
        self.check_room(prompt_ids)
        self.cache.lengths[self.current] = 0
        if self.model.states is not None:
            self.model.states.reset()
        self.model.refresh()
        length = len(prompt_ids)
        places = self._places(self.current, 0, length)
        ids = to_device(prompt_ids, self.device)
        slides = self._windows.reached(length)
        step = self._step(*self.model.read_prompt(ids, self._positions[:length], places, slides))
        self.cache.lengths[self.current] = length
        return step

    def forward_tree(self, tree: DraftTree) -> TargetStep:
        """Run all nodes of a tree of the current sequence. Nothing is kept until `commit`."""
        return self.forward_trees([(self.current, tree)])[0]

    @torch.inference_mode()
    def forward_trees(self, trees: Sequence[tuple[int, DraftTree]]) -> list[TargetStep]:
        """Run trees of different sequences, each with its number, in one forward; nothing is kept until `commit`."""
        lengths = self.cache.lengths
        sizes = [len(tree) for _, tree in trees]
        ends = [lengths[number] + size for (number, _), size in zip(trees, sizes, strict=True)]
        if max(ends) > self.cache.longest_tokens:
            drafted = max(sizes) - 1
            raise UserError(f"a draft tree of {drafted} draft tokens is too large: use at most {LONGEST_TREE_NODES}")
        if self.model.states is not None:
            return [self._run_chain(trees[0][1], self.model.states)]
        # Beyond a sliding window each type of layer has its own mask, for which no graph was compiled.
        num_rows, slides = sum(sizes), self._windows.reached(max(ends))
        size = 0 if self.compiled is None or slides else self.compiled.size_of(num_rows)
        positions = [lengths[number] + depth for number, tree in trees for depth in tree.depths]
        logits, features = self._run(trees, positions, size, slides)
        if len(logits) == sizes[0]:
            return [self._step(logits, features)]
        parts = zip(logits[:num_rows].split(sizes), features[:num_rows].split(sizes), strict=True)
        return [self._step(*each) for each in parts]

    def _run_chain(self, chain: DraftTree, states: ChainStates) -> TargetStep:
        """Run a chain after the tokens that the states have not read.

        Raises:
            UserError: It is no chain.
        """
        size, length = len(chain), self.cache.length
        if chain.parents != tuple(range(-1, size - 1)):
            raise UserError(f"{chains_only(self._target)}: use tree: chain")
        if len(states.unread) > MOST_UNREAD_TOKENS:
            self._read(states.begin([]), length - len(states.unread))
            states.commit(0)
        tokens = states.begin(chain.tokens)
        logits, features = self._read(tokens, length + size - len(tokens))
        return self._step(logits[-size:], features[-size:])

    def _read(self, tokens: list[int], start: int) -> tuple[Tensor, Tensor]:
        """Run tokens in their order from this position on; logits [N, V] and features [N, F] of all read layers."""
        end = start + len(tokens)
        ids, positions_n = to_device([tokens, [*range(start, end)]], self.device)
        return self.model.run(ids, positions_n, start, end, None)

    def _run(
        self, trees: Sequence[tuple[int, DraftTree]], positions: list[int], size: int, slides: bool
    ) -> tuple[Tensor, Tensor]:
        """Return logits [N, V] and features [N, F] of all read layers for nodes of trees at these positions [N].

        Args:
            size: N of a compiled forward; 0: without compilation.
            slides: Whether some layer no longer sees all of a sequence.
        """
        cache, first, compiled = self.cache, trees[0][1], self.compiled if size else None
        if self.sequences == 1 and not slides and self.model.is_one_call(len(first)):
            return self.model.run_in_one_call(first.tokens, positions, cache.length, parents=first.parents)
        if compiled is not None and (results := self._run_compiled(compiled, trees, positions, size)) is not None:
            return results
        end = max(cache.lengths[number] + len(tree) for number, tree in trees)
        columns = cache.columns_of_first(end)
        ids, positions_n = self._numbers(trees, positions)
        where = self._places_of(trees)
        # One token looks at the whole cache: without a mask the fastest attention kernels apply. Beyond a window
        # transformers makes a mask itself, and `CpuTarget` does not.
        mask: Masks | None = None
        if len(ids) > 1 or self.sequences > 1 or columns != end or (slides and self.runs_in_one_call):
            mask = self._mask(trees, columns)
            if slides:
                mask = self._windows.masks(mask, positions_n, self._key_positions(trees, positions_n, columns))
        return self.model.run(ids, positions_n, where, columns, mask)

    def _run_compiled(
        self, compiled: CompiledForward, trees: Sequence[tuple[int, DraftTree]], positions: list[int], size: int
    ) -> tuple[Tensor, Tensor] | None:
        """Run as `_run` does; return None where the target cannot be compiled, and need not be."""
        cache, first = self.cache, trees[0][1]
        try:
            if compiled.is_static and self.sequences == 1 and size <= BITS:
                return compiled.run_tree(first, size, cache.length)
            if (more := size - len(positions)) > 0:  # nodes which the tree's own do not see
                number, last = trees[-1]
                drafted = None if last.drafted is None else F.pad(last.drafted, (0, more))
                tokens = last.tokens if drafted is not None else [*last.tokens, *[0] * more]
                padded = DraftTree(tokens, TreeShape.of((*last.parents, *[0] * more)), drafted=drafted)
                trees, positions = [*trees[:-1], (number, padded)], [*positions, *[cache.lengths[number] + 1] * more]
            end = max(cache.lengths[number] + len(tree) for number, tree in trees)
            columns = cache.capacity if compiled.is_static else cache.columns_of_first(end)
            ids, positions_n = self._numbers(trees, positions)
            return compiled.run(ids, positions_n, self._places_of(trees), columns, self._mask(trees, columns))
        except UserError as error:
            if compiled.must:
                raise
            logger.warning("%s; running without", str(error).partition(": use eval.compile")[0])
            self.compiled = None
            return None

    def _numbers(self, trees: Sequence[tuple[int, DraftTree]], positions: list[int]) -> Tensor:
        """Return the tokens and the positions of all nodes, [2, N], on the device."""
        tokens = [token for _, tree in trees for token in (*tree.tokens, *[0] * (len(tree) - len(tree.tokens)))]
        numbers, first = to_device([tokens, positions], self.device), 1
        for _, tree in trees:
            if tree.drafted is not None:
                numbers[0, first : first + len(tree.drafted)].copy_(tree.drafted)
            first += len(tree)
        return numbers

    @torch.inference_mode()
    def commit(self, path: list[int], sequence: int | None = None) -> None:
        """Keep the accepted nodes (root first) of a sequence's last tree."""
        self.cache.keep(path, self.current if sequence is None else sequence)
        if self.model.states is not None:
            self.model.states.commit(len(path))

    def _places_of(self, trees: Sequence[tuple[int, DraftTree]]) -> int | Tensor:
        """Return where the nodes of these trees are written, see `KVCache.write_at`."""
        places = [self._places(number, self.cache.lengths[number], len(tree)) for number, tree in trees]
        return places[0] if len(places) == 1 else torch.cat(places)  # type: ignore[arg-type]

    def _places(self, number: int, start: int, count: int) -> int | Tensor:
        """Return where `count` tokens of a sequence from `start` on are written, see `KVCache.write_at`."""
        return start if self.sequences == 1 else self.cache.columns(number, self.device)[start : start + count]

    def _mask(self, trees: Sequence[tuple[int, DraftTree]], columns: int) -> Tensor:
        """Return an additive mask [1, 1, N, columns], 0 where a node looks: at its sequence's tokens, and in its tree.

        A view of one buffer, whose strides stay the same.
        """
        num_rows = sum(len(tree) for _, tree in trees)
        if num_rows > self._mask_buffer.shape[2]:
            shape = (1, 1, max(num_rows, MASK_NODES), self.cache.capacity)
            self._mask_buffer = torch.empty(shape, dtype=self._target.dtype, device=self.device)
        mask = self._mask_buffer[:, :, :num_rows, :columns].fill_(self._closed)
        first = 0
        for number, tree in trees:
            start, end = self.cache.lengths[number], self.cache.lengths[number] + len(tree)
            own, bias = mask[0, 0, first : first + len(tree)], self._bias(tree)
            if self.sequences == 1:
                own[:, :start] = 0
                own[:, start:end] = bias
            else:
                token_columns = self.cache.columns(number, self.device)
                own.index_fill_(1, token_columns[:start], 0.0)
                own.index_copy_(1, token_columns[start:end], bias)
            first += len(tree)
        return mask

    def _bias(self, tree: DraftTree) -> Tensor:
        """Return the part [N, N] of the mask that is about the tree itself."""
        shape = tree.shape
        bias = self._bias_of.get(shape)
        if bias is None:
            if len(self._bias_of) >= MOST_SHAPES:
                self._bias_of.clear()
            attended = shape.attention_mask
            bias = torch.zeros(attended.shape, dtype=self._target.dtype).masked_fill_(~attended, self._closed)
            bias = self._bias_of[shape] = to_device(bias, self.device)
        return bias

    def _key_positions(self, trees: Sequence[tuple[int, DraftTree]], positions_n: Tensor, columns: int) -> Tensor:
        """Return the positions [S] in the sequences that have a tree, whose nodes have positions [N]."""
        key_s, first = torch.zeros(columns, dtype=torch.long, device=self.device), 0
        for number, tree in trees:
            start, token_columns = self.cache.lengths[number], self.cache.columns(number, self.device)
            key_s[token_columns[:start]] = self._positions[:start]
            key_s[token_columns[start : start + len(tree)]] = positions_n[first : first + len(tree)]
            first += len(tree)
        return key_s

    @torch.inference_mode()
    def _probe(self) -> None:
        """Make sure that two siblings in a tree see their ancestors and not each other."""
        name = self._target.config.name_or_path or type(self._target).__name__
        vocabulary = self._target.config.get_text_config().vocab_size
        # Spread over the vocabulary: the first ids are often special tokens, which models predict badly.
        *prompt, root, elder, younger = (place * vocabulary // 6 for place in range(1, 6))
        try:
            self.prefill(prompt)
            # Many elder siblings: if columns count and not positions, as with ALiBi, the younger one is far off its
            # place.
            tree = DraftTree([root, *[elder] * PROBE_ELDERS, younger], TreeShape.of((-1, *[0] * (PROBE_ELDERS + 1))))
            in_tree = self.forward_tree(tree).logits[-1]
            # Result of a target that ignores the mask: the younger sibling at its position also sees the elder ones.
            self.prefill(prompt)
            chain = DraftTree([root, elder, younger], TreeShape.chain(2))
            wrong = self._run([(self.current, chain)], [2, 3, 3], 0, slides=False)[0][2]
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
        effect = float((right - wrong).abs().max())
        least = min(float((in_tree - each).abs().max()) for each in (right, also_right))
        if least > 0.25 * effect + 1e-6:
            self.close()
            raise UserError(
                f"target {name} ignores 4-D attention masks or position ids, which draft trees need; "
                "use target.attn_implementation=sdpa or eager, or a target without ALiBi"
            )
