"""Engines without a model, picklable, for tests of what runs engines."""

import os
import time
from collections import deque

from draftsmith.data.engines.engine import Completion, Outcome, Request
from draftsmith.recipes.errors import UserError


class FakeEngine:
    """Answers in order, one at a time, with the prompt's ids doubled and its process's number at the end.

    A prompt that begins with -1 ends the process with code 7, with -2 it raises, with -3 it is a user's error; with -4
    its answer has 10^6 tokens.
    """

    def __init__(self, concurrency: int = 4, max_length_tokens: int | None = None, delay_s: float = 0.0) -> None:
        self.concurrency = concurrency
        self.max_length_tokens = max_length_tokens
        self.delay_s = delay_s
        self._waiting: deque[Request] = deque()

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def collect(self) -> list[tuple[str, Outcome]]:
        time.sleep(self.delay_s)
        request = self._waiting.popleft()
        kind = request.prompt_ids[0]
        if kind == -1:
            os._exit(7)
        if kind == -2:
            raise RuntimeError("a bug of the engine")
        if kind == -3:
            raise UserError("memory does not hold it")
        ids = [0] * 10**6 if kind == -4 else [2 * token_id for token_id in request.prompt_ids]
        return [(request.key, Completion([*ids, os.getpid()], "stop"))]

    def close(self) -> None:
        if closed_file := os.environ.get("FAKE_ENGINE_CLOSED"):
            with open(closed_file, "a") as stream:
                stream.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES')}\n")


def broken_engine() -> FakeEngine:
    raise UserError("vLLM does not start")
