"""Responses of servers, which are not trusted: limits of size and time, refusals, and checks of answers.

An answer to another prompt, longer than its limit, cut before it, or with control tokens is rejected.
Redirects to other servers are not followed.
"""

import asyncio
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import httpx2
import openai
from pydantic import BaseModel, Field, StrictInt, ValidationError

from draftsmith.data.engines.engine import Completion, EngineSetting, Failure, Outcome, Request
from draftsmith.data.tokens.chat_tokens import token_ids
from draftsmith.data.tokens.templates import PROBE, TemplateProblem, render, special_ids
from draftsmith.errors import MASK

REASON_CHARACTERS = 80
OF_PACKED_BODIES = ("content-encoding", "content-length", "transfer-encoding")
MOST_ANSWER_BYTES = 16 << 20  # unpacked: 100,000 tokens with their text are a tenth of it
# An answer's text, tokenised here, may have a few more tokens than the server generated, and rarely far fewer.
MOST_TEXT_TOKENS, SPARE_TEXT_TOKENS, FEWEST_TEXT_TOKENS = 1.25, 8, 0.5
OTHER_ANSWER = "answer of another prompt"
CUT_EARLY = "answer ended by the server before max_new_tokens"
CONTROL_TOKENS = "answer with control tokens"


class ServerFailure(Exception):
    """A failure of a server that may pass: the request is sent again. `is_throttled`: the response was HTTP 429."""

    def __init__(self, reason: str, is_unreachable: bool = False, is_throttled: bool = False) -> None:
        super().__init__(reason)
        self.is_unreachable, self.is_throttled = is_unreachable, is_throttled


class RequestRefused(Exception):
    """A server's refusal of one request, which it would refuse again."""


class BoundedClient(httpx2.AsyncClient):
    """An HTTP client that limits the size and the total time of its responses, except of streamed ones.

    Args:
        timeout_s: Seconds from the request's first byte to the response's last.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__(limits=openai.DEFAULT_CONNECTION_LIMITS, follow_redirects=False)
        self._timeout_s = timeout_s

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Send a request and read its response.

        Raises:
            ServerFailure: The body is too large.
            httpx2.ReadTimeout: The response took too long.
        """
        if stream:
            return await super().send(request, stream=True, **options)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await super().send(request, stream=True, **options)
                try:
                    body = bytearray()
                    async for part in response.aiter_bytes():
                        body += part
                        if len(body) > MOST_ANSWER_BYTES:
                            raise ServerFailure(f"answer of more than {MOST_ANSWER_BYTES >> 20} MiB")
                finally:
                    await response.aclose()
        except TimeoutError:
            raise httpx2.ReadTimeout("the answer took too long", request=request) from None
        headers = {name: value for name, value in response.headers.items() if name not in OF_PACKED_BODIES}
        return httpx2.Response(response.status_code, headers=headers, content=bytes(body), request=request)


class _Choice(BaseModel):
    """Token ids are an extension; vLLM's end with the stop token, and `stop_reason` names it."""

    index: Literal[0] = 0  # requests have n = 1
    finish_reason: str
    text: str | None = None
    token_ids: list[StrictInt] | None = None
    prompt_token_ids: list[StrictInt] | None = None  # vLLM's completions have them here
    stop_reason: int | str | None = None


class _ResponseBody(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    prompt_token_ids: list[StrictInt] | None = None


class Vocabulary:
    """The target's tokens, for checking answers.

    size: token ids must be below it. end_ids: ids of tokens that end answers. control: texts of control tokens, which
    no answer may contain; those around thoughts are allowed. ending: texts of the tokens that end answers.
    openers: ids of control tokens that the chat template writes in a prompt, and never in an answer.
    """

    def __init__(self, setting: EngineSetting) -> None:
        self._tokenizer, self.end_ids, thoughts = (
            setting.tokenizer,
            setting.end_ids,
            setting.recipe.data.reasoning_tokens,
        )
        known, special = self._tokenizer.get_vocab(), special_ids(self._tokenizer)
        names = {token_id: name for name, token_id in known.items() if token_id in special}
        self.size = max(known.values()) + 1
        self.control = frozenset(names.values()) - set(thoughts)
        self.ending = frozenset(names[token_id] for token_id in self.end_ids if token_id in names)
        prompt, written = render(self._tokenizer, PROBE[:1], add_generation_prompt=True), {*map(known.get, thoughts)}
        for answer in (PROBE[1], replace(PROBE[1], reasoning_content="Hm")):
            with suppress(TemplateProblem):  # not every template writes thoughts
                text = render(self._tokenizer, (PROBE[0], answer)).removeprefix(prompt)
                written.update(token_ids(self._tokenizer, text))
        self.openers = special & set(token_ids(self._tokenizer, prompt)) - written

    def count(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(token_ids(self._tokenizer, text))


def read_answer(content: bytes, request: Request, vocabulary: Vocabulary) -> Outcome:
    """Parse and check the body of a server's response; return an answer, or a `Failure` if it cannot be used.

    Token ids are cut after the first end token. If a stopped answer's ids contain no end token, its text is used
    instead.

    Raises:
        ServerFailure: The body violates the API or answers another prompt, or the server aborted the request.
    """
    try:
        answer = _ResponseBody.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        what = "no JSON" if first["type"] == "json_invalid" else ".".join(map(str, first["loc"])) or "body"
        raise ServerFailure(f"malformed answer: {what}") from None
    choice = answer.choices[0]
    if any(ids not in (None, request.prompt_ids) for ids in (answer.prompt_token_ids, choice.prompt_token_ids)):
        raise ServerFailure(OTHER_ANSWER)  # from a proxy that mixes up connections: a retry may succeed
    if choice.finish_reason == "abort":
        raise ServerFailure("aborted by the server")
    if choice.finish_reason not in ("stop", "length"):
        return Failure(f"finish reason {one_line(choice.finish_reason)[:REASON_CHARACTERS]}")
    limit, ids, end_ids = request.settings.max_new_tokens, choice.token_ids, vocabulary.end_ids
    if ids is not None:
        if choice.finish_reason == "stop" and isinstance(choice.stop_reason, int) and choice.stop_reason in end_ids:
            ids = [*ids, choice.stop_reason]  # cut again below if the server included it already
        end = next((position for position, token_id in enumerate(ids) if token_id in end_ids), None)
        if end is not None:
            ids = ids[: end + 1]
        if len(ids) > limit + 1:  # some servers do not count the end token
            raise ServerFailure("malformed answer: longer than max_new_tokens")
        if not request.tools and not vocabulary.openers.isdisjoint(ids):  # a turn that nobody generated
            return Failure(CONTROL_TOKENS)
        if not all(0 <= token_id < vocabulary.size for token_id in ids):
            raise ServerFailure("malformed answer: token ids outside the target's vocabulary")
        if end is not None:
            return Completion(ids, "stop")
        if choice.finish_reason == "length":
            return Completion(ids, "length") if len(ids) >= limit else Failure(CUT_EARLY)
    if (text := choice.text) is None:
        raise ServerFailure("malformed answer: no text")
    # Control tokens in a text would become real ones, with loss, when it is tokenised. A tool call may begin with one.
    if any(token in text for token in (vocabulary.ending if request.tools else vocabulary.control)):
        return Failure(CONTROL_TOKENS)
    is_cut, tokens = choice.finish_reason == "length", vocabulary.count(text)
    if tokens > MOST_TEXT_TOKENS * limit + SPARE_TEXT_TOKENS:
        raise ServerFailure("malformed answer: longer than max_new_tokens")
    if is_cut and tokens < FEWEST_TEXT_TOKENS * limit:
        return Failure(CUT_EARLY)
    return Completion(None, "length" if is_cut else "stop", text)


def refusal_reason(error: openai.APIStatusError, api_key: str | None) -> str:
    """Return a short reason for an HTTP error, equal for similar errors: numbers become N, the API key is masked."""
    body = error.body if isinstance(error.body, dict) else {}
    code, message = body.get("code"), body.get("message") or body.get("detail")
    text = code if isinstance(code, str) else message if isinstance(message, str) else ""
    text = re.sub(r"\d+", "N", text.replace(api_key or MASK, MASK))
    text = one_line(re.split(r"\.\s|[\r\n]", text, maxsplit=1)[0]).strip(" .")
    return f"HTTP {error.status_code}: {text[:REASON_CHARACTERS]}" if text else f"HTTP {error.status_code}"


def one_line(text: str) -> str:
    """Return a server's text on one line, without control characters, so that a terminal can show it."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def redirected_to(response: httpx2.Response) -> str:
    """Return only scheme and host of a redirect's target, as the rest of its URL may hold secrets."""
    try:
        place = response.url.join(response.headers.get("location", ""))
        return f"{place.scheme}://{place.netloc.decode('ascii', 'replace')}"
    except httpx2.InvalidURL:
        return "another address"
