"""`make gpu`: what it computes from what it measures, that one failure costs nothing else, and all of it on a CPU."""

import json
import time
from pathlib import Path

import gpu
import pytest
import torch
from parts import decoding
from parts.decoding import loop_figures
from parts.shapes import SHAPES
from parts.timing import Suite, ratios

from draftsmith.eval.decoding.loop import AnswerRecord

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


def test_figures_by_hand() -> None:
    """12 tokens in 4 rounds of 0.5 s; the baseline takes 0.3 s a token, 0.2 of them in its forward.

    tau 3, predicted 3 * 0.2 / (0.1 + 0.3) = 1.5, speedup (12 / 2) / (12 / 3.6) = 1.8. Ratios to a bound are of turns.
    """
    answer = AnswerRecord(accept_lengths=[3] * 4, wall_time_s=2.5, prefill_s=0.5, draft_s=0.4, verify_s=1.2)
    baseline = AnswerRecord(accept_lengths=[1] * 12, wall_time_s=4.6, prefill_s=1.0, verify_s=2.4)
    found = loop_figures(answer, baseline)
    assert (found["tau"], found["draft_s"], found["verify_s"]) == pytest.approx((3, 0.1, 0.3))
    assert found["speedup_predicted"] == pytest.approx(1.5)
    assert found["speedup"] == pytest.approx(1.8)
    assert found["loop_efficiency"] == pytest.approx(1.2)
    assert ratios("r", [6.0, 4.0, 9.0], [4.0, 4.0, 3.0]) == {
        "r": 1.5, "r_lowest": 1.0, "r_highest": 3.0, "r_of_best": pytest.approx(4 / 3)
    }  # fmt: skip


def test_what_fails_is_noted_and_the_next_goes_on() -> None:
    def part(suite: Suite) -> None:
        suite.measure("first", lambda: 1)
        suite.measure("second", lambda divisor: 1 / divisor, 0)
        suite.measure("third", lambda a, b: a + b, 1, 2)
        raise MemoryError("of the part's own")

    found = Suite(TINY, CPU, time.monotonic() + 60).run(part)
    assert found.figures == {"first": 1, "third": 3}
    assert found.errors["second"].startswith("ZeroDivisionError: division by zero (test_gpu_suite.py:")
    assert found.errors["part"].startswith("MemoryError: of the part's own")


def test_what_takes_longer_than_is_left_is_not_begun() -> None:
    """Of 10 s the first takes 1 and the second 5; the third could take as long."""
    readings = iter([0.0, 1.0, 1.0, 6.0, 6.0])
    suite = Suite(TINY, CPU, 10.0, lambda: next(readings))
    for number in range(3):
        suite.measure(str(number), lambda number=number: number)
    assert (suite.figures, suite.left_out) == ({"0": 0, "1": 1}, ["2"])


def figures_of_parts(folder: Path, monkeypatch: pytest.MonkeyPatch, *parts: str, minutes: str = "20") -> dict:
    file = folder / "gpu.json"
    options = ["--shape", "tiny", "--minutes", minutes, "--json", str(file), "--parts", *parts]
    monkeypatch.setattr("sys.argv", ["gpu.py", *options])
    gpu.main()
    return json.loads(file.read_text())["figures"]


@pytest.mark.nightly
def test_tiny_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are accepted whole: 19 tokens, after the prompt's, in 4 or 5 rounds."""
    monkeypatch.setattr(decoding, "drafter_kinds", lambda: ["parallel"])
    monkeypatch.setattr(gpu, "COPIED_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(gpu, "matmul_flops_per_s", lambda *_: 1e9)
    figures = figures_of_parts(tmp_path, monkeypatch, "peaks", "attention", "trees", "drafts", "step_bound")
    assert (figures["errors"], figures["left_out"], figures["complete"]) == ({}, [], False)
    parts = figures["parts"]
    assert set(parts["attention"]) == {"causal", "folded", "dense"}
    assert set(parts["trees"]) == {"1_nodes", "5_nodes", "3_nodes"}
    for kind in parts["drafts"].values():
        assert (kind["chain@0"]["tau"], kind["tree@0"]["tau"]) == (19 / 4, 19 / 5)
        assert kind["tree@1"]["round"]["operators"] > 0
    assert parts["step_bound"]["parallel"]["labelled_rows"] == sum(31 - depth for depth in range(5))
    assert parts["step_bound"]["parallel"]["ratio_highest"] > 0
    assert set(parts["step_bound"]) == {"parallel", "parallel, dense"}
