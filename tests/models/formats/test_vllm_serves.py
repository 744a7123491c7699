"""Exports in real vLLM: each kind loads, changes no greedy token, and has our decoder's acceptance by position.

Kinds that need vLLM's newer runner have its kernels run by Triton's interpreter, in a separate process.
The drafters are trained briefly on the answers that they are measured on, so that every depth is sometimes accepted.
"""

import json
import shlex
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.served_drafters import (
    BY_THE_NEWER_RUNNER,
    NEW_TOKENS,
    SERVED,
    Setup,
    count_our_rounds,
    share_first_key_norm,
    train_briefly,
)
from support.tiny_runs import recipe_file, recipe_in, save_trained
from support.vllm_answers import check_served, export_served, setup
from support.vllm_server import NEEDS_VLLM, vllm_environment
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.data.engines.server_process import ServerProcess
from draftsmith.eval.engines.endpoint import DraftCounts
from draftsmith.models.base.drafter import Drafter

__all__ = ["setup", "vllm_environment"]  # fixtures
pytestmark = NEEDS_VLLM


@pytest.mark.parametrize("name", SERVED)
def test_vllm_equals_our_decoder(name: str, setup: Setup, tmp_path: Path) -> None:
    kind, to, options = SERVED[name]
    drafter = train_briefly(kind, options, setup.target, setup.prompts, setup.answers)
    if "block_size" in options:
        share_first_key_norm(drafter)
    check_served(drafter, setup, tmp_path, export_served(drafter, tmp_path, to), kind in BY_THE_NEWER_RUNNER)


def printed_command(drafter: Drafter, folder: Path) -> list[str]:
    """Return the last line of `draftsmith export --to vllm` in words, of a run with this drafter."""
    recipe = recipe_in(folder, target={"model": "embedded", "dtype": "float32"}, drafter={"kind": "eagle3"})
    save_trained(recipe, drafter)
    result = CliRunner().invoke(app, ["export", recipe_file(recipe), "--to", "vllm"])
    assert result.exit_code == 0, result.output
    return shlex.split(result.stdout.strip().splitlines()[-1])


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return response.read().decode()


def test_printed_command_serves(setup: Setup, tmp_path: Path) -> None:
    """All questions in parallel over HTTP, also streamed: plain vLLM's answers and our decoder's acceptance."""
    kind, _, options = SERVED["eagle3"]
    drafter = train_briefly(kind, options, setup.target, setup.prompts, setup.answers)
    more = ["--served-model-name", "embedded", "--enforce-eager", "--max-model-len", "512"]
    command = [sys.executable, *printed_command(drafter, tmp_path)[1:], *more]
    with closing(ServerProcess("vLLM", command)) as server:
        asked = {"model": "embedded", "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        bodies = [{**asked, "prompt": ids, "return_token_ids": True} for ids in setup.prompts]
        url = f"{server.url}/v1/completions"
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = [json.loads(answer) for answer in pool.map(lambda body: fetch(url, body), bodies)]
        counts = DraftCounts.of_page(fetch(f"{server.url}/metrics"), "vllm")
        streamed = fetch(url, {**asked, "prompt": setup.prompts[0], "stream": True})
    choices = [answer["choices"][0] for answer in answers]
    assert [choice["token_ids"] for choice in choices] == [answer[:NEW_TOKENS] for answer in setup.answers]
    rounds, accepted, _ = count_our_rounds(drafter, setup)
    assert min(accepted) > 0
    assert counts is not None
    assert (counts.drafts, list(counts.accepted_by_depth)) == (rounds, accepted)
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == choices[0]["text"]
