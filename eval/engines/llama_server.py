"""Find `llama-server` and start it for a GGUF file. `make llamacpp-env` builds it."""

import os
import shutil
from pathlib import Path

from draftsmith.data.engines.server_process import ServerProcess

BUILT = Path(__file__).resolve().parents[2] / ".venv-llamacpp" / "bin"
LEAST_CONTEXT_TOKENS = 2048


def find_server() -> Path | None:
    """Find `llama-server` on PATH, or else the one that `make llamacpp-env` built."""
    found = shutil.which("llama-server", path=os.pathsep.join([os.environ.get("PATH", ""), str(BUILT)]))
    return None if found is None else Path(found).resolve()


class LlamaServer(ServerProcess):
    """A `llama-server` started by this process for a GGUF file.

    Args:
        context_tokens: Length of the longest prompt with its answer.
        more: Further options of the program.
        at_once: Number of sequences that it decodes concurrently.

    Raises:
        UserError: The server does not start.
    """

    def __init__(self, program: Path, file: Path, context_tokens: int, *more: object, at_once: int = 1) -> None:
        context = at_once * max(LEAST_CONTEXT_TOKENS, context_tokens)
        words = (program, "-m", file, "-c", context, "-np", at_once, "--no-webui", *more)
        super().__init__("llama-server", [str(word) for word in words])
