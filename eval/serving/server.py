"""`draftsmith serve`: the API on a port, until Ctrl-C. The models compute in this thread, see `Worker`.

Further requests wait in a queue of bounded length. Answers whose client has disconnected are cancelled.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

from fastapi import FastAPI

from draftsmith.errors import UserError
from draftsmith.eval.serving.api import application
from draftsmith.eval.serving.protection import TimedRequests
from draftsmith.eval.serving.worker import Worker

MOST_CONNECTIONS = 256
LAST_WORDS_S = 2  # grace period of open connections at shutdown


class Listening:
    """Serves the application on a port, in a separate thread.

    Raises:
        UserError: The port is in use, or the address does not belong to this machine.
    """

    def __init__(self, app: FastAPI, host: str, port: int, connections: int = MOST_CONNECTIONS) -> None:
        import uvicorn

        config = uvicorn.Config(
            app,
            http=TimedRequests,
            host=host,
            port=port,
            log_level="critical",
            limit_concurrency=connections,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            listening.close()
            raise UserError(
                f"cannot listen on {host}:{port} ({error.strerror}): give another --port or --host"
            ) from None
        self._connect = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._connect.run, args=([listening],), name="listening", daemon=True)
        self._thread.start()
        while not self._connect.started and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> None:
        """Shut down; open connections get a grace period."""
        self._connect.should_exit = True
        self._thread.join(3 * LAST_WORDS_S)


def run(worker: Worker, host: str, port: int, api_key: str | None, names: Sequence[str] = ()) -> None:
    """Serve until Ctrl-C or SIGTERM, with the models in this thread, see `Worker`.

    Args:
        worker: Generates the answers.
        host: Address or name to listen on.
        port: Port to listen on.
        api_key, names: See `application`.

    Raises:
        UserError: The port is in use, or the address does not belong to this machine.
    """
    worker.warm_up()
    listening = Listening(application(worker, api_key, [host, *names]), host, port)
    try:
        worker.work()
    finally:
        listening.stop()
