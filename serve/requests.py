"""Requests to `draftsmith serve` in OpenAI's format, with checks and a message for every unsupported field.

Clients send fields that have no effect: nulls, empty lists, `tool_choice: auto` without tools. Such fields are ignored;
a field that needs an unsupported feature is an error that names the field.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.files import InvalidConversation
from draftsmith.data.sources.turns import listed, read_turn
from draftsmith.data.tokens.chat_tokens import longest_token_characters, token_ids
from draftsmith.data.tokens.templates import render
from draftsmith.errors import UserError

MOST_STOPS, LONGEST_STOP = 4, 128
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # for logs: they change no answer
# Values of unsupported fields that have no effect; null and empty values never have one.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
EMPTY: tuple[Any, ...] = (None, [], {})


class ChatRequest(BaseModel):
    """A request for a chat completion: unknown fields are rejected unless their value has no effect."""

    model_config = ConfigDict(extra="forbid")

    messages: list[Any] = Field(min_length=1)
    model: str | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool | None] = {}
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]],
        Field(max_length=MOST_STOPS),
        BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    ] = []
    seed: int | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: Literal[1] = 1
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0

    @model_validator(mode="before")
    @classmethod
    def _drop_fields_without_effect(cls, given: Any) -> Any:
        """Drop fields that change no answer, and reject texts with lone surrogates, which no tokenizer accepts."""
        try:
            json.dumps(given, ensure_ascii=False).encode()
        except RecursionError:
            raise ValueError("the request is nested too deeply") from None
        except UnicodeEncodeError:
            raise ValueError(
                "a text holds half a surrogate pair (such as \\ud800), which is not valid text: remove it"
            ) from None
        if not isinstance(given, dict):
            return given
        return {
            key: value
            for key, value in given.items()
            if not (
                value is None
                or key in LABELS
                or (key not in cls.model_fields and value in (*EMPTY, *NEUTRAL.get(key, ())))
            )
        }

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Return the messages as turns for the target's chat template, read like conversations of training data.

        Raises:
            UserError: A message is malformed, or has an unsupported field that would change its meaning.
        """
        turns = []
        for number, message in enumerate(self.messages, start=1):
            unread: dict[str, None] = {}
            try:
                turns.append(read_turn(message, f"messages, turn {number}", unread=unread))
            except InvalidConversation as error:
                raise UserError(f"{error.where}: {error.sentence}") from None
            if unread:
                raise UserError(f"messages, turn {number}: {listed(unread)} is not supported here")
        return tuple(turns)


def prompt_ids(tokenizer: Any, turns: tuple[Turn, ...], most_tokens: int) -> list[int]:
    """Return the token ids of a chat's turns in the chat template, ready for the next answer.

    Raises:
        UserError: The chat template rejects the conversation, or the text certainly has more than `most_tokens` tokens.
    """
    text = render(tokenizer, turns, add_generation_prompt=True)
    if len(text) > most_tokens * longest_token_characters(tokenizer):
        raise UserError(f"the prompt has {len(text)} characters, too many for {most_tokens} tokens: shorten it")
    return token_ids(tokenizer, text)
