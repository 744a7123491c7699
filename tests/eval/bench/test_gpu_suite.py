"""`make gpu`: what it computes from what it measures, that nothing measured is lost, and all of it with tiny shapes."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from parts import drafting, target_steps
from parts.cuda_tests import outcomes
from parts.drafting import loop_figures
from parts.launches import count, per_round
from parts.shapes import FAVOURITE, SHAPES, agree, random_drafter, random_target, tree_paths
from parts.step_bound import ratios
from parts.suite import Findings, Suite, run_apart
from support.benchmark_scripts import benchmark
from support.ghost_device import ghost_device

from draftsmith.eval.decoding import loop
from draftsmith.eval.decoding.answer import AnswerRecord
from draftsmith.eval.decoding.phase_clock import HostClock
from draftsmith.models.base.registry import drafter_kinds

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


def test_loop_efficiency_by_hand() -> None:
    """12 tokens in 4 rounds of 0.5 s; the baseline takes 0.3 s a token, 0.2 of them in its forward.

    tau 3, predicted 3 * 0.2 / (0.1 + 0.3) = 1.5, speed-up (12 / 2) / (12 / 3.6) = 1.8.
    """
    answer = AnswerRecord(accept_lengths=[3] * 4, wall_time_s=2.5, prefill_s=0.5, draft_s=0.4, verify_s=1.2)
    baseline = AnswerRecord(accept_lengths=[1] * 12, wall_time_s=4.6, prefill_s=1.0, verify_s=2.4)
    found = loop_figures(answer, baseline)
    assert (found["tau"], found["draft_s"], found["verify_s"]) == pytest.approx((3, 0.1, 0.3))
    assert found["speedup_predicted"] == pytest.approx(1.5)
    assert found["speedup"] == pytest.approx(1.8)
    assert found["loop_efficiency"] == pytest.approx(1.2)


def test_launches_of_a_round_by_hand() -> None:
    """Two answers of 3 and 8 rounds; what the prompt asks for is in both."""
    few = count([("cudaLaunchKernel", 35), ("cudaLaunchKernelExC", 2), ("aten::mm", 9), ("cudaMalloc", 4)])
    many = count(
        [
            ("cudaLaunchKernel", 85),
            ("cudaLaunchKernelExC", 7),
            ("cudaGraphLaunch", 5),
            ("cudaStreamSynchronize", 10),
            ("Memcpy DtoH (Device -> Pinned)", 5),
            ("Memcpy HtoD (Pageable -> Device)", 15),
            ("Memcpy DtoD (Device -> Device)", 90),
            ("aten::mm", 19),
        ]
    )
    assert per_round(few, many, 3, 8) == {
        "kernel_launches": 11, "graph_launches": 1, "waits": 2, "copies_back": 1, "copies_in": 3, "operators": 2
    }  # fmt: skip


def test_ratios_to_the_bound_by_hand() -> None:
    """Of turns, not of medians; the best times are of different turns."""
    assert ratios("r", [6.0, 4.0, 9.0], [4.0, 4.0, 3.0]) == {
        "r": 1.5, "r_lowest": 1.0, "r_highest": 3.0, "r_of_best": pytest.approx(4 / 3)
    }  # fmt: skip


def test_trees_by_hand() -> None:
    assert tree_paths(5, 5) == [[0], [0, 0], [1], [0, 0, 0]]
    assert tree_paths(5, 2) == [[0], [0, 0], [1], [0, 1]]
    assert max(map(len, tree_paths(48, 5))) == 5
    assert tree_paths(1, 5) == []


def test_target_and_drafter_agree_on_a_token() -> None:
    target = random_target(TINY, CPU)
    drafter = random_drafter("medusa", target)
    agree(target, drafter, share=0.7)
    hidden = torch.nn.functional.normalize(torch.randn(50, TINY.hidden_size), dim=-1) * TINY.hidden_size**0.5
    heads = [target.get_output_embeddings(), *drafter.own_heads]
    assert len(heads) == 6
    for head in heads:
        assert float(head(hidden).detach().softmax(-1)[:, FAVOURITE].mean()) == pytest.approx(0.7, abs=0.02)


def test_outcomes_of_pytest() -> None:
    report = '<testsuites><testsuite errors="1" failures="2" skipped="3" tests="10"/></testsuites>'
    assert outcomes(report) == {"passed": 4, "failed": 3, "skipped": 3}


def test_what_fails_is_noted_and_the_next_goes_on(tmp_path: Path) -> None:
    def part(suite: Suite) -> None:
        suite.measure("first", lambda: 1)
        suite.measure("second", lambda divisor: 1 / divisor, 0)
        suite.measure("third", lambda a, b: a + b, 1, 2)
        raise MemoryError("of the part's own")

    file = tmp_path / "findings.json"
    found = Suite(TINY, CPU, file, time.monotonic() + 60).run(part)
    assert found.figures == {"first": 1, "third": 3}
    assert found.errors["second"].startswith("ZeroDivisionError: division by zero (test_gpu_suite.py:")
    assert found.errors["part"].startswith("MemoryError: of the part's own")
    assert json.loads(file.read_text()) == {"figures": found.figures, "errors": found.errors, "left_out": []}


def test_what_takes_longer_than_is_left_is_not_begun(tmp_path: Path) -> None:
    """Of 10 s the first takes 1 and the second 5; the third could take as long."""
    readings = iter([0.0, 1.0, 1.0, 6.0, 6.0])
    suite = Suite(TINY, CPU, tmp_path / "findings.json", 10.0, lambda: next(readings))
    for number in range(3):
        suite.measure(str(number), lambda number=number: number)
    assert (suite.findings.figures, suite.findings.left_out) == ({"0": 0, "1": 1}, ["2"])


def test_a_part_that_hangs_is_ended_and_its_figures_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it has started itself, which would write into a pipe later on."""
    monkeypatch.setattr("parts.suite.GRACE_S", 0.0)
    file, pipe = tmp_path / "findings.json", tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code = (
        f"import subprocess, time; open({str(file)!r}, 'w').write('{{\"figures\": {{\"a\": 1}}}}');"
        f"subprocess.Popen(['sh', '-c', 'sleep 20; echo late'], stdout=open({str(pipe)!r}, 'w')); time.sleep(60)"
    )
    found = run_apart([sys.executable, "-S", "-c", code], file, 2.0)
    assert (found.figures, found.errors) == ({"a": 1}, {"process": "stopped: its 2 s were up"})
    os.set_blocking(reader, True)
    assert os.read(reader, 10) == b""  # nobody is left who could write
    os.close(reader)


def test_a_part_that_dies_says_why(tmp_path: Path) -> None:
    found = run_apart([sys.executable, "-S", "-c", "import sys; sys.exit('no such device')"], tmp_path / "none", 30)
    assert found.errors == {"process": "exit code 1: no such device"}


@pytest.mark.slow
def test_every_part_with_tiny_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the tests themselves. Drafts are accepted whole: 19 tokens, after the prompt's, in 4 or 5 rounds."""
    script = benchmark("gpu")
    wanted = [part for part in script.PARTS if part != "tests"]
    files = ["--json", str(tmp_path / "gpu.json"), "--picture", str(tmp_path / "gpu.png")]
    monkeypatch.setattr("sys.argv", ["gpu.py", "--tiny", "--together", *files, "--parts", *wanted])
    script.main()
    figures = json.loads((tmp_path / "gpu.json").read_text())["figures"]
    assert (figures["errors"], figures["left_out"], figures["complete"]) == ({}, [], False)
    parts = figures["parts"]
    assert list(parts) == wanted
    assert set(parts["trees"]) == set(parts["compiled_trees"]) == {"1_nodes", "5_nodes", "3_nodes"}
    assert set(parts["drafts"]) == set(drafter_kinds())
    for kind in (*parts["drafts"].values(), *parts["compiled_drafts"].values()):
        assert (kind["chain@0"]["tau"], kind["tree@0"]["tau"]) == (19 / 4, 19 / 5)
        assert kind["tree@1"]["round"]["operators"] > 0
    losses = [parts["training"][name]["loss"] for name in ("folded_1x32", "dense_1x32")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert parts["step_bound"]["parallel"]["labelled_rows"] == sum(31 - depth for depth in range(5))
    assert parts["step_bound"]["parallel"]["step"]["operators"] > 100
    assert parts["step_bound"]["parallel"]["ratio_of_trainer_highest"] > 0
    assert (tmp_path / "gpu.png").stat().st_size > 10_000


@pytest.mark.slow
def test_each_part_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = benchmark("gpu")
    options = ["--tiny", "--parts", "peaks", "attention", "--json", str(tmp_path / "gpu.json")]
    monkeypatch.setattr("sys.argv", ["gpu.py", *options])
    script.main()
    figures = json.loads((tmp_path / "gpu.json").read_text())["figures"]
    assert figures["errors"] == {}
    assert figures["parts"]["peaks"]["matmul_float32_flops_per_s"] > 1e6
    assert set(figures["parts"]["attention"]) == {"causal", "folded", "dense"}


def test_no_time_left_is_said_by_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = benchmark("gpu")
    options = ["--tiny", "--parts", "peaks", "--minutes", "0", "--json", str(tmp_path / "gpu.json")]
    monkeypatch.setattr("sys.argv", ["gpu.py", *options])
    with pytest.raises(SystemExit) as exit_info:
        script.main()
    assert exit_info.value.code == 1
    assert json.loads((tmp_path / "gpu.json").read_text())["figures"]["left_out"] == ["peaks: all of it"]


def test_no_part_may_take_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 minutes the first may take 4; when 9 are gone, the second has the one that is left."""
    script, now_s, given_s = benchmark("gpu"), [100.0], []

    def part(*inputs: object) -> Findings:
        given_s.append(inputs[3] - now_s[0])
        now_s[0] += 540
        return Findings()

    monkeypatch.setattr(script, "findings_of", part)
    monkeypatch.setattr(script.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr("sys.argv", ["gpu.py", "--tiny", "--minutes", "10", "--parts", "peaks", "training"])
    script.main()
    assert given_s == [240, 60]


@pytest.mark.slow
def test_decoding_is_measured_without_mixing_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a ghost of a CUDA device, which has neither random numbers nor a profiler, and whose events tell no time."""
    host_generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda *_: host_generator())
    monkeypatch.setattr(drafting, "launches_per_round", lambda *_: {"waits": 0.0})
    monkeypatch.setattr(loop, "phase_clock", lambda _: HostClock())
    with ghost_device():
        device = torch.device("cuda", 0)
        trees = Suite(TINY, device, tmp_path / "trees.json", time.monotonic() + 600).run(target_steps.run)
        target = random_target(TINY, device)
        kinds = {kind: drafting.figures_of_kind(TINY, target, kind, compiles=False) for kind in ("parallel", "eagle3")}
    assert trees.errors == {}
    assert set(trees.figures) == {"1_nodes", "5_nodes", "3_nodes"}
    assert [kind["chain@0"]["tau"] for kind in kinds.values()] == [19 / 4, 19 / 4]
