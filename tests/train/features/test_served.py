"""Features from servers: training equals online training, rows are never lost, and what cannot be right is refused."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.feature_server import FeatureServer, feature_server
from support.tiny_runs import LENGTHS, have_equal_weights, history_of, save_target, tiny_run, weights_of

from draftsmith.cli.stages import run_distill
from draftsmith.errors import UserError
from draftsmith.models.target.features import final_norm
from draftsmith.models.target.loading import load_ends, load_target
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe, TargetRecipe
from draftsmith.train.drafter import trainer
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.drafter.training_arguments import recipe_arguments
from draftsmith.train.features import served
from draftsmith.train.features.serving import server_command
from draftsmith.train.features.write import project_features, write_features

LAYERS = (1, 3, 4)  # of the drafter's [1, 3, -1]
EPOCHS = {
    "max_steps": -1,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-3,  # a smaller one lets AdamW turn the rounding of a tiny gradient into a step
    "num_train_epochs": 2,
    "per_device_train_batch_size": 2,
    "save_steps": 2,
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FeatureServer]:
    save_target(tmp_path / "target")
    (tmp_path / "served").mkdir()
    recipe = tiny_run(tmp_path)
    with feature_server(load_target(recipe.target)[0], LAYERS, tmp_path / "served") as started:
        yield started


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "LONGEST_BACKOFF_S", 0.01)


def served_run(folder: Path, name: str, *urls: str, train: dict[str, Any] | None = None, **chosen: Any) -> Recipe:
    """Return a run whose rows are asked for in the training process itself, so that faults are the same each time."""
    servers = {"urls": list(urls), "folder": str(folder / "served"), "in_flight": 2, "timeout_s": 5.0, **chosen}
    features = {"source": "server", "dtype": "float32", "server": servers}
    workers = {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None}
    return tiny_run(folder, name, data={"features": features}, train={**EPOCHS, **workers, **(train or {})})


def test_training_equals_online(server: FeatureServer, tmp_path: Path) -> None:
    """The last layer is normed by our copy of the norm, which rounds otherwise than the target's kernels."""
    online, recipe = tiny_run(tmp_path, "online", train=EPOCHS), served_run(tmp_path, "served", server.url)
    train_drafter(online)
    train_drafter(recipe)
    for mine, other in zip(history_of(recipe), history_of(online), strict=True):
        assert mine.get("loss") == pytest.approx(other.get("loss"), abs=1e-5)
    for name, value in weights_of(online).items():
        torch.testing.assert_close(weights_of(recipe)[name], value, atol=1e-5, rtol=0)
    assert server.requests == 1 + 2 * len(LENGTHS)
    assert list((tmp_path / "served").iterdir()) == []


def test_training_starts_from_a_trained_drafter(server: FeatureServer, tmp_path: Path) -> None:
    """Its layers are the trained drafter's, so that the target's are not needed."""
    first, online = tiny_run(tmp_path, "first", train=EPOCHS), tiny_run(tmp_path, "online", train=EPOCHS)
    train_drafter(first)
    recipe = served_run(tmp_path, "served", server.url)
    online.drafter.init = recipe.drafter.init = str(RunFolder(first).drafter)
    train_drafter(online)
    train_drafter(recipe)
    for name, value in weights_of(online).items():
        torch.testing.assert_close(weights_of(recipe)[name], value, atol=1e-5, rtol=0)


def test_workers_of_the_loader_ask_for_the_same_rows(server: FeatureServer, tmp_path: Path) -> None:
    alone = served_run(tmp_path, "alone", server.url)
    many = served_run(tmp_path, "many", server.url, train={"dataloader_num_workers": 2})
    train_drafter(alone)
    train_drafter(many)
    assert have_equal_weights(alone, many)


def test_kept_rows_are_asked_for_once(server: FeatureServer, tmp_path: Path) -> None:
    """The files that an epoch fills are those of `draftsmith features`: offline training reads them."""
    recipe, kept = served_run(tmp_path, "each", server.url), served_run(tmp_path, "kept", server.url, keep=True)
    train_drafter(recipe)
    before = server.requests
    train_drafter(kept)
    assert server.requests - before == 1 + len(LENGTHS)
    assert have_equal_weights(recipe, kept)
    (folder,) = RunFolder(kept).features.iterdir()
    assert len(list(folder.iterdir())) == len(LENGTHS)
    offline = tiny_run(
        tmp_path,
        "kept",
        data={"features": {"source": "offline", "dtype": "float32"}},
        train=EPOCHS,
        runs_dir=str(tmp_path / "other"),
    )
    RunFolder(offline).root.mkdir(parents=True, exist_ok=True)
    (RunFolder(offline).root / "features").symlink_to(folder.parent)
    train_drafter(offline)
    assert have_equal_weights(kept, offline)


CHAT = (
    "{% for m in messages %}{{ 'w3 ' if m.role == 'user' else 'w4 ' }}{{ m.content }} w2 {% endfor %}"
    "{% if add_generation_prompt %}w4 {% endif %}"
)


def distilled_run(folder: Path, url: str, name: str = "distilled") -> Recipe:
    """Return a run whose conversations are to be answered by a server of features."""
    asked = [[f"w{5 + n} w{9 + n} w{11 + 2 * n}" for n in range(first, first + 1 + first % 2)] for first in range(6)]
    turns = [[{"role": role, "content": text} for text in each for role in ("user", "assistant")] for each in asked]
    (folder / "asked.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    recipe = served_run(folder, name, url, keep=True, timeout_s=60.0)
    values = recipe.model_dump()
    values["target"]["chat_template"] = CHAT
    values["data"]["conversations"] = {"source": str(folder / "asked.jsonl")}
    values["data"]["distill"] = {
        "engine": "openai", "options": {"base_urls": [f"{url}/v1"]}, "features": True, "max_new_tokens": 7,
    }  # fmt: skip
    shutil.rmtree(RunFolder(recipe).data)  # of `tiny_run`
    return Recipe.model_validate(values)


@pytest.mark.parametrize("filled_by", ["train", "features"])
def test_one_request_gives_answer_and_features(server: FeatureServer, tmp_path: Path, filled_by: str) -> None:
    """A row of two turns has the states of its last answer. The server is gone when training begins."""
    recipe = distilled_run(tmp_path, server.url)
    run_distill(recipe)
    assert server.requests == 2 + 9  # the check of the target, the engine's, and nine turns
    tokens = datasets.load_from_disk(str(RunFolder(recipe).data / "tokens"))
    kept = list(RunFolder(recipe).features.glob("rows-*/*.safetensors"))
    assert len(kept) == len(tokens) == 8  # two of three second turns do not begin with the row before
    again = recipe.model_copy(update={"name": "again"})
    shutil.copytree(RunFolder(recipe).data, RunFolder(again).data)
    train_drafter(again)
    server.requests, server.fault = 0, "dead"
    if filled_by == "features":
        write_features(recipe, project_features(recipe), progress=False)
        recipe.data.features.source = "offline"
    train_drafter(recipe)
    assert server.requests == 0
    for name, value in weights_of(again).items():  # of states by forwards of a token more
        torch.testing.assert_close(weights_of(recipe)[name], value, atol=1e-5, rtol=0)


def test_answers_without_features_are_asked_for(
    server: FeatureServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the server's disk is full its answers stay, and training asks for their rows."""
    recipe = distilled_run(tmp_path, server.url)
    server.fault, server.fault_from, server.fault_until = "unwritten", 5, 7
    run_distill(recipe)
    assert "hidden states of 2 answers are missing" in capsys.readouterr().err
    missing = 8 - len(list(RunFolder(recipe).features.glob("rows-*/*.safetensors")))
    server.requests, server.fault = 0, ""
    train_drafter(recipe)
    assert server.requests == 1 + missing
    server.fault, server.fault_from, server.fault_until = "other", 1, 99
    with pytest.raises(UserError, match=r"serves another target than target\.model"):
        run_distill(distilled_run(tmp_path, server.url, "other"))


@pytest.mark.parametrize("fault", ["busy", "unwritten", "dead", "hang"])
def test_another_server_takes_over(
    fault: str, server: FeatureServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk, an error or a death midway: no row is lost, and the weights are the same."""
    whole = served_run(tmp_path, "whole", server.url)
    train_drafter(whole)
    with feature_server(server._target, LAYERS, tmp_path / "served") as second:
        second.fault, second.fault_from = fault, 4
        second.fault_until = 5 if fault == "hang" else second.fault_until
        recipe = served_run(tmp_path, "two", server.url, second.url)
        train_drafter(recipe)
    assert have_equal_weights(whole, recipe)
    assert f"waiting for features from {second.url}" in capsys.readouterr().out


def test_slow_server_is_named(
    server: FeatureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "WORTH_SAYING_S", 0.02)
    server.fault = "slow"
    report = train_drafter(served_run(tmp_path, "run", server.url))
    assert re.search(rf"a step waited \d+ s for features from {server.url}\n", capsys.readouterr().out)
    assert re.search(r" tokens/s \(\d+% of the time waiting for rows\); ", report.sentence())


def test_stopped_training_resumes_to_the_same_weights(server: FeatureServer, tmp_path: Path) -> None:
    whole, recipe = served_run(tmp_path, "whole", server.url), served_run(tmp_path, "run", server.url, timeout_s=1.0)
    train_drafter(whole)
    server.requests, server.fault, server.fault_from = 0, "busy", 8
    with pytest.raises(
        UserError, match=r"no server .* gives features; .* \(HTTP 500\): start it again, then run the same"
    ):
        train_drafter(recipe)
    server.fault = ""
    train_drafter(recipe)
    assert have_equal_weights(whole, recipe)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("ids", "has other tokens than were sent"),
        ("nan", "has values that are not finite"),
        ("short", r"has the shape \[\d+, 3, 32\], not \[\d+, 3, 32\]"),
        ("layers", r"has the shape \[\d+, 2, 32\], not \[\d+, 3, 32\]"),
        ("inner", r"has the layers \[1, 4, 4\], not \[1, 3, 4\]: start the server by the command that"),
        ("dtype", "has torch.float16, not torch.float32"),
        ("damaged", "is damaged"),
        ("nothing", "writes no hidden states: start the server by the command that"),
        ("long", r"refuses a row of \d+ tokens \(HTTP 400: .*too long.*\): its --max-model-len must be at least \d+"),
    ],
)
@pytest.mark.parametrize("fault_from", [1, 4])
def test_lies_stop_the_training(
    fault: str, sentence: str, fault_from: int, server: FeatureServer, tmp_path: Path
) -> None:
    server.fault, server.fault_from = fault, fault_from
    with pytest.raises(UserError, match=sentence):
        train_drafter(served_run(tmp_path, "run", server.url))
    assert not (RunFolder(served_run(tmp_path, "run", server.url)).drafter / "training.json").exists()


def test_start_proves_the_target(server: FeatureServer, tmp_path: Path) -> None:
    server.fault = "other"
    with pytest.raises(UserError, match=r"serves another target than target\.model, or extracts other layers"):
        train_drafter(served_run(tmp_path, "run", server.url))
    with pytest.raises(UserError, match=r"http://127.0.0.1:9 .* gives no features .*: start the server by the command"):
        train_drafter(served_run(tmp_path, "nobody", "http://127.0.0.1:9"))
    with pytest.raises(ValueError, match=r"`source: server` needs `server\.urls`"):
        served_run(tmp_path, "none")


def test_server_is_started_with_the_targets_dtype(tmp_path: Path) -> None:
    """Not with that of the copy that answers."""
    recipe = served_run(tmp_path, "run", "http://127.0.0.1:9")
    recipe.data.distill.model = "its/copy"
    words = server_command(recipe)
    assert words[words.index("--dtype") + 1] == "float32"


@pytest.mark.parametrize(("rows", "in_flight", "workers"), [(8, 32, 4), (4, 32, 8), (1, 32, 16)])
def test_loader_workers_have_the_rows_in_flight(rows: int, in_flight: int, workers: int, tmp_path: Path) -> None:
    """Each asks for one micro-batch at a time, whose rows are known once the global batch is split."""
    recipe = served_run(tmp_path, "run", "http://127.0.0.1:9", in_flight=in_flight)
    recipe.train = {"global_batch_size": 16, "per_device_train_batch_size": rows}
    assert recipe_arguments(recipe).dataloader_num_workers == workers


def test_old_files_that_nobody_read_are_swept(server: FeatureServer, tmp_path: Path) -> None:
    old, new, model = (tmp_path / "served" / f"{name}.safetensors" for name in ("cmpl-old", "cmpl-new", "model"))
    for file in (old, new, model):
        file.touch()
    for file in (old, model):
        os.utime(file, (time.time() - 2 * served.ORPHAN_AGE_S,) * 2)
    train_drafter(served_run(tmp_path, "run", server.url))
    assert not old.exists()
    assert new.exists()
    assert model.exists()


def test_ends_are_the_targets(tmp_path: Path) -> None:
    """Embedding, final norm and head without any layer; the config still counts the layers."""
    recipe = tiny_run(tmp_path)
    whole, ends = load_target(recipe.target)[0], load_ends(recipe.target)
    assert len(ends.base_model.layers) == 0
    assert ends.config.num_hidden_layers == whole.config.num_hidden_layers == 4
    assert torch.equal(ends.get_output_embeddings().weight, whole.get_output_embeddings().weight)
    assert torch.equal(ends.get_input_embeddings().weight, whole.get_input_embeddings().weight)
    assert torch.equal(final_norm(ends).weight, final_norm(whole).weight)


@pytest.mark.parametrize(
    ("changes", "tied"),
    [
        ({"lm_head.weight": torch.float8_e4m3fn, "lm_head.weight_scale_inv": torch.float32}, False),
        ({"lm_head.qweight": torch.int32, "lm_head.scales": torch.float16}, True),
    ],
)
def test_quantised_ends_are_refused(changes: dict[str, torch.dtype], tied: bool, tmp_path: Path) -> None:
    """An FP8 weight would be read without its scale, and the embedding in the place of a packed head."""
    folder = save_target(tmp_path / "target", tie_word_embeddings=tied)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensors.get(name, torch.ones(1)).to(dtype) for name, dtype in changes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"has no unquantised lm_head\.weight, which training on features"):
        load_ends(TargetRecipe(model=str(folder), device="cpu"))
