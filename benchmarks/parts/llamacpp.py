"""llama.cpp for comparison: a GGUF target in several dtypes, each served over HTTP by a separate `llama-server`.

F32 and BF16 hold the weights of our target in fp32 and bf16. Q8_0 and Q4_0 are other models: their weights are rounded
to 8 and to 4 bits. `make llamacpp-env` builds the programs.
"""

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import torch

from draftsmith.errors import UserError
from draftsmith.eval.engines.llama_server import LlamaServer, find_server
from draftsmith.files import cache_root
from draftsmith.models.target.gguf_file import get_gguf_file
from draftsmith.models.weights import sampled_hash
from draftsmith.recipes.schema import TargetRecipe

DTYPES = ("F32", "BF16", "Q8_0", "Q4_0")
TARGET_DTYPES = {"float32": "F32", "bfloat16": "BF16"}  # GGUF dtypes that store the target's weights unchanged
ANSWERS_WITHIN_S = 600.0


@dataclass(frozen=True)
class LlamaAnswer:
    """One answer of llama-server.

    ids: end token included. rest_s: seconds from the first token to the last. drafted, accepted: number of tokens.
    """

    ids: list[int]
    rest_s: float
    drafted: int = 0
    accepted: int = 0


Complete = Callable[[list[int], int], LlamaAnswer]


def programs_and_files(recipe: TargetRecipe, device: torch.device) -> tuple[Path, dict[str, Path]]:
    """Find `llama-server`, and the target's GGUF file by dtype; prints a reason and returns no file if there is none.

    Raises:
        UserError: The target cannot be converted.
    """
    server = find_server()
    if recipe.gguf_file is None:
        print("no llama.cpp: the target is no GGUF file (target.gguf_file)")
    elif server is None:
        print("no llama.cpp: there is no llama-server, which `make llamacpp-env` builds")
    elif device.type != "cpu":
        print(f"no llama.cpp: it runs on the CPU, the target on {device.type}")
    else:
        file = get_gguf_file(recipe)
        return server, {dtype: in_dtype(file, dtype, server) for dtype in DTYPES}
    return Path(), {}


def in_dtype(file: Path, dtype: str, server: Path) -> Path:
    """Convert the GGUF file to another dtype, once, with the `llama-quantize` in the server's folder.

    Raises:
        UserError: The program is missing, or fails.
    """
    made = cache_root() / "llamacpp" / f"{file.stem}-{sampled_hash([file])}-{dtype}.gguf"
    if made.is_file():
        return made
    program = server.with_name("llama-quantize")
    if not program.is_file():
        raise UserError(
            f"{program} does not exist, which converts {file.name} to {dtype}: build it with `make llamacpp-env`"
        )
    made.parent.mkdir(parents=True, exist_ok=True)
    partial = made.with_name(f"{made.name}.{os.getpid()}.partial")
    print(f"making {made.name}", flush=True)
    command = [*map(str, (program, "--allow-requantize", file, partial, dtype))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
            raise UserError(f"{program} ended with exit code {done.returncode}; its last line: {said}")
        partial.replace(made)  # in one step, so that the file is never incomplete
    finally:
        partial.unlink(missing_ok=True)
    return made


@contextmanager
def llama_server(
    program: Path, file: Path, threads: int, context_tokens: int, drafting: Sequence[str] = (), ends: bool = True
) -> Iterator[Complete]:
    """Start a server of one sequence, and end it afterwards.

    Args:
        context_tokens: Length of the longest prompt with its answer.
        drafting: Options of the server that make it draft, `--model-draft` and others.
        ends: Whether an end token ends an answer.

    Yields:
        A function of a prompt's ids and the most tokens of its answer, which is greedy.

    Raises:
        UserError: The server does not start, or its answers have no token ids.
    """
    # A new connection for each answer: the server closes idle connections while other sides are measured.
    alone = httpx2.Limits(max_keepalive_connections=0)
    with (
        closing(LlamaServer(program, file, context_tokens, "-t", threads, *drafting)) as server,
        httpx2.Client(base_url=server.url, timeout=ANSWERS_WITHIN_S, limits=alone, trust_env=False) as http,
    ):

        def complete(prompt: list[int], new_tokens: int) -> LlamaAnswer:
            request = {
                "prompt": prompt, "n_predict": new_tokens, "temperature": 0, "cache_prompt": False, "n_probs": 0,
                "return_tokens": True, "ignore_eos": not ends,
            }  # fmt: skip
            try:
                response = http.post("/completion", json=request)
            except httpx2.TransportError as problem:
                raise server.error(f"does not answer ({type(problem).__name__})") from None
            if response.status_code != 200:
                raise server.error(f"says {response.status_code}: {response.text[:200]}")
            said = response.json()
            if not said.get("tokens") or "timings" not in said:
                raise server.error("gives no tokens or no timings: it may be too old")
            timed = said["timings"]
            counts = (timed.get(key, 0) for key in ("draft_n", "draft_n_accepted"))
            return LlamaAnswer(said["tokens"], timed["predicted_ms"] / 1000, *counts)

        yield complete
