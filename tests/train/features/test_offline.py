"""Features on disk: their size is accepted before the first byte, a killed run goes on, training is that of online."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.places import ROOT
from support.tiny_runs import LENGTHS, recipe_file, save_target, tiny_run, token_rows
from transformers import TrainerCallback
from typer.testing import CliRunner

from draftsmith.data.distill.token_dataset import load_tokens
from draftsmith.eval.commands import cli, stages
from draftsmith.models.base.registry import drafter_kinds, load_drafter_class
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter import stage
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.drafter.trainer import DrafterTrainer
from draftsmith.train.features import cache as feature_cache
from draftsmith.train.features import online as online_features
from draftsmith.train.features import write as features
from draftsmith.train.features.cache import FeatureIndex
from draftsmith.train.features.engine import TransformersFeatures
from draftsmith.train.features.write import project_features, write_features

OFFLINE = {"features": {"source": "offline", "dtype": "float32"}}
# 3 layers x 32 x 2 bytes (bf16).
TOKEN_BYTES = 3 * 32 * 2


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 tokens in bf16: lengths 12 + 14, 9 + 13, 11 + 16, 10 + 15."""
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 30 * TOKEN_BYTES)


def write(recipe: Recipe) -> Path:
    projection = project_features(recipe)
    write_features(recipe, projection, progress=False)
    return projection.folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def command(recipe: Recipe, *options: str) -> Any:
    return CliRunner().invoke(cli.app, ["features", recipe_file(recipe), *options])


# ---- before the first byte ----


def test_the_size_is_that_of_the_files(tmp_path: Path) -> None:
    """2 bytes x 32 hidden x 3 layers x 100 tokens; the files hold that and their headers."""
    recipe = tiny_run(tmp_path)
    projection = project_features(recipe)
    assert sum(LENGTHS) == 100
    assert projection.total_bytes == projection.missing_bytes == 100 * TOKEN_BYTES
    assert projection.sentence().startswith(
        f"{projection.folder} takes 18.8 KiB = 100 tokens x 3 layers x 32 x 2 bytes; "
    )
    assert not projection.folder.exists()
    write_features(recipe, projection, progress=False)
    (shard,) = projection.folder.glob("*.safetensors")
    assert 0 <= shard.stat().st_size - projection.total_bytes < 1000
    done = project_features(recipe)
    assert (done.missing_bytes, done.total_bytes) == (0, 100 * TOKEN_BYTES)
    assert "is complete (18.8 KiB = 100 tokens" in done.sentence()


def test_a_teacher_adds_the_final_layer(tmp_path: Path) -> None:
    drafter = {"kind": "eagle3", "options": {"feature_layers": [0, 2]}}
    assert project_features(tiny_run(tmp_path, drafter=drafter)).index.layers == (0, 2, -1)
    drafter["options"] = {"feature_layers": [0, 2], "loss": "ce"}
    assert project_features(tiny_run(tmp_path, drafter=drafter)).index.layers == (0, 2)


def test_nothing_is_written_before_the_size_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_run(tmp_path)
    folder = RunFolder(recipe).features
    refused = command(recipe)
    assert refused.exit_code == 2
    assert "takes 18.8 KiB" in refused.stdout
    assert refused.stderr == (
        f"error: nothing was written to {folder}: accept its size with `draftsmith features ... --yes`\n"
    )
    assert not folder.exists()
    monkeypatch.setattr(stages, "sys", type("Terminal", (), {"stdin": type("In", (), {"isatty": lambda: True})}))
    for answer in (False, True):
        monkeypatch.setattr(stages.Confirm, "ask", lambda *_, answer=answer, **__: answer)
        asked = command(recipe)
        assert asked.exit_code == (0 if answer else 2)
        assert folder.exists() == answer
    shutil.rmtree(folder)
    monkeypatch.undo()
    assert sys.stdin is not None
    accepted = command(recipe, "--yes")
    assert accepted.exit_code == 0
    assert "Next: draftsmith train" in accepted.stdout
    assert "data.features.source=offline" in accepted.stdout
    before = contents(folder)
    again = command(recipe)  # nothing to accept
    assert again.exit_code == 0
    assert "nothing to do" in again.stdout
    assert contents(folder) == before


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_run(tmp_path)
    margin = features.MARGIN_BYTES + round(0.05 * 100 * TOKEN_BYTES)
    for spare, fits in ((0, True), (-1, False)):
        monkeypatch.setattr(features, "free_bytes_at", lambda _, spare=spare: 100 * TOKEN_BYTES + margin + spare)
        result = command(recipe, "--yes")
        assert result.exit_code == (0 if fits else 2)
        if not fits:
            assert "still needs 18.8 KiB, and 512 MiB to spare, but only 512 MiB are free" in result.stderr
            assert result.stderr.count("\n") == 1
        assert RunFolder(recipe).features.exists() == fits
        shutil.rmtree(RunFolder(recipe).features, ignore_errors=True)


# ---- interrupted ----


@pytest.mark.usefixtures("small_shards")
def test_a_killed_run_goes_on_and_writes_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = contents(write(tiny_run(tmp_path, "whole")))
    assert sorted(whole) == [*(f"features-0000{number}.safetensors" for number in range(4)), "index.json"]
    broken = tiny_run(tmp_path, "broken")
    computed: list[int] = []

    class Killed(TransformersFeatures):
        def features(self, rows: Any) -> Any:
            computed.append(len(rows))
            if len(computed) == 3:
                raise KeyboardInterrupt
            return super().features(rows)

    monkeypatch.setattr(features, "TransformersFeatures", Killed)
    with pytest.raises(KeyboardInterrupt):
        write(broken)
    folder = RunFolder(broken).features
    (folder / "features-00002.safetensors.partial").write_bytes(b"the power went here")
    written = {name: (folder / name).stat().st_mtime_ns for name in list(whole)[:2]}
    projection = project_features(broken)
    assert [shard.file for shard in projection.missing] == list(whole)[2:4]
    assert projection.missing_bytes == (27 + 25) * TOKEN_BYTES
    assert "of which 9.0 KiB are there" in projection.sentence()
    write(broken)
    assert computed == [2, 2, 2, 2, 2]
    assert contents(folder) == whole
    assert {name: (folder / name).stat().st_mtime_ns for name in written} == written


@pytest.mark.usefixtures("small_shards")
def test_a_full_disk_keeps_what_is_finished(
    tmp_path: Path,
    tiny_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four shards of 10 KiB and more, and 64 KiB hold three of them with their headers when 20 KiB are taken."""
    recipe = tiny_run(tmp_path)
    folder = RunFolder(recipe).features
    folder.symlink_to(tiny_disk)
    (tiny_disk / "other").write_bytes(b"x" * (52 << 10))
    monkeypatch.setattr(features, "free_bytes_at", lambda _: 1 << 40)  # it fills up on the way
    result = command(recipe, "--yes")
    assert result.exit_code == 2
    assert "no space left on the device for " in result.stderr
    assert "run the same command again to continue" in result.stderr
    left = sorted(path.name for path in tiny_disk.iterdir())
    assert left == ["features-00000.safetensors", "index.json", "other"]
    (tiny_disk / "other").unlink()
    assert command(recipe, "--yes").exit_code == 0
    assert project_features(recipe).missing == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"features": {"dtype": "float32"}}}, "data.features.dtype = 'bfloat16', now it is 'float32'"),
        ({"data": {"features": {"engine": "vllm"}}}, "data.features.engine = 'transformers', now it is 'vllm'"),
        ({"target": {"dtype": "bfloat16"}}, "target.dtype = 'float32', now it is 'bfloat16'"),
        ({"drafter": {"options": {"feature_layers": [2]}}}, r"holds layers \[1, 3, -1\] .* now read \[2\]"),
    ],
)
def test_settings_are_not_mixed(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    write(tiny_run(tmp_path))
    with pytest.raises(UserError, match=message):
        project_features(tiny_run(tmp_path, **sections))


@pytest.mark.usefixtures("small_shards")
def test_another_target_or_other_tokens_of_the_same_name_are_seen(tmp_path: Path) -> None:
    recipe = tiny_run(tmp_path)
    folder = write(recipe)
    (folder / "features-00001.safetensors").unlink()
    save_target(tmp_path / "target", initializer_range=0.1)
    with pytest.raises(UserError, match=r"was begun with the target's weights \(hash\) = '"):
        project_features(recipe)
    save_target(tmp_path / "target")
    tokens = RunFolder(recipe).data / "tokens"
    shutil.rmtree(tokens)
    token_rows((*LENGTHS[:-1], 14)).save_to_disk(str(tokens))
    with pytest.raises(UserError, match=r"was begun with data \(its tokens\) = '"):
        project_features(recipe)


# ---- training ----


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(RunFolder(recipe).drafter / "model.safetensors")


@pytest.mark.parametrize("kind", ["parallel", "eagle3"])
def test_offline_training_is_online_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    drafter = {"kind": kind, "options": {"feature_layers": [1, 3, -1] if kind == "parallel" else [1, 3]}}
    online = tiny_run(tmp_path, "online", drafter=drafter)
    offline = tiny_run(tmp_path, "offline", drafter=drafter, data=OFFLINE)
    online_report = train_drafter(online)
    write(offline)
    seen: list[Any] = []

    class Watched(DrafterTrainer):
        def __init__(self, drafter: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            seen.append(target)
            super().__init__(drafter, target, *args, **kwargs)

    def no_target(*_: Any, **__: Any) -> None:
        raise AssertionError("the target ran")

    monkeypatch.setattr(stage, "DrafterTrainer", Watched)
    monkeypatch.setattr(online_features, "target_features", no_target)
    report = train_drafter(offline)
    assert len(seen[0].base_model.layers) == 0
    assert report.loss == pytest.approx(online_report.loss, rel=1e-5)
    expected, found = weights(online), weights(offline)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-4)


class InterruptAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("train", [{}, {"gradient_accumulation_steps": 2, "dataloader_num_workers": 2}])
def test_resumed_is_uninterrupted_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: dict[str, Any]
) -> None:
    """Also from a data loader's workers, which read the same files at the same time."""
    base = tiny_run(tmp_path).train
    whole, broken = (
        tiny_run(tmp_path, name, data={"features": {"source": "offline"}}, train={**base, **train})
        for name in ("whole", "broken")
    )
    for recipe in (whole, broken):
        write(recipe)
    train_drafter(whole)

    class Interrupted(DrafterTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, callbacks=[InterruptAt(5)], **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "DrafterTrainer", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_drafter(broken)
    assert train_drafter(broken).steps == 6
    expected, found = weights(whole), weights(broken)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.slow
def test_two_processes_read_the_same_files(tmp_path: Path) -> None:
    """Launched as for several GPUs: the weights are those of two processes that each run the target."""
    script = ROOT / "train" / "train_parallel.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    recipes = [tiny_run(tmp_path, "online"), tiny_run(tmp_path, "offline", data=OFFLINE)]
    write(recipes[1])
    for recipe in recipes:
        result = subprocess.run([*launch, recipe_file(recipe)], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-2000:]
        record = json.loads((RunFolder(recipe).drafter / "training.json").read_text())
        assert record["batch_size"] == 6  # 3 rows of each process
    expected, found = map(weights, recipes)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-4)


def test_training_asks_for_complete_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_run(tmp_path, data=OFFLINE)
    with pytest.raises(UserError, match=r"holds no features, which data.features.source=offline trains on: run `draft"):
        train_drafter(recipe)
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 1)
    folder = write(recipe)
    (folder / "features-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"is not complete \(1 of 8 shards are missing\)"):
        train_drafter(recipe)
    save_target(tmp_path / "target", initializer_range=0.1)
    with pytest.raises(UserError, match=r"was begun with the target's weights \(hash\)"):
        train_drafter(recipe)


def test_a_run_is_online_or_offline_not_both(tmp_path: Path) -> None:
    train_drafter(tiny_run(tmp_path))
    with pytest.raises(UserError, match=r"features.source = None, now it is 'offline' .*features.dtype changed too"):
        train_drafter(tiny_run(tmp_path, data=OFFLINE))


def test_drafters_that_need_the_target_say_so(tmp_path: Path) -> None:
    refusing = [kind for kind in drafter_kinds() if load_drafter_class(kind).offline_obstacle is not None]
    assert refusing == ["medusa2", "pass_embeddings"]
    for kind, why in (
        ("medusa2", "it changes the target while it trains"),
        ("pass_embeddings", "it reads no features"),
    ):
        recipe = tiny_run(tmp_path, drafter={"kind": kind, "options": {}}, data=OFFLINE)
        for refused in (project_features, train_drafter):
            with pytest.raises(UserError, match=rf"`{kind}` cannot be trained on features from disk, as {why}"):
                refused(recipe)


def test_run_asks_for_the_size_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "run_distill", lambda _: None)
    with pytest.raises(UserError, match="accept its size with `draftsmith features"):
        stages.make_drafter(tiny_run(tmp_path, data=OFFLINE))


def test_autocast_is_that_of_online_training_and_a_setting(tmp_path: Path) -> None:
    recipe = tiny_run(
        tmp_path,
        "half",
        data={"features": {"source": "offline", "dtype": "float32", "autocast": True, "batch_size": 1}},
    )
    folder = write(recipe)
    target, _ = load_target(recipe.target)
    [row] = load_tokens(RunFolder(recipe), recipe.name).select([0])["input_ids"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = target_features(target, torch.tensor([row]))[0]
    index = FeatureIndex.read(folder)
    assert index is not None
    found = torch.empty_like(expected)
    feature_cache.FeatureCache(folder, index, (-1,)).read([0], found)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert (found - target_features(target, torch.tensor([row]))[0]).abs().max() > 1e-3
    plain = tiny_run(tmp_path, "half", data=OFFLINE)
    with pytest.raises(UserError, match=r"data\.features\.autocast = True"):
        project_features(plain)
