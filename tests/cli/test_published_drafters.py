"""A published drafter is used by its Hub id in place of a folder, with equal weights and figures."""

import json
from collections.abc import Iterator

import pytest
from support.fake_hub import USER, FakeHub, hub
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
    """Push a run; `recipe` is that of another run, whose only drafter is the Hub's."""
    own = finished.recipe
    finished.done("push")
    recipe = load_recipe(own)
    methods = [{"name": "there", "tree": "tuned", "drafter": REPO}]
    finished.recipe = other_run(recipe, "other", methods)
    yield finished
    finished.recipe = own


def other_run(recipe: Recipe, name: str, methods: list[dict[str, object]]) -> str:
    values = recipe.model_dump()
    values["eval"]["methods"] = methods
    return recipe_file(Recipe.model_validate({**values, "name": name}))


def test_pushed_drafter_is_downloaded_unchanged(run: FinishedRun, hub: FakeHub) -> None:
    target, _ = load_target(load_recipe(run.recipe).target)
    here, there = load_drafter(run.root / "drafter", target), load_drafter(REPO, target)
    for name, tensor in here.state_dict().items():
        assert tensor.equal(there.state_dict()[name]), name
    fetched = registry.drafter_place(REPO)
    assert sorted(file.name for file in fetched.iterdir()) == ["config.json", "model.safetensors", "training.json"]
    assert hub.calls["snapshot_download"] == 1  # of all three


@pytest.mark.slow
def test_eval_prove_and_tune_of_a_published_drafter(run: FinishedRun, hub: FakeHub) -> None:
    """The drafter's config on the Hub has the tuned tree; figures equal those of the run that trained it."""
    for command in ("eval", "prove", "tune"):
        result = run.done(command)
    assert "the drafter is from the Hub, so its config is not changed" in result.output
    own, other = (
        {row["method"]: row["tau"] for row in json.loads((root / "eval" / "summary.json").read_text())}
        for root in (run.root, run.root.parent / "other")
    )
    assert other["there"] == own["tuned"]
    weights = json.loads((run.root.parent / "other" / "eval" / "settings.json").read_text())["drafter_weights"]
    assert weights == json.loads((run.root / "eval" / "settings.json").read_text())["drafter_weights"]
    fetched = registry.drafter_place(REPO)
    assert json.loads((fetched / "config.json").read_text()) == json.loads(hub.files(REPO)["config.json"])
