"""OpenAI's completions and chat completions as they are used here: what is sent, and how an answer is read.

`extensions` are the fields that vLLM and others add to OpenAI's. They say what OpenAI's cannot: which tokens end an
answer, that token ids are to come back, and that nothing but the recipe's sampling applies (vLLM merges the top-k and
the penalties of the model's generation_config.json into whatever a request leaves open).
"""

import re
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from draftsmith.data.engines.engine import Completion, Failure, Outcome, Request

Api = Literal["completions", "chat"]
PATHS: dict[Api, str] = {"completions": "/completions", "chat": "/chat/completions"}
OTHER_PROMPT = "the server's chat template made another prompt"
TOO_LONG = "malformed answer: longer than was asked for"
REASON_CHARACTERS = 80


class BadAnswer(Exception):
    """What came back is no answer; asking again may help."""


class ModelCard(BaseModel):
    """An entry of /v1/models. max_model_len: tokens of prompt and answer together, where the server says so."""

    id: str
    max_model_len: int | None = None


class _ModelList(BaseModel):
    data: list[ModelCard]


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    """Token ids are an extension; vLLM's end with the stop token, and `stop_reason` names it."""

    finish_reason: str
    text: str | None = None
    message: _Message | None = None
    token_ids: list[int] | None = None
    stop_reason: int | str | None = None


class _Answer(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    prompt_token_ids: list[int] | None = None


def request_body(request: Request, model: str, api: Api, end_ids: tuple[int, ...], extensions: bool) -> dict[str, Any]:
    """The JSON of one request."""
    settings = request.settings
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
    }
    if api == "completions":
        body["prompt"] = request.prompt_ids
    else:
        body["messages"] = request.messages
    if settings.temperature > 0:
        body["seed"] = request.seed
    if extensions:
        body["top_k"] = settings.top_k or -1
        body |= {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        body |= {"stop_token_ids": list(end_ids), "return_token_ids": True}
    return body


def longest_answer_bytes(request: Request) -> int:
    """More than any answer to this request weighs: a token may be 64 box characters, each a JSON escape."""
    return (1 << 16) + 512 * request.settings.max_new_tokens + 16 * len(request.prompt_ids)


def read_models(body: bytes) -> list[ModelCard]:
    """The models that a server offers.

    Raises:
        BadAnswer: The body is no list of models.
    """
    try:
        return _ModelList.model_validate_json(body).data
    except ValidationError as error:
        raise BadAnswer(_malformed(error)) from None


def read_answer(body: bytes, request: Request, api: Api, end_ids: tuple[int, ...], vocabulary_size: int) -> Outcome:
    """The outcome that a body with status 200 holds.

    Token ids are cut behind the first end token. Ids of a stopped answer that hold none cannot be used; its text can.
    pydantic's own parser takes no lone surrogates, no deep nesting and no numbers of thousands of digits.

    Raises:
        BadAnswer: The body is not what the API promises, or the server gave the request up.
    """
    try:
        answer = _Answer.model_validate_json(body)
    except ValidationError as error:
        raise BadAnswer(_malformed(error)) from None
    choice = answer.choices[0]
    if api == "chat" and answer.prompt_token_ids not in (None, request.prompt_ids):
        return Failure(OTHER_PROMPT)
    if choice.finish_reason == "abort":
        raise BadAnswer("aborted by the server")
    if choice.finish_reason not in ("stop", "length"):
        return Failure(f"finish reason {' '.join(choice.finish_reason.split())[:REASON_CHARACTERS]}")
    token_ids = choice.token_ids
    if token_ids is not None:
        if choice.finish_reason == "stop" and isinstance(choice.stop_reason, int) and choice.stop_reason in end_ids:
            token_ids = [*token_ids, choice.stop_reason]  # cut again below where the server has it already
        end = next((position for position, token_id in enumerate(token_ids) if token_id in end_ids), None)
        if end is not None:
            token_ids = token_ids[: end + 1]
        if len(token_ids) > request.settings.max_new_tokens + 1:  # some servers do not count the end token
            raise BadAnswer(TOO_LONG)
        if not all(0 <= token_id < vocabulary_size for token_id in token_ids):
            raise BadAnswer("malformed answer: token ids outside the target's vocabulary")
        if end is not None:
            return Completion(token_ids, "stop")
        if choice.finish_reason == "length":
            return Completion(token_ids, "length")
    text = choice.text if api == "completions" else _content(choice.message)
    if text is None:
        raise BadAnswer("malformed answer: no text")
    return Completion(None, "stop" if choice.finish_reason == "stop" else "length", text)


def _content(message: _Message | None) -> str | None:
    """Servers leave the content out of an empty answer."""
    return None if message is None else message.content or ""


def refusal_reason(status: int, content: bytes | bytearray) -> str:
    """A short reason that counts alike for alike refusals: numbers are left out of the server's message."""
    try:
        body = from_json(content)
    except ValueError:
        return f"HTTP {status}"
    error = body.get("error", body) if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return f"HTTP {status}"
    code, message = error.get("code"), error.get("message") or error.get("detail")
    text = code if isinstance(code, str) else message if isinstance(message, str) else ""
    text = re.split(r"\.\s|[\r\n]", re.sub(r"\d+", "N", text), maxsplit=1)[0].strip(" .")
    return f"HTTP {status}: {text[:REASON_CHARACTERS]}" if text else f"HTTP {status}"


def _malformed(error: ValidationError) -> str:
    first = error.errors(include_input=False)[0]
    if first["type"] == "json_invalid":
        return "malformed answer: no JSON"
    return f"malformed answer: {'.'.join(map(str, first['loc'])) or 'body'}"
