"""`make smollm2`: what its variables become. Nothing is fetched here."""

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


def made(tmp_path: Path, *variables: str) -> tuple[str, list[Recipe]]:
    """What make would print, and the recipes that its draftsmith commands would read."""
    result = subprocess.run(
        ["make", "--dry-run", "smollm2", *variables],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    commands = [shlex.split(line) for line in result.stdout.splitlines() if re.search(r"/draftsmith \w+", line)]
    assert [words[1] for words in commands] == ["run", "prove", "report"]
    return result.stdout, [load_recipe(words[2], words[3:]) for words in commands]


def test_by_default_the_wheels_gguf(tmp_path: Path) -> None:
    printed, (run, prove, report) = made(tmp_path)
    folder = f"{tmp_path}/.cache/draftsmith/smollm2"
    assert f".ci/smollm2_gguf {folder}" in printed
    assert (run.target.model, run.target.gguf_file) == (folder, GGUF)
    assert run == prove == report
    assert (run.eval.questions, run.data) == ("spec_bench", load_recipe("smollm2-135m").data)


def test_the_table_has_every_recipe() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (suffixes,) = re.findall(
        r"^SMOLLM2_RECIPES := smollm2-135m \$\(addprefix smollm2-135m-,(.*)\)$", text, re.MULTILINE
    )
    files = {file.stem for file in (ROOT / "recipes").glob("smollm2-135m-*.yaml")}
    assert {f"smollm2-135m-{suffix}" for suffix in suffixes.split()} == files


def test_from_the_hub_or_a_folder(tmp_path: Path) -> None:
    printed, (run, *_) = made(tmp_path, "SMOLLM2=HuggingFaceTB/SmolLM2-135M-Instruct")
    assert ".ci/smollm2_gguf" not in printed
    assert (run.target.model, run.target.gguf_file) == ("HuggingFaceTB/SmolLM2-135M-Instruct", None)
    (tmp_path / GGUF).touch()
    printed, (run, *_) = made(tmp_path, f"SMOLLM2={tmp_path}")
    assert ".ci/smollm2_gguf" not in printed
    assert (run.target.model, run.target.gguf_file) == (str(tmp_path), GGUF)


def test_prompts_and_questions_of_ones_own(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl.xz", "README.md"):
        (tmp_path / name).touch()
    sources = tmp_path / "sources.yaml"
    sources.write_text("[{source: c.json, weight: 3}]")
    for prompts, expected in (
        (tmp_path, [(f"{tmp_path}/a.jsonl", 1), (f"{tmp_path}/b.jsonl.xz", 1)]),
        (tmp_path / "a.jsonl", [(f"{tmp_path}/a.jsonl", 1)]),
        (sources, [("c.json", 3)]),
    ):
        _, (run, *_) = made(tmp_path, f"PROMPTS={prompts}", "QUESTIONS=q.jsonl", "SET=eval.runs=1 seed=3")
        assert [(entry.source, entry.weight) for entry in run.data.conversations.mixture] == expected
        assert (run.eval.questions, run.eval.runs, run.seed) == ("q.jsonl", 1, 3)
