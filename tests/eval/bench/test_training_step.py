"""The benchmark of a training step and its parts, at tiny sizes."""

from pathlib import Path

import pytest
from parts.timing import ratios
from support.benchmark_scripts import benchmark, figures_of


def test_step_and_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token has a label at each of the 5 depths within its row. Ratios to a bound are taken per repetition."""
    script = benchmark("training_step")
    monkeypatch.setitem(script.SHAPES, "135m", (64, 96, 2, 4, 2, 331, "float32"))
    figures = figures_of(script, tmp_path, monkeypatch, "bound", "--lengths", "32", "--turns", "1")
    (row,) = figures["rows"]
    for backend in ("folded", "dense"):
        assert row[backend]["labelled_rows"] == sum(31 - depth for depth in range(5))
        assert row[backend]["ratio_highest"] > 0
    assert ratios("r", [6.0, 4.0, 9.0], [4.0, 4.0, 3.0]) == {
        "r": 1.5, "r_lowest": 1.0, "r_highest": 3.0, "r_of_best": pytest.approx(4 / 3)
    }  # fmt: skip
