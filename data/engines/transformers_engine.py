"""The target in this process, by the project's own loop: no extra dependency, CPU or GPU.

As many answers at once as `batch_size`; the moment one ends, the next prompt takes its place. An answer depends neither
on its neighbours nor on what was interrupted: above temperature 0 each draws from a generator seeded by its request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import Field

from draftsmith.data.engines.engine import BatchDecoder, EngineSetting, Failure, Outcome, Request
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Section


class TransformersEngine:
    """Continuous batching with a loaded target.

    Args:
        decoder: The target, with `batch_size` rows.
        batch_size: Rows of one forward pass.
    """

    class Options(Section):
        """Of the target in this process."""

        batch_size: int = Field(16, ge=1, description="rows of one forward pass")

    def __init__(self, decoder: BatchDecoder, batch_size: int) -> None:
        self._decoder = decoder
        self.concurrency = self._batch_size = batch_size
        self.max_length_tokens: int | None = decoder.max_length_tokens
        self._waiting: deque[Request] = deque()
        self._refused: list[tuple[str, Outcome]] = []

    @classmethod
    def make(cls, options: Options, setting: EngineSetting) -> TransformersEngine:
        assert setting.load_decoder is not None
        with _memory_told(options.batch_size):
            return cls(setting.load_decoder(options.batch_size), options.batch_size)

    def submit(self, request: Request) -> None:
        longest = self._decoder.max_length_tokens
        if len(request.prompt_ids) + request.settings.max_new_tokens > longest:
            self._refused.append((request.key, Failure(f"prompt and answer longer than {longest} tokens")))
        else:
            self._waiting.append(request)

    def collect(self) -> list[tuple[str, Outcome]]:
        """Rounds of all rows until an answer has ended."""
        ended, self._refused = self._refused, []
        with _memory_told(self._batch_size):
            while self._waiting and self._decoder.has_room:
                self._decoder.begin(self._waiting.popleft())
            while not ended:
                ended += self._decoder.advance()
        return ended

    def close(self) -> None:
        self._waiting.clear()


@contextmanager
def _memory_told(batch_size: int) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise UserError(
            f"the GPU's memory does not hold {batch_size} answers at once: lower data.distill.options.batch_size (now "
            f"{batch_size}) and run the same command again"
        ) from None


ENGINE = TransformersEngine
