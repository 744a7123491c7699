"""Features on disk: their size is known before writing, a killed run resumes, training equals online training."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import long_rope
from support.tiny_runs import (
    LENGTHS,
    recipe_file,
    save_target,
    tiny_run,
    token_rows,
    weights_of,
)
from typer.testing import CliRunner

from draftsmith.cli import main as cli
from draftsmith.errors import UserError
from draftsmith.models.base import drafter as base_drafter
from draftsmith.models.base.registry import drafter_kinds, load_drafter_class
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter import stage
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.drafter.trainer import DrafterTrainer
from draftsmith.train.features import stored as stored_features
from draftsmith.train.features.serving import server_arguments
from draftsmith.train.features.stored import StoredFeatures
from draftsmith.train.features.write import project_features, write_features

OFFLINE = {"features": {"source": "offline", "dtype": "float32"}}
# 3 layers x 32 x 2 bytes (bf16).
TOKEN_BYTES = 3 * 32 * 2


def write(recipe: Recipe) -> Path:
    projection = project_features(recipe)
    write_features(recipe, projection, progress=False)
    return projection.stored.folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# ---- before the first byte ----


def test_projected_size_equals_the_files(tmp_path: Path) -> None:
    """2 bytes x 32 hidden x 3 layers x 100 tokens; the files hold these, the tokens and their headers."""
    recipe = tiny_run(tmp_path)
    projection = project_features(recipe)
    assert sum(LENGTHS) == 100
    assert projection.total_bytes == projection.missing_bytes == 100 * TOKEN_BYTES
    assert projection.sentence().startswith(
        f"{projection.stored.folder} takes 18.8 KiB = 100 tokens x 3 layers x 32 x 2 bytes; "
    )
    assert not projection.stored.folder.exists()
    written = CliRunner().invoke(cli.app, ["features", recipe_file(recipe)])
    assert "takes 18.8 KiB" in written.stdout
    assert "Next: draftsmith train" in written.stdout
    assert "data.features.source=offline" in written.stdout
    written_bytes = sum(file.stat().st_size for file in projection.stored.folder.iterdir())
    assert 0 <= written_bytes - projection.total_bytes < 500 * len(LENGTHS)
    done = project_features(recipe)
    assert (done.missing_bytes, done.total_bytes) == (0, 100 * TOKEN_BYTES)
    assert "is complete (18.8 KiB = 100 tokens" in done.sentence()


def test_rows_across_a_switch_of_rope_are_refused(tmp_path: Path) -> None:
    """In such a batch the features of short rows would be others, before the first forward; packed rows too."""
    changes = {"rope_parameters": long_rope(15), "original_max_position_embeddings": 15, "sliding_window": None}
    save_target(tmp_path / "target", model_type="phi3", **changes)
    refusal = r"a row of 16 tokens, but .* RoPE .* beyond 15 tokens: set data.max_length_tokens to 15 at most"
    for refused, source in ((project_features, "offline"), (train_drafter, "online")):
        with pytest.raises(UserError, match=refusal):
            refused(tiny_run(tmp_path, data={"features": {"source": source}, "packing": True}))
    with pytest.raises(UserError, match=r"max_model_len=17 exceeds 15: lower data.max_length_tokens"):
        server_arguments(tiny_run(tmp_path))


def test_too_small_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_run(tmp_path)
    margin = stored_features.MARGIN_BYTES + round(0.05 * 100 * TOKEN_BYTES)
    projection = project_features(recipe)
    for spare, fits in ((-1, False), (0, True)):
        monkeypatch.setattr(stored_features, "free_bytes_at", lambda _, spare=spare: 100 * TOKEN_BYTES + margin + spare)
        if fits:
            projection.stored.check_disk_space(projection.missing)
        else:
            with pytest.raises(UserError, match=r"still needs 18\.8 KiB, and 512 MiB to spare, but only 512"):
                projection.stored.check_disk_space(projection.missing)


# ---- interrupted ----


def test_killed_run_resumes_and_writes_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest rows come first, of 16, 15, 14 and 13 tokens."""
    whole = contents(write(tiny_run(tmp_path, "whole")))
    broken = tiny_run(tmp_path, "broken", data={"features": {"batch_size": 1}})
    store, written = StoredFeatures.store, list[int]()

    def killed(self: StoredFeatures, row: int, features_sld: Any) -> None:
        if len(written) == 4:
            raise KeyboardInterrupt
        store(self, row, features_sld)
        written.append(row)

    monkeypatch.setattr(StoredFeatures, "store", killed)
    with pytest.raises(KeyboardInterrupt):
        write(broken)
    monkeypatch.undo()
    projection = project_features(broken)
    folder = projection.stored.folder
    (folder / "x.1.partial").write_bytes(b"the power went here")
    before = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.safetensors")}
    assert (written, projection.missing) == ([5, 7, 1, 3], [0, 2, 4, 6])
    assert projection.missing_bytes == (12 + 9 + 11 + 10) * TOKEN_BYTES
    assert "of which 10.9 KiB are there" in projection.sentence()
    write(broken)
    assert contents(folder).keys() == whole.keys()
    assert {name: (folder / name).stat().st_mtime_ns for name in before} == before


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"is one process: to use several GPUs start vLLM servers .*source=server"):
        write(tiny_run(tmp_path))


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"features": {"dtype": "float32"}}},
        {"target": {"dtype": "bfloat16"}},
        {"drafter": {"options": {"feature_layers": [2]}}},
        {},
    ],
    ids=["dtype", "target", "layers", "weights"],
)
def test_features_of_other_settings_are_not_read(tmp_path: Path, sections: dict[str, Any]) -> None:
    written = write(tiny_run(tmp_path))
    if not sections:
        save_target(tmp_path / "target", initializer_range=0.1)
    projection = project_features(tiny_run(tmp_path, **sections))
    assert len(projection.missing) == len(LENGTHS)
    assert f"; {written.name} there: of other settings or an earlier release, not read" in projection.sentence()


def test_rows_stay_when_tokens_change(tmp_path: Path) -> None:
    recipe = tiny_run(tmp_path)
    write(recipe)
    tokens = RunFolder(recipe).data / "tokens"
    shutil.rmtree(tokens)
    token_rows((*LENGTHS[:-1], 14)).save_to_disk(str(tokens))
    assert project_features(recipe).missing == [7]


# ---- training ----


def test_offline_training_equals_online_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE-3 reads two layers, and the final one for its loss."""
    drafter = {"kind": "eagle3", "options": {"feature_layers": [1, 3]}}
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
    monkeypatch.setattr(base_drafter, "target_features", no_target)
    report = train_drafter(offline)
    assert len(seen[0].base_model.layers) == 0
    assert report.loss == pytest.approx(online_report.loss, rel=1e-5)
    torch.testing.assert_close(weights_of(offline), weights_of(online), atol=1e-4, rtol=1e-4)


def test_drafters_that_need_the_target_are_refused(tmp_path: Path) -> None:
    refusing = [kind for kind in drafter_kinds() if load_drafter_class(kind).offline_obstacle]
    assert refusing == ["medusa2", "pass_embeddings"]
    for kind, why in (
        ("medusa2", "it changes the target while it trains"),
        ("pass_embeddings", "it reads no features"),
    ):
        recipe = tiny_run(tmp_path, drafter={"kind": kind, "options": {}}, data=OFFLINE)
        for refused in (project_features, train_drafter):
            with pytest.raises(
                UserError, match=rf"`{kind}` cannot be trained on features from disk or servers, as {why}"
            ):
                refused(recipe)
