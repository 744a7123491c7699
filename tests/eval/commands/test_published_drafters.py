"""A drafter that was pushed is used by its id, wherever a folder is: the same weights, the same figures."""

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from support.finished_run import FinishedRun
from support.hub_server import USER, HubServer, hub
from support.tiny_disk import tiny_disk
from support.tiny_runs import recipe_file

from draftsmith.models.base import published
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import Recipe

__all__ = ["hub", "tiny_disk"]  # fixtures
REPO = f"{USER}/target-parallelspec"


@pytest.fixture
def run(finished: FinishedRun, hub: HubServer) -> Iterator[FinishedRun]:
    """Pushed; `recipe` is then another run's, whose only drafter is the Hub's."""
    own = finished.recipe
    assert finished.call("push").exit_code == 0
    recipe = load_recipe(own)
    methods = [{"name": "there", "tree": "tuned", "drafter": REPO}]
    finished.recipe = other_run(recipe, "other", methods)
    yield finished
    finished.recipe = own


def other_run(recipe: Recipe, name: str, methods: list[dict[str, object]]) -> str:
    values = recipe.model_dump()
    values["eval"]["methods"] = methods
    return recipe_file(Recipe.model_validate({**values, "name": name}))


def refused(run: FinishedRun, command: str, *arguments: str) -> str:
    result = run.call(command, *arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_the_same_drafter_comes_back(run: FinishedRun, hub: HubServer) -> None:
    target, _ = load_target(load_recipe(run.recipe).target)
    here, there = load_drafter(run.root / "drafter", target), load_drafter(REPO, target)
    for name, tensor in here.state_dict().items():
        assert tensor.equal(there.state_dict()[name]), name
    fetched = published.drafter_place(REPO)
    assert sorted(file.name for file in fetched.iterdir()) == ["config.json", "model.safetensors", "training.json"]
    assert hub.counts["GET tree"] == 2  # one before the push, and one for all three


def test_eval_prove_and_tune(run: FinishedRun, hub: HubServer) -> None:
    """The tuned tree went up in the drafter's config; the figures are those of the run that trained it."""
    for command in ("eval", "prove", "tune"):
        result = run.call(command)
        assert result.exit_code == 0, (command, result.output, result.exception)
    assert "nothing is written to a drafter of the Hub" in result.output
    own, other = (
        {row["method"]: row["tau"] for row in json.loads((root / "eval" / "summary.json").read_text())}
        for root in (run.root, run.root.parent / "other")
    )
    assert other["there"] == own["tuned"]
    weights = json.loads((run.root.parent / "other" / "eval" / "settings.json").read_text())["drafter_weights"]
    assert weights == json.loads((run.root / "eval" / "settings.json").read_text())["drafter_weights"]
    fetched = published.drafter_place(REPO)
    assert json.loads((fetched / "config.json").read_text()) == json.loads(hub.files(REPO)["config.json"])


def test_a_revision_that_moves_is_noticed(run: FinishedRun, hub: HubServer) -> None:
    """Records of other weights are never mixed; a commit's id always means the same ones."""
    commit_id, files = hub.repos[REPO].branches["main"][-1]
    assert run.call("eval").exit_code == 0
    published._fetched.cache_clear()
    weights = files["model.safetensors"][:-4] + bytes(4)
    training = json.loads(files["training.json"]) | {"weights_sha256": None}
    moved = {"model.safetensors": weights, "training.json": json.dumps(training).encode()}
    hub.repos[REPO].commit("main", files | moved)
    assert "drafter_weights" in refused(run, "eval")
    pinned = json.loads(Path(run.recipe).read_text())
    pinned["eval"]["methods"][0]["drafter"] = f"{REPO}@{commit_id}"
    pinned["name"] = "pinned"
    Path(run.recipe).write_text(json.dumps(pinned))
    assert run.call("eval").exit_code == 0


def test_init_and_compare(run: FinishedRun, hub: HubServer) -> None:
    recipe = load_recipe(run.recipe)
    values = recipe.model_dump()
    values["drafter"]["init"] = REPO
    values["eval"]["methods"] = [{"name": "mine"}, {"name": "there", "drafter": f"{REPO}@main"}]
    run.recipe = recipe_file(Recipe.model_validate({**values, "name": "second"}))
    result = run.call("compare")
    assert result.exit_code == 0, (result.output, result.exception)
    training = json.loads((run.root.parent / "second" / "drafter" / "training.json").read_text())
    begun = json.loads((run.root / "drafter" / "training.json").read_text())
    assert training["start"]["source"] == REPO
    assert training["start"]["weights_sha256"] == begun["weights_sha256"]
    summary = json.loads((run.root.parent / "comparison" / "eval" / "summary.json").read_text())
    assert {row["method"] for row in summary} >= {"mine", "there"}


def test_what_the_hub_does_not_give(run: FinishedRun, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(location: str) -> str:
        published._fetched.cache_clear()
        return refused(run, "eval", f"eval.methods=[{{name: x, drafter: {location}}}]", "name=refused")

    assert "drafter of method x, nobody/nothing cannot be loaded" in (said := refusal("nobody/nothing"))
    assert "the Hub shows no repository nobody/nothing to this token" in said
    assert f"{REPO} has no such revision" in refusal(f"{REPO}@v9")
    hub.repos[REPO].commit("main", {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x"})
    assert "holds no drafter that draftsmith trained" in refusal(REPO)
    hub.repos[REPO].commit("main", {"data.csv": b"1"})
    assert "holds no drafter that draftsmith trained" in refusal(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert "the Hub refuses the token (HTTP 401)" in refusal(REPO)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.utils.close_session()
    assert "HF_HUB_OFFLINE keeps this machine off the Hub" in refusal("nobody/else")


def test_what_was_fetched_is_there_offline(run: FinishedRun, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = published.drafter_place(REPO)
    published._fetched.cache_clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.utils.close_session()
    assert published.drafter_place(REPO) == fetched
    assert run.call("eval").exit_code == 0


def test_a_download_that_breaks_goes_on(run: FinishedRun, hub: HubServer) -> None:
    hub.script = lambda kind, number: "hang up" if kind == "GET resolve" else None
    assert "failed or broke off" in refused(run, "eval")
    hub.script = lambda kind, number: None
    assert run.call("eval").exit_code == 0


def test_other_bytes_are_noticed(run: FinishedRun, hub: HubServer) -> None:
    """Weights that somebody put there beside training.json are not what was trained."""
    _, files = hub.repos[REPO].branches["main"][-1]
    weights = bytearray(files["model.safetensors"])
    weights[-1] ^= 1
    hub.repos[REPO].commit("main", {**files, "model.safetensors": bytes(weights)})
    assert "are not those that training wrote" in refused(run, "eval")


def test_a_full_cache(run: FinishedRun, hub: HubServer, tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tiny_disk / "cache"))
    (tiny_disk / "filling").write_bytes(bytes(50 * 1024))
    assert "no space left on device" in refused(run, "eval")
    (tiny_disk / "filling").unlink()
    assert run.call("eval").exit_code == 0
