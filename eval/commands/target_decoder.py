"""Distillation's requests through the loop for several sequences, as `data.engines.transformers_engine` asks it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from draftsmith.data.engines.engine import Completion, Request
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
        longest_prompt_tokens, longest_answer_tokens: Memory for both together is kept for each row, or as far as the
            target's positions go.
        end_ids: Tokens that end an answer.

    Raises:
        UserError: As `BatchSession`.
    """

    def __init__(
        self,
        target: Any,
        batch_size: int,
        longest_prompt_tokens: int,
        longest_answer_tokens: int,
        end_ids: Collection[int],
    ) -> None:
        limit = longest_sequence_tokens(target)
        wanted = longest_prompt_tokens + longest_answer_tokens
        self.max_length_tokens = wanted if limit is None else min(limit, wanted)
        self._end_ids = end_ids
        self._loop = BatchLoop(
            BatchSession(target, self.max_length_tokens, batch_size),
            [Autoregressive() for _ in range(batch_size)],
            end_ids,
            [torch.Generator(target.device) for _ in range(batch_size)],
        )
        self._open: dict[OpenAnswer, Request] = {}
        self._told: dict[str, tuple[list[int], OpenAnswer]] = {}  # what the rows of the last answers hold, by key

    @property
    def has_room(self) -> bool:
        return self._loop.has_room

    def begin(self, request: Request) -> None:
        """By the request's own settings. A conversation's next turn goes on in the row of its last, if that holds what
        the prompt begins with."""
        settings = request.settings
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
        wanted = (request.prompt_ids, sampling, settings.max_new_tokens, request.seed)
        held, last = self._told.pop(request.key, ([], None))
        begins_with = len(request.prompt_ids) > len(held) and request.prompt_ids[: len(held)] == held
        if last is not None and begins_with and self._loop.has_row_of(last):
            answer = self._loop.go_on(last, *wanted)
        else:
            answer = self._loop.begin(*wanted)
        self._open[answer] = request

    def advance(self) -> list[tuple[str, Completion]]:
        ended = {answer: self._open.pop(answer) for answer in self._loop.advance()}
        # All but the newest token is in the cache.
        self._told = {r.key: (r.prompt_ids + answer.record.ids[:-1], answer) for answer, r in ended.items()}
        return [(request.key, self._completion(answer)) for answer, request in ended.items()]

    def _completion(self, answer: OpenAnswer) -> Completion:
        ids = answer.record.ids
        return Completion(ids, "stop" if ids[-1] in self._end_ids else "length")
