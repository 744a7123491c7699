"""Distillation's requests through the loop for several sequences, as `data.engines.transformers_engine` asks it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from draftsmith.data.engines.engine import Completion, GenerationSettings, Request
from draftsmith.eval.decoding.batch_loop import BatchLoop
from draftsmith.eval.decoding.batch_session import BatchSession
from draftsmith.eval.decoding.loop import OpenAnswer
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.models.target.loading import longest_sequence_tokens


class TargetDecoder:
    """The target alone, token after token. See `draftsmith.data.engines.engine.BatchDecoder`.

    Args:
        target: The model, in eval mode.
        batch_size: Rows.
        longest_prompt_tokens: Memory for such a prompt and its answer is kept for each row, or as far as the target's
            positions go.
        settings: Of every request.
        end_ids: Tokens that end an answer.

    Raises:
        UserError: As `BatchSession`.
    """

    def __init__(
        self,
        target: Any,
        batch_size: int,
        longest_prompt_tokens: int,
        settings: GenerationSettings,
        end_ids: Collection[int],
    ) -> None:
        limit = longest_sequence_tokens(target)
        wanted = longest_prompt_tokens + settings.max_new_tokens
        self.max_length_tokens = wanted if limit is None else min(limit, wanted)
        self._end_ids = end_ids
        self._loop = BatchLoop(
            BatchSession(target, self.max_length_tokens, batch_size),
            [Autoregressive() for _ in range(batch_size)],
            Sampling(settings.temperature, settings.top_k, settings.top_p),
            settings.max_new_tokens,
            end_ids,
            [torch.Generator(target.device) for _ in range(batch_size)],
        )
        self._keys: dict[int, str] = {}  # of requests, by the identity of their open answers

    @property
    def has_room(self) -> bool:
        return self._loop.has_room

    def begin(self, request: Request) -> None:
        self._keys[id(self._loop.begin(request.prompt_ids, request.seed))] = request.key

    def advance(self) -> list[tuple[str, Completion]]:
        return [(self._keys.pop(id(answer)), self._completion(answer)) for answer in self._loop.advance()]

    def _completion(self, answer: OpenAnswer) -> Completion:
        ids = answer.record.ids
        return Completion(ids, "stop" if ids[-1] in self._end_ids else "length")
