"""Answers from the target in this process, in batches, on a CPU or GPU.

Each row of the batch generates one answer, one token per forward. As soon as an answer ends, the next prompt takes its
row, and a conversation's next turn continues in the row of its previous one. An answer depends neither on the other
rows nor on interruptions: above temperature 0 each is drawn by a generator that its request seeds.

Shapes: A active rows, R rows, n new tokens, H key-value heads, S tokens in the cache, D head dimension, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftsmith.data.engines.engine import Completion, EngineSetting, Outcome, Request
from draftsmith.errors import UserError
from draftsmith.models.decoding.kv_cache import to_device
from draftsmith.models.decoding.recurrent import cache_layers, check_states, state_layers
from draftsmith.models.kernels.cpu_kernels import pack_linears
from draftsmith.models.kernels.cuda_attention import without_cudnn_attention
from draftsmith.models.sampling import first_token
from draftsmith.models.target.loading import load_target, longest_sequence_tokens
from draftsmith.models.target.windows import get_windows, has_recurrent_layers, rope_switch, takes_masks
from draftsmith.recipes.schema import Section


class TransformersEngine:
    """Engine with continuous batching on a target that is loaded in this process.

    Args:
        target: A causal language model in eval mode.
        batch_size: Number of concurrent answers, the rows of one forward.
        longest_tokens: Most tokens of a prompt and its answer together; lowered to the target's positions.
        end_ids: Tokens that end an answer.

    Raises:
        UserError: The target has recurrent states that cannot be saved, or its RoPE angles in one row depend on the
            lengths of the other rows.
    """

    class Options(Section):
        """Options of `engine: transformers`, set in a recipe by `data.distill.options`."""

        batch_size: int = Field(16, ge=1, description="number of answers that are generated concurrently")

    def __init__(self, target: Any, batch_size: int, longest_tokens: int, end_ids: tuple[int, ...]) -> None:
        if has_recurrent_layers(target):
            check_states(target)
        self._target, self._end_ids = target, end_ids
        self._windows = get_windows(target) if takes_masks(target) else None
        self.concurrency = batch_size
        self.max_length_tokens = min(longest_tokens, longest_sequence_tokens(target) or longest_tokens)
        switch = rope_switch(target)
        if switch is not None and self.max_length_tokens > switch:
            raise UserError(
                f"the target's RoPE changes for all rows of a batch with one beyond {switch:,} tokens, and prompt and "
                f"answer may have {self.max_length_tokens:,}: lower the sum of data.max_length_tokens and "
                f"data.distill.max_new_tokens to {switch} at most"
            )
        takes_count = "logits_to_keep" in inspect.signature(target.forward).parameters
        self._last_logits: dict[str, Any] = {"logits_to_keep": 1} if takes_count else {}
        self._cache = RowCache(target, batch_size, self.max_length_tokens)
        self._rows: list[_Row] = []  # in the cache's order
        self._ended: list[_Row] = []  # rows whose answers `collect` has returned; a next turn may continue in them
        self._waiting: deque[Request] = deque()

    @classmethod
    def make(cls, options: Options, setting: EngineSetting) -> TransformersEngine:
        """Load the target and build its engine."""
        data = setting.recipe.data
        longest_tokens = data.max_length_tokens + data.distill.max_new_tokens
        with _gpu_memory_errors(options.batch_size):
            target, _ = load_target(setting.recipe.target)
            pack_linears(target)
            return cls(target, options.batch_size, longest_tokens, setting.end_ids)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    @torch.inference_mode()
    def collect(self) -> list[tuple[str, Outcome]]:
        """Run forwards of the batch until an answer has ended; return (key, outcome) of all answers that have."""
        outcomes: list[tuple[str, Outcome]] = []
        with _gpu_memory_errors(self.concurrency):
            while self._waiting and (self._ended or len(self._rows) < self.concurrency):
                self._prefill(self._waiting.popleft())
            while not outcomes:
                outcomes = self._advance()
        return outcomes

    def close(self) -> None:
        self._waiting.clear()

    def _prefill(self, request: Request) -> None:
        """Prefill a prompt in the row that holds its beginning, or in a free row."""
        row = next((row for row in self._ended if row.holds_beginning_of(request)), None)
        if row is not None:
            self._ended.remove(row)
        else:
            if len(self._rows) == self.concurrency:
                self._remove_row(self._ended[-1])
            row = _Row(torch.Generator(self._target.device))
            self._rows.append(row)
        start, row.request, row.ids, row.held_ids = len(row.held_ids), request, [], list(request.prompt_ids)
        row.generator.manual_seed(request.seed)
        with self._cache.one_row(self._rows.index(row), start):
            positions = [*range(start, len(request.prompt_ids))]
            logits = self._forward([request.prompt_ids[start:]], [positions], None, **self._last_logits)
        self._append_token(row, logits[0, -1], int(logits[0, -1].max(-1).indices))

    def _advance(self) -> list[tuple[str, Outcome]]:
        """Run a forward of all rows, unless an answer has ended with its first token; return the ended answers.

        Their rows stay until the next call, in case the next turns of their conversations are submitted before it.
        """
        while self._ended:
            self._remove_row(self._ended[-1])
        if not any(self._has_ended(row) for row in self._rows):
            lengths = [len(row.held_ids) for row in self._rows]
            lengths_a = self._cache.begin_rows(lengths, self._target.device)
            seen = torch.arange(max(lengths) + 1, device=lengths_a.device) <= lengths_a[:, None]
            mask: Any = None if min(lengths) == max(lengths) else seen
            if mask is not None and self._windows is not None:
                mask = self._windows.row_masks(mask, lengths_a, self._target.dtype)
            logits = self._forward([row.ids[-1:] for row in self._rows], [[length] for length in lengths], mask)[:, 0]
            greedy_ids = logits.max(-1).indices.tolist()  # for all rows, so that the device is waited for once
            for row, logits_v, greedy_id in zip(self._rows, logits, greedy_ids, strict=True):
                row.held_ids.append(row.ids[-1])
                self._append_token(row, logits_v, greedy_id)
        self._ended = [row for row in self._rows if self._has_ended(row)]
        return [
            (row.request.key, Completion(row.ids, "stop" if row.ids[-1] in self._end_ids else "length"))
            for row in self._ended
        ]

    def _forward(self, ids_an: list[list[int]], positions_an: list[list[int]], mask_as: Any, **options: Any) -> Tensor:
        """Return logits [A, n, V], or [A, 1, V] by `logits_to_keep`; keys and values are added to the cache."""
        ids, positions = to_device([ids_an, positions_an], self._target.device)
        logits: Tensor = self._target(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask_as,
            past_key_values=self._cache,
            use_cache=True,
            **options,
        ).logits
        return logits

    def _append_token(self, row: _Row, logits_v: Tensor, greedy_id: int) -> None:
        """Choose a row's next token from its logits [V], and add it."""
        settings = row.request.settings
        row.ids.append(greedy_id if settings.greedy else first_token(logits_v, settings, row.generator))

    def _has_ended(self, row: _Row) -> bool:
        return row.ids[-1] in self._end_ids or len(row.ids) == row.request.settings.max_new_tokens

    def _remove_row(self, row: _Row) -> None:
        """Remove a row from the batch; the last row moves to its place."""
        index, last = self._rows.index(row), len(self._rows) - 1
        if index != last:
            self._cache.move_row(last, index, len(self._rows[last].held_ids))
        self._rows[index] = self._rows[last]
        self._rows.pop()
        self._ended.remove(row)


@dataclass(eq=False)
class _Row:
    """An answer being generated. `held_ids`: tokens in the cache, the prompt and `ids` without the last one."""

    generator: torch.Generator
    request: Request = field(init=False)
    ids: list[int] = field(default_factory=list)
    held_ids: list[int] = field(default_factory=list)

    def holds_beginning_of(self, request: Request) -> bool:
        length = len(self.held_ids)
        is_next_turn = self.request.key == request.key and len(request.prompt_ids) > length
        return is_next_turn and request.prompt_ids[:length] == self.held_ids


class RowCache(Cache):
    """KV cache of rows of different lengths. A forward adds one token to each of the first A rows, or n to one row."""

    def __init__(self, target: Any, rows: int, capacity_tokens: int) -> None:
        self.rows, self.capacity_tokens = rows, capacity_tokens
        self.lengths: list[int] = []  # lengths of the A rows that the next forward adds a token to
        self.lengths_a: Tensor | None = None  # the same on the device: copied once a forward, not in each layer
        self.only: tuple[int, int] | None = (
            None  # (row, number of its cached tokens) while a forward adds tokens to this row alone
        )
        layers = cache_layers(target, rows, lambda *_: _RowCacheLayer(self))
        held = [getattr(layer, "attention", layer) for layer in layers]  # some have recurrent states and attention
        self._attention = [layer for layer in held if isinstance(layer, _RowCacheLayer)]
        self._states = state_layers(layers)
        super().__init__(layers=layers)

    def begin_rows(self, lengths: list[int], device: torch.device) -> Tensor:
        """Prepare a forward that adds a token to each of the first A rows; return their lengths [A] on the device."""
        self.lengths, self.lengths_a = lengths, to_device(lengths, device)
        for states in self._states:
            states.select(slice(0, len(lengths)))
        return self.lengths_a

    @contextmanager
    def one_row(self, row: int, start: int) -> Iterator[None]:
        """Make forwards in this context add tokens to one row alone, after its first `start` tokens."""
        self.only = (row, start)
        for states in self._states:
            states.select(slice(row, row + 1), are_new=start == 0)
        try:
            yield
        finally:
            self.only = None

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the keys and values of a row's first `length` tokens, and its recurrent state, to row `target`."""
        for layer in self._attention:
            for tensor in (layer.keys, layer.values):
                assert tensor is not None
                tensor[target, :, :length] = tensor[source, :, :length]
        for states in self._states:
            states.move(source, target)


class _RowCacheLayer(CacheLayerMixin):
    """One layer of a `RowCache`: keys and values [R, H, S, D]."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, capacity = self._cache.rows, self._cache.capacity_tokens
        self.keys, self.values = (
            states.new_zeros(rows, states.shape[1], capacity, states.shape[3]) for states in (key_states, value_states)
        )
        self._every_row = torch.arange(rows, device=key_states.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append a token to each of A rows [A, H, 1, D], or n to one row [1, H, n, D]; return these rows, whole."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, count, new = self._cache, key_states.shape[0], key_states.shape[2]
        seen = []
        for held, states in ((self.keys, key_states), (self.values, value_states)):
            assert held is not None
            if cache.only is not None:
                row, start = cache.only
                held[row, :, start : start + new] = states[0]
                seen.append(held[row : row + 1, :, : start + new])
            else:
                assert cache.lengths_a is not None
                at = cache.lengths_a
                held[self._every_row[:count], :, at] = states[:, :, 0]
                seen.append(held[:count, :, : max(cache.lengths) + 1])
        return seen[0], seen[1]

    def get_seq_length(self) -> int:
        return self._cache.only[1] if self._cache.only is not None else max(self._cache.lengths, default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._cache.capacity_tokens


@contextmanager
def _gpu_memory_errors(batch_size: int) -> Iterator[None]:
    """Report a lack of GPU memory as a UserError, and disable cuDNN's attention."""
    try:
        with without_cudnn_attention():
            yield
    except torch.cuda.OutOfMemoryError:
        raise UserError(
            f"the GPU's memory is too small for {batch_size} concurrent answers: lower "
            f"data.distill.options.batch_size (now {batch_size}) and run the same command again"
        ) from None


ENGINE = TransformersEngine
