"""Features from a real vLLM server: equal to transformers', and a training on them equals online training."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import torch
from support.served_drafters import load_embedded
from support.tiny_runs import have_equal_weights, history_of, recipe_in
from support.vllm_answers import generate_answers
from support.vllm_server import NEEDS_VLLM, vllm_environment
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.cli.stages import run_distill
from draftsmith.data.engines import answer_features, server_process
from draftsmith.data.engines.engine import SERVED_NAME
from draftsmith.data.engines.vllm_engine import VllmServer
from draftsmith.errors import UserError
from draftsmith.models.target.features import FINAL_FEATURES, target_features
from draftsmith.models.target.loading import EMBEDDED_TARGET, load_ends, load_target
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.features import served
from draftsmith.train.features.served import ServedFeatures
from draftsmith.train.features.serving import server_arguments
from draftsmith.train.features.stored import StoredFeatures
from draftsmith.train.features.write import project_features, write_features

datasets = pytest.importorskip("datasets")
__all__ = ["vllm_environment"]  # fixture
pytestmark = NEEDS_VLLM
SMALL = {"enforce_eager": True, "kv_cache_memory_bytes": 512 << 20, "dtype": "float32", "max_num_batched_tokens": 128}
ANSWER_TOKENS, LAYERS = 24, (4, FINAL_FEATURES)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    _, _, prompts = load_embedded()
    answers, _ = generate_answers(prompts, ANSWER_TOKENS, None)
    return [
        {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer)}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def embedded_run(folder: Path, name: str, rows: list[dict[str, Any]], *urls: str, model: str = "embedded") -> Recipe:
    servers = {"urls": list(urls), "folder": str(folder / "served")}
    features = {"source": "server", "dtype": "float32", "server": servers} if urls else {}
    recipe = recipe_in(
        folder,
        name,
        target={"model": model, "dtype": "float32"},
        drafter={"options": {"num_masks": 2, "feature_layers": [4, -1]}},
        data={"features": features},
        train={"max_steps": 12, "learning_rate": 1e-3, "logging_steps": 1},
    )
    tokens = RunFolder(recipe).data / "tokens"
    if not tokens.exists():
        datasets.Dataset.from_list(rows).save_to_disk(str(tokens))
    return recipe


@pytest.fixture
def server(tmp_path: Path, rows: list[dict[str, Any]]) -> Iterator[VllmServer]:
    arguments = server_arguments(embedded_run(tmp_path, "arguments", rows, "http://127.0.0.1:1"))
    with closing(VllmServer({**arguments, **SMALL}, "the test")) as started:
        yield started


def check_equal(target: Any, found: torch.Tensor, ids: torch.Tensor) -> None:
    """Check features [S, F] of the first S of these tokens."""
    expected = target_features(target, ids, layers=LAYERS)[0, : len(found)]
    (inner, final), (our_inner, our_final) = found.chunk(2, dim=-1), expected.chunk(2, dim=-1)
    torch.testing.assert_close(inner, our_inner, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(final, our_final, atol=5e-4, rtol=0)
    assert torch.equal(target.lm_head(final).argmax(-1), target.lm_head(our_final).argmax(-1))


def check_features(recipe: Recipe, rows: list[dict[str, Any]]) -> None:
    """Check all rows twice, the second time from cached prefixes.

    Features are equal within rounding, after the final norm within 5e-4, and so is the most likely token everywhere.
    """
    target, _ = load_target(recipe.target)
    tokens = datasets.load_from_disk(str(RunFolder(recipe).data / "tokens"))
    source = ServedFeatures(recipe, tokens, load_ends(recipe.target), LAYERS)
    source.check_servers([0])
    for row in [*range(len(rows)), *range(len(rows))]:
        ids = torch.tensor([rows[row]["input_ids"]])
        found = torch.zeros(ids.shape[1], source.width)
        source.read([row], found)
        check_equal(target, found, ids)
    source.sweep()
    assert list(Path(recipe.data.features.server.folder).glob("*.safetensors*")) == []


def test_features_are_the_targets(
    server: VllmServer, tmp_path: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after requests that were broken off, whose files are swept."""
    recipe = embedded_run(tmp_path, "run", rows, server.url)
    check_features(recipe, rows)
    for row in rows:
        with suppress(httpx2.TimeoutException):
            body = {"model": SERVED_NAME, "prompt": row["input_ids"], "max_tokens": 1}
            httpx2.post(f"{server.url}/completions", json=body, timeout=0.01)
    monkeypatch.setattr(served, "ORPHAN_AGE_S", -1.0)
    check_features(recipe, rows)


def test_answers_come_with_their_features(tmp_path: Path) -> None:
    """One request for each turn; then the rows' features are there, without a server."""
    servers = {"urls": ["http://127.0.0.1:1"], "folder": str(tmp_path / "served")}
    asked = {"engine": "openai", "options": {"base_urls": ["http://127.0.0.1:1/v1"]}, "features": True}
    data = {
        "conversations": {"source": "stdlib", "split": "train", "limit": 12},
        "distill": {**asked, "max_new_tokens": 48, "cut_answers": "keep"},
        "features": {"source": "server", "dtype": "float32", "server": servers},
        "max_length_tokens": 256,
    }
    drafter = {"options": {"num_masks": 2, "feature_layers": [*LAYERS]}}
    recipe = recipe_in(tmp_path, target={"model": "embedded", "dtype": "float32"}, drafter=drafter, data=data)
    with closing(VllmServer({**server_arguments(recipe), **SMALL}, "the test")) as server:
        recipe.data.distill.options["base_urls"] = [server.url]
        run_distill(recipe)
    write_features(recipe, project_features(recipe), progress=False)
    tokens = datasets.load_from_disk(str(RunFolder(recipe).data / "tokens"))
    target, _ = load_target(recipe.target)
    stored = StoredFeatures(recipe, tokens, target, LAYERS)
    for row, ids in enumerate(tokens["input_ids"]):
        found = torch.zeros(len(ids), stored.width)
        stored.read([row], found)
        check_equal(target, found[:-1], torch.tensor([ids]))
    assert len(tokens) >= 12


def test_full_disk_is_said(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """No disk has as many free bytes as this server leaves."""
    recipe = embedded_run(tmp_path, "run", rows, "http://127.0.0.1:1")
    arguments = server_arguments(recipe)
    arguments["kv_transfer_config"]["kv_connector_extra_config"]["min_free_bytes"] = 1 << 60
    tokens = datasets.load_from_disk(str(RunFolder(recipe).data / "tokens"))
    with closing(VllmServer({**arguments, **SMALL}, "the test")) as server:
        recipe.data.features.server.urls = [server.url]
        with pytest.raises(UserError, match=r"gives no features \(it could not write .* bytes are free on the disk"):
            ServedFeatures(recipe, tokens, load_ends(recipe.target), LAYERS).check_servers([0])


def test_features_of_tensor_parallel_servers(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """Of a small random Llama, whose heads two processes can share."""
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    config = AutoConfig.for_model(
        "llama", vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    recipe = embedded_run(tmp_path, "run", rows, "http://127.0.0.1:1", model=str(tmp_path / "target"))
    with closing(VllmServer({**server_arguments(recipe), **SMALL, "tensor_parallel_size": 2}, "the test")) as server:
        recipe.data.features.server.urls = [server.url]
        check_features(recipe, rows)


def test_training_equals_online(server: VllmServer, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    online, recipe = embedded_run(tmp_path, "online", rows), embedded_run(tmp_path, "server", rows, server.url)
    train_drafter(online)
    train_drafter(recipe)
    losses = [[log["loss"] for log in history_of(each) if "loss" in log] for each in (recipe, online)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert losses[0][-1] < losses[0][0]


def test_kills_lose_no_row(tmp_path: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two servers is killed amid the training and started again, then the other is killed: bit-equal results.

    Each computes one row at a time and from no cache, so that a row's features do not depend on what else was asked.
    """
    arguments = server_arguments(embedded_run(tmp_path, "arguments", rows, "http://127.0.0.1:1"))
    alone = {**arguments, **SMALL, "max_num_seqs": 1, "enable_prefix_caching": False}
    servers, fetch, numbers = [VllmServer(alone, "the test") for _ in range(2)], ServedFeatures.fetch, count(1)
    urls = [each.url for each in servers]

    def kill_midway(self: ServedFeatures, row: int) -> torch.Tensor:
        number = next(numbers)
        if number in (10, 30):
            os.killpg(servers[number == 10]._process.pid, signal.SIGKILL)
        if number == 20:
            servers[1].close()
            monkeypatch.setattr(server_process, "free_port", lambda: urlsplit(urls[1]).port)
            servers[1] = VllmServer(alone, "the test")
        return fetch(self, row)

    try:
        whole = embedded_run(tmp_path, "whole", rows, urls[0])
        train_drafter(whole)
        monkeypatch.setattr(ServedFeatures, "fetch", kill_midway)
        monkeypatch.setattr(answer_features, "FILE_TIMEOUT_S", 2.0)
        recipe = embedded_run(tmp_path, "two", rows, *urls)
        recipe.train["dataloader_num_workers"], recipe.train["dataloader_prefetch_factor"] = 0, None
        train_drafter(recipe)
    finally:
        for each in servers:
            each.close()
    assert next(numbers) > 31
    assert [log.get("loss") for log in history_of(recipe)] == [log.get("loss") for log in history_of(whole)]
    assert have_equal_weights(whole, recipe)
