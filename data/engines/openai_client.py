"""HTTP to an OpenAI-compatible server: one request, one outcome, every failure sorted by what can be done about it."""

from collections.abc import Mapping
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import anyio
import httpx2

from draftsmith.data.engines.engine import Failure, Outcome, Request
from draftsmith.data.engines.openai_protocol import (
    PATHS,
    TOO_LONG,
    Api,
    BadAnswer,
    ModelCard,
    longest_answer_bytes,
    read_answer,
    read_models,
    refusal_reason,
    request_body,
)
from draftsmith.data.engines.servers import Throttled, Unreachable
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.masking import MASK

CONNECT_TIMEOUT_S = 10.0
# Below the 5 s after which uvicorn closes an idle connection: the two would race otherwise.
KEEP_ALIVE_S = 2.0
LONGEST_MODEL_LIST_BYTES = 16 << 20
# A proxy says so when the server behind it is down, a server while it loads its model.
UNAVAILABLE = {502, 503}
# These are about one request. All others from 400 on are about what every request has in common.
REQUEST_REFUSED = {400, 413, 422, 451}


class OpenAIClient:
    """Asks servers, whose base URLs end in `/v1` as in OpenAI's own clients.

    Args:
        api: Which of the two endpoints.
        end_ids: Every token that ends an answer.
        vocabulary_size: Token ids from there on are none of the target's.
        extensions: Send vLLM's fields too.
        timeout_s: For one answer from the first byte sent to the last one read.
        api_key: Sent as a bearer token.
        credentials: Of a URL: user and password, where a server asks for them.
    """

    def __init__(
        self,
        api: Api,
        end_ids: tuple[int, ...],
        vocabulary_size: int,
        extensions: bool,
        timeout_s: float,
        api_key: str | None,
        credentials: Mapping[str, tuple[str, str] | None],
    ) -> None:
        self.api: Api = api
        self.end_ids, self.vocabulary_size = end_ids, vocabulary_size
        self.extensions = extensions
        self.timeout_s = timeout_s
        self._api_key, self._credentials = api_key, credentials
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(None, connect=min(CONNECT_TIMEOUT_S, timeout_s)),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S),
        )

    async def models(self, url: str) -> list[ModelCard]:
        """What the server offers.

        Raises:
            Unreachable, Throttled, BadAnswer, UserError: As `complete`.
        """
        status, content = await self._send("GET", url, "/models", None, LONGEST_MODEL_LIST_BYTES)
        if status != 200:
            raise UserError(f"{url}/models says {self._refusal(status, content)}")
        return read_models(content)

    async def complete(self, url: str, model: str, request: Request) -> Outcome:
        """The outcome of one request.

        Raises:
            Unreachable: No connection, or one that broke, or a redirect: to a login, most likely.
            Throttled: HTTP 429.
            BadAnswer: HTTP 5xx, a timeout, or a body that is no answer.
            UserError: The server refuses what every request has in common: the key, the URL, the model.
        """
        body = request_body(request, model, self.api, self.end_ids, self.extensions)
        status, content = await self._send("POST", url, PATHS[self.api], body, longest_answer_bytes(request))
        if status == 200:
            return read_answer(content, request, self.api, self.end_ids, self.vocabulary_size)
        return Failure(self._refusal(status, content))

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(
        self, method: str, url: str, path: str, body: dict[str, Any] | None, longest_bytes: int
    ) -> tuple[int, bytes]:
        """Status and content of a response that is 200, or 4xx and about this request alone."""
        content = bytearray()
        try:
            with anyio.fail_after(self.timeout_s):
                auth = self._credentials[url]
                async with self._http.stream(method, url + path, json=body, auth=auth) as response:
                    async for chunk in response.aiter_bytes():
                        content += chunk
                        if len(content) > longest_bytes:
                            break
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Unreachable(f"no connection ({_reason(error)})") from None
        except TimeoutError:
            raise BadAnswer("timeout") from None
        except httpx2.TransportError as error:
            raise Unreachable(f"connection lost ({_reason(error)})", was_sent=True) from None
        except httpx2.DecodingError:
            raise BadAnswer("malformed answer: encoding") from None
        except httpx2.InvalidURL as error:
            raise UserError(f"data.distill.options.base_urls: {url} is not a URL: {error}") from None
        status = response.status_code
        if status == 429:
            raise Throttled(retry_after_s(response.headers))
        if status in UNAVAILABLE or (status != 200 and status < 400):
            raise Unreachable(f"HTTP {status}" + (", a redirect" if 300 <= status < 400 else ""))
        if status >= 500 or status == 408:
            raise BadAnswer(f"HTTP {status}")
        if status != 200 and status not in REQUEST_REFUSED:
            raise UserError(
                f"{url}{path} says {self._refusal(status, content)}: "
                "check base_urls (they usually end in /v1), model and api_key_env in data.distill.options"
            )
        if len(content) > longest_bytes:
            raise BadAnswer(TOO_LONG)
        return status, bytes(content)

    def _refusal(self, status: int, content: bytes | bytearray) -> str:
        """What the server says, without the key, should it quote that."""
        return refusal_reason(status, content.replace((self._api_key or MASK).encode(), MASK.encode()))


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """`Retry-After` in seconds (RFC 9110, 10.2.3), which may be a date: told from the server's own `Date` then, so that
    no clock of ours has to be right. None if there is none that makes sense."""
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        pause: timedelta = parsedate_to_datetime(value) - parsedate_to_datetime(headers.get("date", ""))
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, pause.total_seconds())


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
