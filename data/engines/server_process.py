"""A server program that this process starts and ends, on a free port of this machine, with its output in a log."""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx2

from draftsmith.errors import UserError
from draftsmith.parent import end_program_with_parent

START_TIMEOUT_S, STOP_TIMEOUT_S, POLL_S = 1800.0, 20.0, 0.1
# The last line of a traceback, of any of its processes, and messages of argparse and pydantic.
_ERROR = re.compile(
    r"(?<![`\w])((?!ValidationError)(?:\w+(?:Error|Exception)|Value error|error)[:,] .+)$", re.MULTILINE
)


class ServerProcess:
    """A server program. It answers on `url` once the constructor has returned; it ends with this process at the latest.

    Args:
        name: The program's name, for messages.
        command: The program and its options, without its port.
        environment: Environment variables for the program, unless they are set already.
        given: The options that the user chose, for the error `NAME does not start GIVEN`, as `with --engine-options`.

    Raises:
        UserError: The server ends, or does not answer within `START_TIMEOUT_S`.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, given: str = ""
    ) -> None:
        port = free_port()
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._folder = Path(tempfile.mkdtemp(prefix="draftsmith-server-"))
        self.log = self._folder / "server.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                env={**(environment or {}), **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_program_with_parent,
            )
        try:
            self._wait(f"does not start {given}".rstrip())
        except BaseException:  # Ctrl-C too
            self._end()
            raise

    def error(self, what: str) -> UserError:
        """Return a `UserError`: the name, `what` (a verb phrase), the log's first error or last line, and its path."""
        text = self.log.read_text(errors="replace").strip()
        lines = _ERROR.findall(text) or text.splitlines()[-1:] or ["its log is empty"]
        code = self._process.poll()
        ended = "" if code is None else f"exit code {code}; "
        return UserError(f"{self.name} {what}: {lines[0][:300]} ({ended}all of it: {self.log})")

    def close(self) -> None:
        """End the server and its child processes; delete its log, unless the server had ended by itself."""
        has_died = self._process.poll() is not None
        self._end()
        if not has_died:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, problem: str) -> None:
        start_s = time.monotonic()
        while time.monotonic() - start_s < START_TIMEOUT_S:
            if self._process.poll() is not None:
                raise self.error(problem)
            with suppress(httpx2.TransportError):  # not listening yet
                if httpx2.get(f"{self.url}/health", timeout=2, trust_env=False).status_code == httpx2.codes.OK:
                    return
            time.sleep(POLL_S)
        raise self.error(f"has not started within {START_TIMEOUT_S:g} s")

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=STOP_TIMEOUT_S)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def free_port() -> int:
    """Return the number of a free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
