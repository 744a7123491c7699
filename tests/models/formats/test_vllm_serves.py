"""Exports in real vLLM: each kind loads, changes no greedy token, and has our decoder's acceptance by position.

Kinds that need vLLM's newer runner have its kernels run by Triton's interpreter, in a separate process.
The drafters are trained briefly on the answers that they are measured on, so that every depth is sometimes accepted.
"""

import json
import re
import shlex
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.served_drafters import (
    BY_THE_NEWER_RUNNER,
    NEW_TOKENS,
    SERVED,
    Setup,
    count_our_rounds,
    load_embedded,
    share_first_key_norm,
    train_briefly,
)
from support.tiny_runs import recipe_file, recipe_in, save_trained
from support.vllm_answers import generate_answers, generate_with_newer_runner, has_triton
from support.vllm_server import NEEDS_VLLM, VllmServer, vllm_environment
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.formats.exporting import export_drafter, speculative_config
from draftsmith.models.target.loading import EMBEDDED_TARGET

__all__ = ["vllm_environment"]  # fixture
pytestmark = NEEDS_VLLM
LONGEST_DRAFT = 3


@pytest.fixture(scope="module")
def setup() -> Setup:
    target, _, prompts = load_embedded()
    answers, _ = generate_answers(prompts, NEW_TOKENS + LONGEST_DRAFT + 1, None)
    return Setup(target, prompts, answers)


@pytest.mark.parametrize("name", SERVED)
def test_vllm_equals_our_decoder(name: str, setup: Setup, tmp_path: Path) -> None:
    kind, to, options = SERVED[name]
    drafter = train_briefly(kind, options, setup.target, setup.prompts, setup.answers)
    if "block_size" in options:
        share_first_key_norm(drafter)
    made = export_drafter(drafter, to, tmp_path / "served", str(EMBEDDED_TARGET), tmp_path)
    speculative = speculative_config(drafter.config, str(tmp_path / "served"))
    if kind in BY_THE_NEWER_RUNNER:
        if not has_triton():
            pytest.skip("Triton is not installed: make vllm-env")
        answers, counters = generate_with_newer_runner(tmp_path, setup.prompts, NEW_TOKENS, speculative)
    else:
        answers, counters = generate_answers(setup.prompts, NEW_TOKENS, speculative)
    assert answers == [answer[:NEW_TOKENS] for answer in setup.answers]
    rounds, accepted, _ = count_our_rounds(drafter, setup)
    print(name, "vLLM:", counters, "ours:", rounds, accepted)
    assert made.num_speculative_tokens == len(accepted) == 3
    assert min(accepted) > 0
    assert (counters["drafts"], list(counters["accepted_tokens_per_pos"])) == (rounds, accepted)


def printed_command(drafter: Drafter, folder: Path) -> list[str]:
    """Return the last lines of `draftsmith export --to vllm`, of a run with this drafter."""
    recipe = recipe_in(folder, target={"model": "embedded", "dtype": "float32"}, drafter={"kind": "eagle3"})
    save_trained(recipe, drafter)
    result = CliRunner().invoke(app, ["export", recipe_file(recipe), "--to", "vllm"])
    assert result.exit_code == 0, result.output
    return shlex.split(result.stdout.strip().splitlines()[-1])


def post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return bytes(response.read())


def read_counter(metrics: str, name: str) -> list[int]:
    """Return the values of a counter in /metrics, by position if it has positions."""
    return [
        int(float(value)) for value in re.findall(rf"^vllm:spec_decode_num_{name}_total{{.*}} (\S+)$", metrics, re.M)
    ]


def test_printed_command_serves(setup: Setup, tmp_path: Path) -> None:
    """All questions in parallel over HTTP, also streamed: plain vLLM's answers and our decoder's acceptance."""
    kind, _, options = SERVED["eagle3"]
    drafter = train_briefly(kind, options, setup.target, setup.prompts, setup.answers)
    server = VllmServer(tmp_path / "log", printed_command(drafter, tmp_path))
    try:
        asked = {"model": "embedded", "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        bodies = [{**asked, "prompt": ids, "return_token_ids": True} for ids in setup.prompts]
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = [
                json.loads(raw) for raw in pool.map(lambda body: post(f"{server.url}/completions", body), bodies)
            ]
        with urllib.request.urlopen(server.url.replace("/v1", "/metrics"), timeout=60) as response:
            metrics = response.read().decode()
        streamed = post(f"{server.url}/completions", {**asked, "prompt": setup.prompts[0], "stream": True}).decode()
    finally:
        server.stop()
    choices = [answer["choices"][0] for answer in answers]
    assert [choice["token_ids"] for choice in choices] == [answer[:NEW_TOKENS] for answer in setup.answers]
    rounds, accepted, _ = count_our_rounds(drafter, setup)
    assert min(accepted) > 0
    assert (read_counter(metrics, "drafts"), read_counter(metrics, "accepted_tokens_per_pos")) == ([rounds], accepted)
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == choices[0]["text"]
