"""What the fake servers listen with: many connections at once, which may break."""

from http.server import ThreadingHTTPServer
from typing import Any


class BreakingHTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections break here on purpose."""
