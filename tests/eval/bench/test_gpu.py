"""The GPU benchmark, rehearsed on a CPU: its steps at tiny sizes, its page, and its processes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import __main__ as runner
from gpu import distill, facts, kinds, step_cost, training
from gpu.page import load_figures, problems, summary
from gpu.step import Step
from parts.shapes import SHAPES

from draftsmith.results import RESULT_KEYS

STEPS = {"facts": facts, "kinds_1": kinds, "step_cost": step_cost, "distill": distill, "training": training}
WRITES = "import pathlib, sys; pathlib.Path(sys.argv[4], 'writes.json').write_text('{\"tokens_per_s\": 7}')"
FAILS = "raise ValueError('no kernel image')"
WAITS = "import time; print('started', flush=True); time.sleep(600)"


@pytest.fixture
def run_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    monkeypatch.setitem(SHAPES, "embedded", (64, 96, 2, 4, 2, 331, "float32"))
    monkeypatch.setitem(SHAPES, "135m", (64, 96, 2, 4, 2, 331, "float32"))

    def run(name: str) -> dict[str, Any]:
        step = Step(name, torch.device("cpu"), tmp_path, part="1/99" if name.startswith("kinds") else None)
        STEPS[name].main(step)
        assert step.failed == []
        return load_figures(tmp_path, name)

    return run


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("facts", ["launch_s", "read_bytes_per_s"]),
        pytest.param("kinds_1", ["parallel.parity", "parallel.losses", "parallel.answers"], marks=pytest.mark.slow),
        pytest.param("distill", ["measured"], marks=pytest.mark.slow),
        pytest.param("step_cost", ["uncompiled", "compiled loop", "parallel", "eagle"], marks=pytest.mark.slow),
    ],
)
def test_step_and_its_part_of_the_page(
    name: str, figures: list[str], run_step: Callable[[str], dict[str, Any]]
) -> None:
    found = run_step(name)
    assert set(figures) <= found.keys()
    assert problems(found) == []
    page = summary("a title", [], {name: found})
    assert page.startswith("# a title\n")
    assert json.loads(page.partition("```json")[2].rstrip("`\n")) == found


def test_parts_that_fail_or_run_out_of_time(tmp_path: Path) -> None:
    """They are recorded too, and later parts run."""
    step = Step("mine", torch.device("cpu"), tmp_path, limit_s=10)
    with step.part("first"):
        raise RuntimeError("out of luck\nand of words")
    assert not step.has_time("second", 20)
    with step.part("third"):
        step.add("third", 3)
    figures = load_figures(tmp_path, "mine")
    assert step.failed == ["first"]
    assert problems(figures) == ["first: and of words", f"second left out: {figures['second.skipped']}"]
    assert figures["second.skipped"].startswith("needs 20 s, ")
    assert figures["third"] == 3


def test_failed_step_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEAST_S", 0)
    codes = {"waits": WAITS, "fails": FAILS, "writes": WRITES}
    jobs = [runner.Job(name, ["-c", code], 0.25 if name == "waits" else 100) for name, code in codes.items()]
    run = runner.Run("cpu", tmp_path, 300, "python -m benchmarks.gpu")
    run.run(jobs, at_a_time=3)
    monkeypatch.setattr(runner, "LEAST_S", 1000)
    run.run([runner.Job("late", ["-c", WRITES], 100)])
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert tuple(result) == RESULT_KEYS
    assert result["figures"]["writes"] == {"tokens_per_s": 7}
    outcomes = {each["step"]: (each["exit"], each["problems"]) for each in result["figures"]["steps"]}
    assert outcomes == {
        "waits": (-15, ["ended after its limit of 1 s"]),
        "fails": (1, ["ValueError: no kernel image"]),
        "writes": (0, []),
        "late": ("not run", ["no time was left"]),
    }
    page = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "| fails | 1 | " in page
    assert " | ValueError: no kernel image |" in page
