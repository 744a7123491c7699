"""Finished runs beside each other: by hand, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.records import made_up
from typer.testing import CliRunner

from draftsmith.eval.bench.records import RecordLog
from draftsmith.eval.commands.cli import app
from draftsmith.eval.commands.compare_runs import compare_runs
from draftsmith.recipes.errors import UserError


def run_in(folder: Path, seconds: list[float], order: int = 1, prompts: str = "34cd", first_id: int = 1) -> Path:
    """A run of one question for each of these seconds, its baseline at 2 s each."""
    log = RecordLog(folder / "eval" / "records.jsonl")
    for number, taken in list(enumerate(seconds, start=first_id))[::order]:
        record = replace(made_up(0, taken, 2.0), question_id=number)
        for answer in record.answers.values():
            answer.settings["prompts"] = prompts
        log.append(record)
    return folder


def test_ratios_by_hand(tmp_path: Path) -> None:
    """The second run asked in another order, which pairing has to undo."""
    first = run_in(tmp_path / "a", [1.0, 0.5, 0.8])
    second = run_in(tmp_path / "b", [0.5, 0.25, 0.4], order=-1)
    reference, other = compare_runs([first, second])
    assert (reference["run"], reference["method"], reference["reference"]) == (str(first), "chain", True)
    assert reference["speedup"] == pytest.approx(6.0 / 2.3)
    assert other["speedup"] == pytest.approx(6.0 / 1.15)
    assert other["speedup_ratio"] == pytest.approx(2.0)
    assert other["speedup_ratio_interval"] == pytest.approx([2.0, 2.0])
    assert other["tau"] == 3.0
    assert other["tau_ratio_interval"] == pytest.approx([1.0, 1.0])


def test_from_the_command_line(tmp_path: Path) -> None:
    folders = [str(run_in(tmp_path / name, seconds)) for name, seconds in (("a", [1.0, 0.5]), ("b", [2.0, 1.5]))]
    result = CliRunner().invoke(app, ["compare", *folders, "--json", str(tmp_path / "rows.json")])
    assert result.exit_code == 0, result.output
    assert "slower" in result.output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["speedup_ratio"] for row in rows] == pytest.approx([1.0, 1.5 / 3.5])
    told = CliRunner().invoke(app, ["compare", *folders, "--json"])
    assert json.loads(told.stdout) == rows
    assert "slower" in told.stderr
    result = CliRunner().invoke(app, ["compare", folders[0], "quickstart"])
    assert result.exit_code == 2
    assert "recipes, which it measures, or folders of measured runs" in result.output


def test_what_is_unlike_is_refused_by_name(tmp_path: Path) -> None:
    first = run_in(tmp_path / "a", [1.0, 0.5])
    with pytest.raises(UserError, match=r"a and .*b cannot be compared: question 1 was answered with other prompts"):
        compare_runs([first, run_in(tmp_path / "b", [1.0, 0.5], prompts="zz")])
    with pytest.raises(UserError, match=r"2 question\(s\) were asked in one of them only, 1 for example"):
        compare_runs([first, run_in(tmp_path / "c", [1.0, 0.5], first_id=2)])
    with pytest.raises(UserError, match="one run cannot be compared"):
        compare_runs([first])
