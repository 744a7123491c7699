"""Find `llama-server` and start it for a GGUF file. `make llamacpp-env` builds it."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2

from draftsmith.data.engines.vllm_engine import free_port
from draftsmith.errors import UserError
from draftsmith.parent import end_program_with_parent

BUILT = Path(__file__).resolve().parents[2] / ".venv-llamacpp" / "bin"
STARTS_WITHIN_S, STOPS_WITHIN_S = 300.0, 10.0
LEAST_CONTEXT_TOKENS = 2048


def find_server(named: Path | None) -> Path | None:
    """Find `llama-server`: the named program, or the one on PATH, or the one that `make llamacpp-env` built.

    Raises:
        UserError: The named file is no program.
    """
    if named is not None:
        if not named.is_file() or not os.access(named, os.X_OK):
            raise UserError(f"option --llama-server: {named} is no program: build one with `make llamacpp-env`")
        return named.resolve()
    found = shutil.which("llama-server", path=os.pathsep.join([os.environ.get("PATH", ""), str(BUILT)]))
    return None if found is None else Path(found).resolve()


@contextmanager
def started_server(
    program: Path, file: Path, context_tokens: int, *more: object, at_once: int = 1
) -> Iterator[tuple[str, Callable[[str], UserError]]]:
    """Start a server for a GGUF file, and stop it when the context ends.

    Args:
        context_tokens: Length of the longest prompt with its answer.
        more: Further options of the program.
        at_once: Number of sequences that it decodes concurrently.

    Yields:
        Its URL, and a function that builds an error from a verb phrase and the last line of the server's log.

    Raises:
        UserError: The server does not start.
    """
    port = free_port()
    context = at_once * max(LEAST_CONTEXT_TOKENS, context_tokens)
    options = {"-m": file, "-c": context, "-np": at_once, "--port": port}
    command = [str(program), *(str(word) for option in options.items() for word in option), "--no-webui"]
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile(prefix="llama-server-", suffix=".log") as log:
        process = subprocess.Popen(
            [*command, *map(str, more)], stdout=log, stderr=subprocess.STDOUT, preexec_fn=end_program_with_parent
        )

        def error(what: str) -> UserError:
            lines = Path(log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
            code = process.poll()
            ended = "" if code is None else f" with exit code {code}"
            return UserError(f"llama-server {what}{ended}; the last line of its log: {lines[-1]}")

        def is_ready() -> bool:
            with suppress(httpx2.TransportError):  # not listening yet
                return httpx2.get(f"{url}/health", trust_env=False).status_code == 200
            return False

        try:
            start_s = time.monotonic()
            while not is_ready():
                if process.poll() is not None:
                    raise error("ended")
                if time.monotonic() - start_s > STARTS_WITHIN_S:
                    raise error(f"was not ready after {STARTS_WITHIN_S:.0f} s")
                time.sleep(0.05)
            yield url, error
        finally:
            process.terminate()
            try:
                process.wait(STOPS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
