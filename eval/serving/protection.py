"""What keeps a server from strangers: who may reach it, what a request may be, and how long it may take to come.

A web page that a user looks at may ask a server on the user's own machine. It cannot send JSON to another origin
without the server's consent, which it never gets, so a body of any other type is refused; and a page whose own name
was pointed at this machine (DNS rebinding) is told by the name in its `Host`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import h11
from fastapi.responses import HTMLResponse, JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftsmith.recipes.errors import UserError

LARGEST_BODY_BYTES = 1 << 20
REQUEST_WITHIN_S = 20.0  # its head and its body: 1 MiB at 0.4 Mbit/s
LONGEST_NAME = 80  # that is quoted


def error(status: int, message: str) -> JSONResponse:
    """An error in OpenAI's form."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)


class Guard:
    """Middleware that refuses, before a body is read, a request for another host, or of another size or type.

    Args:
        app: The application behind it.
        names: Of the server, beside its addresses: `localhost`, `gpu1`, `*.lab.example`, or `*` for any.
    """

    def __init__(self, app: Any, names: Sequence[str] = ()) -> None:
        self._app = app
        self._names = [name.lower() for name in ("localhost", socket.gethostname(), *names)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Any) -> Response | None:
        headers = dict(scope.get("headers", ()))
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_ours(host):
            shown = host[:LONGEST_NAME]
            return error(
                421, f"{shown} is no name of this server: start it with --trusted-host NAME if it is to be reached so"
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > LARGEST_BODY_BYTES or b"transfer-encoding" in headers:
            return error(413, f"a request must say its length, at most {LARGEST_BODY_BYTES} bytes")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            return error(415, "a request must have Content-Type: application/json")
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether a `Host` is an address, which nobody can point elsewhere, or a known name. Browsers send one."""
        name = re.sub(r":\d*$", "", host).removeprefix("[").removesuffix("]").rstrip(".").lower()
        if not host or any(fnmatchcase(name, known) for known in self._names):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class TimedRequests(H11Protocol):
    """uvicorn's protocol, with a time within which a connection's next request must have come whole."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._late = self.loop.call_later(REQUEST_WITHIN_S, transport.close)

    def handle_events(self) -> None:
        super().handle_events()
        if not self._waits:
            self._forget()
        elif self._late is None:
            self._late = self.loop.call_later(REQUEST_WITHIN_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    @property
    def _waits(self) -> bool:
        """Whether a request has begun that is not whole, or the first one has not; between two uvicorn has a time."""
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        return self.cycle is None or begun or self.conn.their_state is h11.SEND_BODY


def page_response(page: str) -> Response:
    """The page with its own script and style alone, which talks to this server alone and stands in no other page."""

    def hashes(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy, "X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }  # fmt: skip
    return HTMLResponse(page, headers=headers)


def key_in(variable: str) -> str:
    """Return the key that an environment variable holds.

    Raises:
        UserError: It holds none, or one that no client can send. What may be the key itself is not shown.
    """
    shown = variable if variable.isidentifier() else "that is named there: give a variable's name, not what it holds"
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"option --api-key-env: the environment has no variable {shown}")
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"option --api-key-env: {shown} holds line breaks or other characters that no HTTP header takes: set it to "
            "the key alone"
        )
    return key
