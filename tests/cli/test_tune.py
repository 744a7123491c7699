"""The trees that are compared, their figures by hand, and the chosen tree, which is stored."""

import json
from pathlib import Path

import pytest

from draftsmith.cli.artifacts import resolve_tuned, tree_settings, write_tuned
from draftsmith.cli.tune import compute_figures
from draftsmith.eval.decoding.generate import AnswerRecord
from draftsmith.recipes.schema import MethodConfig


def answered(tokens: int, seconds: float) -> AnswerRecord:
    """Build an answer in rounds of two tokens, with a prefill of one second before them."""
    return AnswerRecord(accept_lengths=[2] * (tokens // 2), wall_time_s=1 + seconds, prefill_s=1)


def test_figures_by_hand() -> None:
    """Twice as fast on one task and equal on the other: 1.5 times; pooled, 25 over 15 tokens/s would be 1.67."""
    default = {"qa": [answered(10, 1.0)], "rag": [answered(20, 1.0)], "short": [AnswerRecord()]}
    tree = {"qa": [answered(10, 1.0)], "rag": [answered(20, 0.25), answered(20, 0.75)], "short": [AnswerRecord()]}
    assert compute_figures(tree, default) == pytest.approx((25.0, 1.5, 2.0))
    alone = {"short": [AnswerRecord(wall_time_s=1)]}
    assert compute_figures(alone, alone) == (0.0, 1.0, 1.0)


def test_tuned_tree_is_saved_with_the_drafter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "draftsmith-parallel"}))
    row = MethodConfig(name="mine", tree="tuned")
    assert resolve_tuned(row, tmp_path).tree == "best_first"  # never tuned
    found = MethodConfig(name="x", tree="best_first", nodes=10, branch=8, max_depth=3, lookup=True)
    write_tuned(tmp_path, found)
    resolved = resolve_tuned(row, tmp_path)
    assert tree_settings(resolved) == tree_settings(found)
    assert resolved.name == "mine"
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "draftsmith-parallel"
    assert resolve_tuned(found, tmp_path) is found
