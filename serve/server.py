"""`draftsmith serve`: serve the API on a port until Ctrl-C. The models compute in the calling thread, see `Worker`.

While one request is answered, others wait in a queue of limited length. Requests of disconnected clients are cancelled.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastapi import FastAPI

from draftsmith.errors import UserError
from draftsmith.serve.api import application
from draftsmith.serve.worker import Worker

MOST_CONNECTIONS = 256
LAST_WORDS_S = 2  # grace period of open connections at shutdown


@contextmanager
def listening(app: FastAPI, host: str, port: int, connections: int = MOST_CONNECTIONS) -> Iterator[None]:
    """Serve the application on a port in a separate thread; when the context ends, connections get a grace period.

    Raises:
        UserError: The port is in use, or the address does not belong to this machine.
    """
    import uvicorn

    config = uvicorn.Config(
        app,
        http="h11",
        host=host,
        port=port,
        log_level="critical",
        limit_concurrency=connections,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror}): give another --port or --host") from None
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([bound],), name="listening", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join(3 * LAST_WORDS_S)


def run(worker: Worker, host: str, port: int, api_key: str | None, names: Sequence[str] = ()) -> None:
    """Serve the worker's answers on a port until Ctrl-C or SIGTERM; the models compute in the calling thread.

    Raises:
        UserError: The port is in use, or the address does not belong to this machine.
    """
    worker.warm_up()
    with listening(application(worker, api_key, [host, *names]), host, port):
        worker.work()
