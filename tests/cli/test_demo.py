"""`draftsmith demo`: equal, complete answers with and without the drafter; the shipped drafter is used."""

from pathlib import Path
from typing import Any

import pytest
from support.tiny_runs import untrained_run

from draftsmith.cli.demo import QUESTIONS, Demo, DemoAnswer, demonstrate, show
from draftsmith.eval.bench import measured_methods
from draftsmith.models.base.registry import SHIPPED_DRAFTER, read_drafter, read_training
from draftsmith.models.target.packaged import SMOLLM2
from draftsmith.recipes.run_folder import RunFolder


def test_answer_is_equal_with_and_without_the_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The drafter is untrained, which does not change the answer."""
    run = untrained_run(tmp_path)
    found = demonstrate(run.target, None, 12, RunFolder(run).drafter)
    show(found)
    printed = " ".join(capsys.readouterr().out.split())
    assert [each.question for each in found.shown] == list(QUESTIONS)
    for each in found.shown:
        assert each.same
        assert 4 <= each.rounds <= each.tokens <= 11  # the first of twelve comes with the prompt
        assert " ".join(each.answer.split()) in printed
    assert found.sentence() in printed
    assert "every answer is the same; float32" in printed
    assert printed.count("... (cut at 12 tokens)") == sum(each.cut for each in found.shown)
    assert "Bold green: drafted and accepted" in printed


def test_times_are_medians_of_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides answer in turns, after a warm-up answer of each: 1, 9 and 2 s without, 1, 1 and 3 s with a drafter."""
    run = untrained_run(tmp_path)
    seconds, asked, answer = iter([0, 0, 1, 1, 9, 1, 2, 3]), list[str](), measured_methods.Arm.answer

    def timed(self: Any, *arguments: Any, **named: Any) -> Any:
        record = answer(self, *arguments, **named)
        asked.append(self.method.name)
        record.wall_time_s = record.prefill_s + next(seconds)
        return record

    monkeypatch.setattr(measured_methods.Arm, "answer", timed)
    (shown,) = demonstrate(run.target, "What does os.path.join do?", 12, RunFolder(run).drafter).shown
    assert asked == ["autoregressive", "shipped"] * 4
    assert (shown.plain_s, shown.drafted_s) == (pytest.approx(2), pytest.approx(1))


def test_speedup_above_tau_is_reported_as_a_clock_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten tokens in five rounds are two per round: a speedup of 1.5 is possible, 3 is not."""

    def answered(plain_s: float) -> DemoAnswer:
        return DemoAnswer("q", "a", False, True, 10, 5, plain_s, 1.0)

    mixed, alone = (Demo("t", "float32", [answered(each) for each in times]) for times in ((1.5, 3.0), (3.0,)))
    assert (mixed.ratio, alone.ratio) == (1.5, None)
    assert "1.50x (median of questions)" in mixed.sentence()
    assert "impossible" in mixed.sentence()
    assert "1 of 2 questions are left out" in mixed.sentence()
    assert alone.sentence().startswith("no speedup, 2.00 tokens per round")
    assert "impossible" not in Demo("t", "float32", [answered(2.0)]).sentence()
    show(mixed)
    assert "3.00x (!)" in capsys.readouterr().out


def test_shipped_drafter() -> None:
    drafter = read_drafter(SHIPPED_DRAFTER, "auto")  # weights with the recorded hashes
    assert (drafter.config.target_config["hidden_size"], drafter.config.target_config["vocab_size"]) == (576, 49152)
    assert (SHIPPED_DRAFTER / "model.safetensors").stat().st_size < 16 * 2**20
    assert read_training(SHIPPED_DRAFTER).steps > 0
    card = (SHIPPED_DRAFTER / "README.md").read_text(encoding="utf-8")
    assert f"base_model: {SMOLLM2.hub_id}" in card
    assert "license: apache-2.0" in card
