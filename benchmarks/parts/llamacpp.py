"""llama.cpp beside us: a GGUF target in several dtypes, each served by a `llama-server` of its own and asked over HTTP.

F32 and BF16 hold the weights of our target in fp32 and bf16. Q8_0 and Q4_0 are other models: their weights are rounded
to 8 and to 4 bits. `make llamacpp-env` builds the programs.
"""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import torch
from huggingface_hub import hf_hub_download

from draftsmith.models.weights import sampled_hash
from draftsmith.recipes.cache import cache_root
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetRecipe

DTYPES = ("F32", "BF16", "Q8_0", "Q4_0")
OF_TORCH = {"float32": "F32", "bfloat16": "BF16"}  # whose weights are the target's
BUILT = Path(__file__).resolve().parents[2] / ".venv-llamacpp" / "bin"
STARTS_WITHIN_S, STOPS_WITHIN_S, ANSWERS_WITHIN_S = 300.0, 10.0, 600.0
LEAST_CONTEXT_TOKENS = 2048
BENCH_TOKENS = 32


def find_server(named: Path | None) -> Path | None:
    """`llama-server`: the named one, or one of PATH, or what `make llamacpp-env` has built; None if there is none.

    Raises:
        UserError: The named one is no program.
    """
    if named is not None:
        if not named.is_file() or not os.access(named, os.X_OK):
            raise UserError(f"option --llama-server: {named} is no program: `make llamacpp-env` builds llama-server")
        return named.resolve()
    found = shutil.which("llama-server", path=os.pathsep.join([os.environ.get("PATH", ""), str(BUILT)]))
    return None if found is None else Path(found).resolve()


def gguf_file(recipe: TargetRecipe) -> Path | None:
    """The file that the target was read from, if it is a GGUF: in a folder, or downloaded when it was loaded."""
    if recipe.gguf_file is None:
        return None
    folder = Path(recipe.model).expanduser()
    if folder.is_dir():
        return folder / recipe.gguf_file
    return Path(hf_hub_download(recipe.model, recipe.gguf_file, revision=recipe.revision))


def programs_and_files(recipe: TargetRecipe, device: torch.device, named: Path | None) -> tuple[Path, dict[str, Path]]:
    """`llama-server`, and the target by dtype for it; no file, after a sentence, where nothing can be compared.

    Raises:
        UserError: As `find_server` and `in_dtype`.
    """
    server, file = find_server(named), gguf_file(recipe)
    if file is None:
        print("no llama.cpp: the target is no GGUF file (target.gguf_file)")
    elif server is None:
        print("no llama.cpp: there is no llama-server, which `make llamacpp-env` builds and --llama-server names")
    elif device.type != "cpu":
        print(f"no llama.cpp: it runs on the CPU, the target on {device.type}")
    else:
        return server, {dtype: in_dtype(file, dtype, server) for dtype in DTYPES}
    return Path(), {}


def in_dtype(file: Path, dtype: str, server: Path) -> Path:
    """The GGUF file in another dtype: made once by the `llama-quantize` beside the server, and kept in our cache.

    Raises:
        UserError: There is no such program, or it cannot.
    """
    made = cache_root() / "llamacpp" / f"{file.stem}-{sampled_hash([file])}-{dtype}.gguf"
    if made.is_file():
        return made
    program = server.with_name("llama-quantize")
    if not program.is_file():
        raise UserError(
            f"beside {server} is no llama-quantize to make {dtype} of {file.name}: `make llamacpp-env` has it"
        )
    made.parent.mkdir(parents=True, exist_ok=True)
    partial = made.with_name(f"{made.name}.{os.getpid()}.partial")
    print(f"making {made.name}", flush=True)
    try:
        _run(program, "--allow-requantize", file, partial, dtype)
        partial.replace(made)  # in one step: where it is, it is whole
    finally:
        partial.unlink(missing_ok=True)
    return made


def bench(file: Path, server: Path, threads: int) -> float | None:
    """Tokens/s of decoding by the `llama-bench` beside the server: the model alone, behind an empty context.

    None: there is no such program.

    Raises:
        UserError: It cannot.
    """
    program = server.with_name("llama-bench")
    if not program.is_file():
        return None
    shape = ("-t", threads, "-p", 0, "-n", BENCH_TOKENS, "-r", 3)
    (found,) = json.loads(_run(program, "-m", file, *shape, "-o", "json"))
    return float(found["avg_ts"])


def _run(program: Path, *arguments: object) -> str:
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise UserError(f"{program} ended with exit code {done.returncode}; its last line: {said}")
    return done.stdout


@dataclass
class Completion:
    """An answer. ids: the end token included; decode_s: seconds from the first token to the last."""

    ids: list[int]
    decode_s: float


class LlamaServer:
    """A server at work; `llama_server` starts one."""

    def __init__(self, process: subprocess.Popen[bytes], http: httpx2.Client, log: Path) -> None:
        self._process, self._http, self._log = process, http, log

    def wait_until_ready(self) -> None:
        """
        Raises:
            UserError: It ended, or has not loaded its model in time.
        """
        began_s = time.monotonic()
        while time.monotonic() - began_s < STARTS_WITHIN_S:
            if self._process.poll() is not None:
                raise self._error("ended")
            try:
                if self._http.get("/health").status_code == 200:
                    return
            except httpx2.TransportError:  # it does not listen yet
                pass
            time.sleep(0.05)
        raise self._error(f"was not ready after {STARTS_WITHIN_S:.0f} s")

    def complete(self, prompt: list[int], new_tokens: int) -> Completion:
        """Answer token ids, greedily; nothing is kept from one prompt to the next.

        Raises:
            UserError: It does not answer, or not with tokens.
        """
        asked = {
            "prompt": prompt, "n_predict": new_tokens, "temperature": 0, "cache_prompt": False, "n_probs": 0,
            "return_tokens": True, "ignore_eos": False,
        }  # fmt: skip
        try:
            response = self._http.post("/completion", json=asked)
        except httpx2.TransportError as error:
            raise self._error(f"does not answer ({type(error).__name__})") from None
        if response.status_code != 200:
            raise self._error(f"says {response.status_code}: {response.text[:200]}")
        said = response.json()
        if not said.get("tokens") or "timings" not in said:
            raise self._error("gives no tokens or no timings: it may be too old")
        return Completion(said["tokens"], said["timings"]["predicted_ms"] / 1000)

    def _error(self, what: str) -> UserError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
        code = self._process.poll()
        ended = "" if code is None else f" with exit code {code}"
        return UserError(f"llama-server {what}{ended}; the last line of its log: {lines[-1]}")


@contextmanager
def llama_server(program: Path, file: Path, threads: int, context_tokens: int) -> Iterator[LlamaServer]:
    """A server of one sequence around a GGUF file, ended on leaving.

    Args:
        context_tokens: Of the longest prompt with its answer.

    Raises:
        UserError: It does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context_tokens = max(LEAST_CONTEXT_TOKENS, context_tokens)
    command = [
        *(str(program), "-m", str(file), "-t", str(threads), "-c", str(context_tokens), "-np", "1"),
        *("--port", str(port), "--no-webui"),
    ]
    with tempfile.NamedTemporaryFile(prefix="llama-server-", suffix=".log") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            # A new connection for each answer: the server closes those that wait while others have their turn.
            alone = httpx2.Limits(max_keepalive_connections=0)
            address = f"http://127.0.0.1:{port}"
            with httpx2.Client(base_url=address, timeout=ANSWERS_WITHIN_S, limits=alone, trust_env=False) as http:
                server = LlamaServer(process, http, Path(log.name))
                server.wait_until_ready()
                yield server
        finally:
            process.terminate()
            try:
                process.wait(STOPS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
