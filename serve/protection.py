"""Access control of the server: allowed host names, size and type of requests.

Any web page in a user's browser can send requests to a server on the user's machine. A page cannot send JSON to another
origin without the server's consent (CORS), which this server never gives, so bodies of other types are rejected. A page
whose own name was pointed at this machine (DNS rebinding) is recognised by the `Host` header of its requests.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from fastapi.responses import HTMLResponse, JSONResponse, Response

LARGEST_BODY_BYTES = 1 << 20
LONGEST_NAME = 80  # characters of a host name that are quoted


def error(status: int, message: str) -> JSONResponse:
    """Build an error response in OpenAI's format."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)


class Guard:
    """Middleware that rejects requests with a wrong host, size or type before their body is read.

    Args:
        names: Further host names of the server: `gpu1`, `*.lab.example`, or `*` for any. `localhost`, the machine's
            name and all IP addresses are always allowed.
    """

    def __init__(self, app: Any, names: Sequence[str] = ()) -> None:
        self._app = app
        self._names = [name.lower() for name in ("localhost", socket.gethostname(), *names)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Any) -> Response | None:
        """Return the error response for a request that must be rejected; None if it may pass."""
        headers = dict(scope.get("headers", ()))
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_ours(host):
            shown = host[:LONGEST_NAME]
            return error(
                421, f"{shown} is no name of this server: to allow it, start the server with --trusted-host NAME"
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > LARGEST_BODY_BYTES or b"transfer-encoding" in headers:
            return error(413, f"a request must have a Content-Length of at most {LARGEST_BODY_BYTES} bytes")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            return error(415, "a request must have Content-Type: application/json")
        return None

    def _is_ours(self, host: str) -> bool:
        """Return whether a `Host` header is missing, an IP address or an allowed name.

        Browsers always send one, and an IP address cannot be rebound.
        """
        name = re.sub(r":\d*$", "", host).removeprefix("[").removesuffix("]").rstrip(".").lower()
        if not host or any(fnmatchcase(name, known) for known in self._names):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def page_response(page: str) -> Response:
    """Build the response with the chat page.

    Its headers allow only the page's own script and style, connections to this server, and no embedding in frames.
    """

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
