"""A drafter that was pushed is used by its id, wherever a folder is: the same weights, the same figures."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_hub import USER, FakeHub, commit_id, hub
from support.finished_run import FinishedRun
from support.tiny_runs import recipe_file

from draftsmith.models.base import registry
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import Recipe

__all__ = ["hub"]  # fixture
REPO = f"{USER}/target-parallelspec"


@pytest.fixture
def run(finished: FinishedRun, hub: FakeHub) -> Iterator[FinishedRun]:
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


def test_the_same_drafter_comes_back(run: FinishedRun, hub: FakeHub) -> None:
    target, _ = load_target(load_recipe(run.recipe).target)
    here, there = load_drafter(run.root / "drafter", target), load_drafter(REPO, target)
    for name, tensor in here.state_dict().items():
        assert tensor.equal(there.state_dict()[name]), name
    fetched = registry.drafter_place(REPO)
    assert sorted(file.name for file in fetched.iterdir()) == ["config.json", "model.safetensors", "training.json"]
    assert hub.calls["snapshot_download"] == 1  # of all three


@pytest.mark.slow
def test_eval_prove_and_tune(run: FinishedRun, hub: FakeHub) -> None:
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
    fetched = registry.drafter_place(REPO)
    assert json.loads((fetched / "config.json").read_text()) == json.loads(hub.files(REPO)["config.json"])


@pytest.mark.slow
def test_a_revision_that_moves_is_noticed(run: FinishedRun, hub: FakeHub) -> None:
    """Records of other weights are never mixed; a commit's id always means the same ones."""
    files = hub.files(REPO)
    assert run.call("eval").exit_code == 0
    registry._fetched.cache_clear()
    weights = files["model.safetensors"][:-4] + bytes(4)
    training = json.loads(files["training.json"]) | {"weights_sha256": None}
    moved = {"model.safetensors": weights, "training.json": json.dumps(training).encode()}
    hub.repos[REPO].commit(files | moved)
    assert "drafter_weights" in refused(run, "eval")
    pinned = json.loads(Path(run.recipe).read_text())
    pinned["eval"]["methods"][0]["drafter"] = f"{REPO}@{commit_id(files)}"
    pinned["name"] = "pinned"
    Path(run.recipe).write_text(json.dumps(pinned))
    assert run.call("eval").exit_code == 0


@pytest.mark.slow
def test_init_and_compare(run: FinishedRun, hub: FakeHub) -> None:
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


def test_what_the_hub_does_not_give(run: FinishedRun, hub: FakeHub) -> None:
    def refusal(location: str) -> str:
        registry._fetched.cache_clear()
        return refused(run, "eval", f"eval.methods=[{{name: x, drafter: {location}}}]", "name=refused")

    assert "drafter of method x, nobody/nothing cannot be loaded" in (said := refusal("nobody/nothing"))
    assert "the Hub shows no repository nobody/nothing to this token" in said
    assert f"{REPO} has no such revision" in refusal(f"{REPO}@v9")
    hub.repos[REPO].commit({"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x"})
    assert "holds no drafter that draftsmith trained" in refusal(REPO)
    hub.repos[REPO].commit({"data.csv": b"1"})
    assert "holds no drafter that draftsmith trained" in refusal(REPO)


def test_other_bytes_are_noticed(run: FinishedRun, hub: FakeHub) -> None:
    """Weights that somebody put there beside training.json are not what was trained."""
    files = hub.files(REPO)
    weights = bytearray(files["model.safetensors"])
    weights[-1] ^= 1
    hub.repos[REPO].commit({**files, "model.safetensors": bytes(weights)})
    assert "are not those that training wrote" in refused(run, "eval")
