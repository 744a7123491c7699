"""`draftsmith push`: it uploads the run's drafter, nothing local, and resumes after every failure."""

import json
import shutil
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import ModelCard
from support.fake_hub import TOKEN, URL, USER, FakeHub, hub, refused
from support.finished_run import FinishedRun

from draftsmith.recipes.loading import load_recipe

__all__ = ["hub"]  # fixtures
REPO = f"{USER}/target-parallelspec"


def staged(finished: FinishedRun) -> dict[str, bytes]:
    folder = finished.root / "hub"
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_dry_run_sends_nothing_and_lists_all_files(finished: FinishedRun, hub: FakeHub) -> None:
    """No file contains a local path."""
    result = finished.done("push", "--dry-run", f"train.run_name=train.hub_token={TOKEN}")
    assert "The target's card names no licence, so the drafter's has none: --license sets one" in result.output
    assert not hub.calls
    files = staged(finished)
    assert set(files) == {
        *["README.md", "config.json", "model.safetensors", "recipe.yaml", "training.json"],
        *["eval/proof.json", "eval/result.json"],
    }
    assert f"YOU/target-parallelspec: {len(files)} files" in result.output
    for name in files:
        assert name in result.output
    assert files["model.safetensors"] == (finished.root / "drafter" / "model.safetensors").read_bytes()
    for name, data in files.items():
        for private in (str(finished.folder), str(finished.folder.parent), str(Path.home()) + "/", TOKEN, "/tmp/"):
            assert private.encode() not in data, (name, private)
    assert json.loads(files["config.json"])["target_name_or_path"] == ".../target"


def test_handwritten_files_are_checked_for_local_paths(finished: FinishedRun, hub: FakeHub) -> None:
    card = finished.root / "drafter" / "README.md"
    card.write_text(f"# Mine\nTrained in {finished.root}/drafter.\n")
    assert "README.md contains a folder of this machine" in finished.error("push")
    card.write_text(f"# Mine\n{TOKEN}\n")
    assert "README.md contains your token" in finished.error("push")
    assert not hub.repos
    card.write_text("# Mine\n")
    finished.done("push")
    assert hub.files(REPO)["README.md"] == b"# Mine\n"


def test_card_has_the_measured_figures(finished: FinishedRun, hub: FakeHub) -> None:
    finished.done("push", "--dry-run", "--repo", "me/mine", "--license", "mit")
    card = ModelCard.load(finished.root / "hub" / "README.md")
    values = card.data.to_dict()
    assert values["license"] == "mit"
    assert {"speculative-decoding", "draft-model", "parallel", "arxiv:2410.05589"} <= set(values["tags"])
    for told in ("`draftsmith run recipe.yaml`", "## Is it lossless?"):
        assert told in card.text
    recipe = load_recipe(finished.root / "hub" / "recipe.yaml")
    assert (recipe.drafter, recipe.runs_dir) == (load_recipe(finished.recipe).drafter, "runs")


def test_one_commit_has_all_files_and_deletes_no_others(finished: FinishedRun, hub: FakeHub) -> None:
    result = finished.done("push")
    repo = hub.repos[REPO]
    assert f"Pushed    {URL}/{REPO}/commit/" in result.output
    assert repo.private
    assert hub.files(REPO) == staged(finished)
    assert hub.calls["upload_folder"] == 1
    own = {"notes/mine.json": b"{}", "LICENSE": b"mine"}
    stale = {"model-00002-of-00002.safetensors": b"x", "eval/old.png": b"x", "export/vllm/config.json": b"{}"}
    repo.files = hub.files(REPO) | own | stale
    finished.done("push", "--license", "mit")
    assert hub.files(REPO) == staged(finished) | own
    assert b"license: mit" in hub.files(REPO)["README.md"]


@pytest.mark.parametrize(
    ("call", "fault", "sentence"),
    [
        ("whoami", refused(401), "401 for https://hub.test; "),
        ("upload_folder", httpx2.ReadError("broken"), "ReadError for tester"),
    ],
)
def test_failed_push_is_one_sentence_and_resumes(
    finished: FinishedRun, hub: FakeHub, call: str, fault: Exception, sentence: str
) -> None:
    hub.faults[call] = fault
    assert sentence in finished.error("push")
    assert all(repo.files == {} for repo in hub.repos.values())
    hub.faults.clear()
    finished.done("push")
    assert hub.files(REPO) == staged(finished)


def test_unsuitable_existing_repository_is_refused(finished: FinishedRun, hub: FakeHub) -> None:
    """If it has another model, or is public although private was requested, it is not changed."""
    hub.read_only.add("others")
    assert "HfHubHTTPError for others/x: 403" in finished.error("push", "--repo", "others/x")
    assert "a b is no valid repository name: give name or user/name" in finished.error("push", "--repo", "a b")
    finished.done("push", "--repo", "mine")
    repo = hub.repos[f"{USER}/mine"]
    repo.private = False
    assert "tester/mine is public: push with --public" in finished.error("push", "--repo", "mine")
    repo.private = True
    assert "tester/mine is private: leave out --public" in finished.error("push", "--repo", "mine", "--public")
    repo.files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"an LLM"}
    assert "holds no draftsmith drafter (config.json, model.safetensors)" in finished.error("push", "--repo", "mine")
    repo.files = {"data.csv": b"1,2"}
    assert "holds no draftsmith drafter (data.csv)" in finished.error("push", "--repo", "mine")
    assert hub.files(f"{USER}/mine") == {"data.csv": b"1,2"}


def test_only_trained_drafters_are_pushed(finished: FinishedRun, hub: FakeHub) -> None:
    drafter = finished.root / "drafter"
    assert "was trained with parallel, not eagle" in finished.error("push", "drafter={kind: eagle}")
    assert "was trained with" in finished.error("push", "target.model=embedded")
    (drafter / "model.safetensors").write_bytes((drafter / "model.safetensors").read_bytes()[:-1] + b"x")
    assert "are not those that training wrote" in finished.error("push")
    shutil.rmtree(drafter)
    assert "holds no trained drafter" in finished.error("push")
    assert not hub.calls
