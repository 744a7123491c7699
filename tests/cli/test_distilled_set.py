"""A distilled set as a thing of its own: what `push --data` writes trains the same drafter as the run it came from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.fake_hub import TOKEN, USER, FakeHub, Repo, hub
from support.tiny_runs import (
    have_equal_weights,
    recipe_file,
    recipe_in,
    save_small_target,
)
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.cli.stages import run_distill, run_train
from draftsmith.data.distill.ledger import LedgerView
from draftsmith.data.distill.token_dataset import load_tokens, tokens_hash
from draftsmith.data.sources.conversation import ID_HEX_DIGITS
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

__all__ = ["hub"]  # fixtures
DISTILL = {"temperature": 0.8, "top_k": 9, "max_new_tokens": 20, "cut_answers": "keep"}


def recipe_of(folder: Path, name: str, source: str, engine: str = "none", **data: Any) -> Recipe:
    conversations = {"source": source, "decontaminate": []}
    distill = {**DISTILL, "engine": engine}
    data = {"conversations": conversations, "distill": distill, "max_length_tokens": 40, **data}
    return recipe_in(folder, name, data=data, train={"max_steps": 2, "save_steps": 2})


def call(command: str, recipe: Recipe, *arguments: str) -> Result:
    result = CliRunner().invoke(app, [command, recipe_file(recipe), *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 24 prompts of one and two turns, distilled, trained, and pushed into `runs/own/hub_data`."""
    folder = tmp_path_factory.mktemp("whole")
    save_small_target(folder / "target")
    turns = [[f"w{n} w{n + 1}"] + [f"w{n}"] * (n % 2) for n in range(4, 28)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"turns": each}) + "\n" for each in turns))
    own = recipe_of(folder, "own", str(folder / "prompts.jsonl"), "transformers")
    run_distill(own)
    run_train(own)
    call("push", own, "--data", "--dry-run", "--license", "cc0-1.0", "--base-model", "org/llm")
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "copy")


def lines_of(recipe: Recipe) -> dict[str, Any]:
    records = LedgerView(RunFolder(recipe).data).records()
    return {line.pop("id")[:ID_HEX_DIGITS]: {**line, "source": ""} for line in records}


def test_the_same_tokens_and_the_same_drafter(folder: Path) -> None:
    """Of answers of which some have no end; from the pushed folder, and from the run's own data."""
    own = recipe_of(folder, "own", str(folder / "prompts.jsonl"), "transformers")
    expected, lines = tokens_hash(load_tokens(RunFolder(own))), lines_of(own)
    reasons = [line["reason"] for line in lines.values()]
    assert 0 < reasons.count(None) < len(reasons) > 15
    for source in ("hub_data", "data"):
        again = recipe_of(folder, source, str(folder / "runs" / "own" / source))
        report = run_distill(again)["conversations"]
        assert (lines_of(again), report["kept"]) == (lines, len(lines))
        assert list(report["sources"]) == [source]
        assert tokens_hash(load_tokens(RunFolder(again))) == expected
        if source == "hub_data":
            run_train(again)
            assert have_equal_weights(own, again)


def test_by_way_of_the_hub(folder: Path, hub: FakeHub) -> None:
    """Under the target's name; the licence is that of the prompts' card, unknown without one."""
    own = recipe_of(folder, "own", str(folder / "prompts.jsonl"), "transformers")
    result = call("push", own, "--data")
    name = f"{USER}/target-distilled"
    assert f"data.distill.engine=none data.conversations.source={name}" in result.output
    assert set(hub.files(name)) == {"README.md", "card.json", "shards/00001.jsonl"}
    assert b"license:\n- unknown" in hub.files(name)["README.md"]
    assert TOKEN.encode() not in b"".join(hub.files(name).values())
    again = recipe_of(folder, "again", name)
    run_distill(again)
    assert lines_of(again) == lines_of(own)
    hub.repos["org/other"] = Repo(private=True, files={"data.csv": b"x"})
    refused = CliRunner().invoke(app, ["push", recipe_file(own), "--data", "--repo", "org/other"])
    assert "org/other exists and holds no distilled set (data.csv)" in refused.output
