"""Exports in a real llama-server: each kind loads, changes no greedy token, and has our decoder's acceptance.

The drafters are trained briefly on the answers that they are measured on, so that every depth is sometimes accepted.
An answer is compared up to its first numerical tie.
"""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from parts.llamacpp import Complete, LlamaAnswer, llama_server
from support.gguf_target import embedded_gguf
from support.served_drafters import IN_LLAMACPP, NEW_TOKENS, Setup, count_our_rounds, load_embedded, train_briefly
from support.tiny_runs import recipe_file, recipe_in, save_trained
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.eval.engines.llama_server import LlamaServer, find_server
from draftsmith.models.formats.exporting import GgufTarget, export_drafter
from draftsmith.models.formats.llamacpp import FILE

SERVER = find_server()
pytestmark = [
    pytest.mark.llamacpp,
    pytest.mark.skipif(SERVER is None, reason="there is no llama-server: make llamacpp-env"),
]
LONGEST_DRAFT, CONTEXT_TOKENS = 3, 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llamacpp")


@pytest.fixture(scope="module")
def setup(folder: Path) -> Setup:
    target, tokenizer, prompts = load_embedded()
    embedded_gguf(folder, target, tokenizer)
    with run_server(folder) as complete:
        answers = [complete(prompt, NEW_TOKENS + LONGEST_DRAFT + 1).ids for prompt in prompts]
    return Setup(target, prompts, answers)


@contextmanager
def run_server(folder: Path, *drafting: str) -> Iterator[Complete]:
    assert SERVER is not None
    with llama_server(SERVER, folder / "target.gguf", 1, CONTEXT_TOKENS, drafting, ends=False) as complete:
        yield complete


def test_target_of_the_server_equals_ours(setup: Setup) -> None:
    """Every token except the end is our target's most likely one, up to rounding."""
    for prompt, answer in zip(setup.prompts, setup.answers, strict=True):
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logits = setup.target(input_ids=ids).logits[0, len(prompt) - 1 : -1].clone()
        logits[:, setup.target.generation_config.eos_token_id] = float("-inf")
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert float((logits.max(-1).values - chosen).max()) < 1e-3


@pytest.mark.parametrize("name", IN_LLAMACPP)
def test_server_equals_our_decoder(name: str, setup: Setup, folder: Path, tmp_path: Path) -> None:
    kind, options = IN_LLAMACPP[name]
    drafter = train_briefly(kind, options, setup.target, setup.prompts, setup.answers)
    target = folder / "target.gguf"
    made = export_drafter(drafter, "gguf", tmp_path / "served", str(target), tmp_path, (), GgufTarget(target, "f32"))
    words = made.command.split()
    drafting = words[words.index("--model-draft") :]
    assert drafting[1] == str(tmp_path / "served" / FILE)
    with run_server(folder, *drafting) as complete:
        answers: list[LlamaAnswer] = [complete(prompt, NEW_TOKENS) for prompt in setup.prompts]
    assert [answer.ids for answer in answers] == [answer[:NEW_TOKENS] for answer in setup.answers]
    _, accepted, drafted = count_our_rounds(drafter, setup, within=True)
    assert min(accepted) > 0
    assert [sum(a.accepted for a in answers), sum(a.drafted for a in answers)] == [sum(accepted), drafted]


def test_eval_through_the_server(setup: Setup, folder: Path, tmp_path: Path) -> None:
    """Its counters equal our decoder's chain by position, for two draft lengths and a given server."""
    kind, options = IN_LLAMACPP["eagle3"]
    drafter = train_briefly(kind, options, setup.target, setup.prompts, setup.answers)
    recipe = recipe_in(
        tmp_path,
        target={"model": "embedded", "dtype": "float32"},
        drafter={"kind": "eagle3"},
        eval={"questions": "embedded", "max_new_tokens": NEW_TOKENS, "limit_per_category": 1},
    )
    save_trained(recipe, drafter)
    target = ["--target-gguf", str(folder / "target.gguf"), "--dtype", "f32", "--concurrency", "1"]

    def measured(*options: str) -> dict[str, Any]:
        command = ["bench", recipe_file(recipe), "--engine", "llamacpp", *options, "--json"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    found = measured(*target)
    plain, drafted = found["rows"]
    assert found["greedy"][0]["divergences"] == []
    assert found["engine"] == "llama.cpp"
    assert (plain["drafts"], plain["tau"]) == (0, None)
    assert drafted["tokens"] == plain["tokens"] > 200
    # The second to last token of an answer may come without a draft, as the limit is reached.
    undrafted = drafted["tokens"] - drafted["answers"] - drafted["drafts"] - drafted["accepted_tokens"]
    assert 0 <= undrafted <= drafted["answers"]
    shares = drafted["acceptance_by_depth"]
    assert len(shares) == 3
    assert sum(shares) * drafted["drafts"] == pytest.approx(drafted["accepted_tokens"])
    own = found["own_chain"]
    assert own["engine_tau"] == pytest.approx(own["own_tau"], rel=0.02)
    shorter = measured(*target, "--draft-tokens", "1")["rows"][1]
    assert shorter["acceptance_by_depth"][0] * shorter["drafts"] == shorter["accepted_tokens"]
    assert 1 < shorter["tau"] < drafted["tau"]
    assert SERVER is not None
    with closing(LlamaServer(SERVER, folder / "target.gguf", CONTEXT_TOKENS, "--metrics", "-t", 1)) as server:
        command = ["bench", recipe_file(recipe), "--engine", "llamacpp", "--server", server.url]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert "does not draft: start it with the command that `draftsmith export` prints" in result.stderr
