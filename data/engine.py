"""The seam between self-distillation and whatever generates: prompts as token ids in, completions out."""

from dataclasses import dataclass
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class AnswerSampling:
    """How answers are drawn from the target. Temperature 0 is greedy; top_k 0 and top_p 1 leave p as it is."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 512
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """`token_ids` end with the end token if `finish_reason` is `stop`; `length` means that the answer was cut short."""

    token_ids: list[int]
    finish_reason: FinishReason


class Engine(Protocol):
    """Generates answers. `concurrency` is how many prompts it likes to be given at once."""

    concurrency: int
    max_length_tokens: int | None
    """Prompt and answer together must not be longer; None if there is no bound."""

    def generate(self, prompts: list[list[int]], sampling: AnswerSampling) -> list[Completion]:
        """One completion for each prompt, in the prompts' order."""
        ...
