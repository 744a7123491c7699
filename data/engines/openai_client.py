"""HTTP to an OpenAI-compatible server: one request, one outcome, every failure sorted by what can be done about it."""

import json
from collections.abc import Mapping
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import anyio
import httpx2

from draftsmith.data.engines.engine import Failure, Outcome, Request
from draftsmith.data.engines.openai_protocol import (
    PATHS,
    Api,
    BadAnswer,
    ModelCard,
    read_answer,
    read_models,
    refusal_reason,
    request_body,
)
from draftsmith.data.engines.servers import Throttled, Unreachable
from draftsmith.recipes.errors import UserError

CONNECT_TIMEOUT_S = 10.0
# Below the 5 s after which uvicorn closes an idle connection: the two would race otherwise.
KEEP_ALIVE_S = 2.0
# A proxy says so when the server behind it is down, a server while it loads its model.
NOBODY_THERE = {502, 503}
SETTINGS_ARE_WRONG = {401, 403, 404}


class OpenAIClient:
    """Asks servers, whose base URLs end in `/v1` as in OpenAI's own clients.

    Args:
        api: Which of the two endpoints.
        end_ids: Every token that ends an answer.
        extensions: Send vLLM's fields too.
        timeout_s: For one answer from the first byte sent to the last one read.
        api_key: Sent as a bearer token.
        credentials: Of a URL: user and password, where a server asks for them.
    """

    def __init__(
        self,
        api: Api,
        end_ids: tuple[int, ...],
        extensions: bool,
        timeout_s: float,
        api_key: str | None,
        credentials: Mapping[str, tuple[str, str] | None],
    ) -> None:
        self.api: Api = api
        self.end_ids = end_ids
        self.extensions = extensions
        self.timeout_s = timeout_s
        self._credentials = credentials
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
        response = await self._send("GET", url, "/models", None)
        if response.status_code != 200:
            raise UserError(f"{url}/models says {refusal_reason(response.status_code, _json_or_none(response))}")
        return read_models(_json(response))

    async def complete(self, url: str, model: str, request: Request) -> Outcome:
        """The outcome of one request.

        Raises:
            Unreachable: No connection, or one that broke.
            Throttled: HTTP 429.
            BadAnswer: HTTP 5xx, a timeout, or a body that is no answer.
            UserError: The server refuses what every request has in common: the key, the URL, the model.
        """
        body = request_body(request, model, self.api, self.end_ids, self.extensions)
        response = await self._send("POST", url, PATHS[self.api], body)
        if response.status_code == 200:
            return read_answer(_json(response), request, self.api, self.end_ids)
        return Failure(refusal_reason(response.status_code, _json_or_none(response)))

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(self, method: str, url: str, path: str, body: dict[str, Any] | None) -> httpx2.Response:
        """A response with status 200, or 4xx that is about this request alone."""
        try:
            with anyio.fail_after(self.timeout_s):
                response = await self._http.request(method, url + path, json=body, auth=self._credentials[url])
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
        if status in NOBODY_THERE:
            raise Unreachable(f"HTTP {status}")
        if status >= 500 or status == 408:
            raise BadAnswer(f"HTTP {status}")
        if status in SETTINGS_ARE_WRONG:
            raise UserError(
                f"{url}{path} says {refusal_reason(status, _json_or_none(response))}: "
                "check base_urls (they usually end in /v1), model and api_key_env in data.distill.options"
            )
        return response


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """`Retry-After` in seconds (RFC 9110, 10.2.3), which may be a date: told from the server's own `Date` then, so that
    no clock of ours has to be right. None if there is none that makes sense."""
    value = headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    try:
        pause: timedelta = parsedate_to_datetime(value) - parsedate_to_datetime(headers.get("date", ""))
    except (ValueError, TypeError):
        return None
    return max(0.0, pause.total_seconds())


def _json(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise BadAnswer("malformed answer: no JSON") from None


def _json_or_none(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
