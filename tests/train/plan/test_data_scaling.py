"""The benchmark that measures what more data brings: its line, and a whole run."""

from pathlib import Path

import pytest
from support.benchmark_scripts import benchmark, figures_of
from support.finished_run import write_lines
from support.tiny_runs import recipe_file, tiny_run

from draftsmith.recipes.run_folder import RunFolder

script = benchmark("data_scaling")


def test_fitted_line_by_hand() -> None:
    """Doublings -1, 0, 1, 2, taus 1.9, 2.1, 2.5, 2.5: slope 1.1 / 5, mean 2.25 at 0.5; left -.02, -.04, .14, -.08."""
    fit = script.fit_scaling([50_000, 100_000, 200_000, 400_000], [1.9, 2.1, 2.5, 2.5])
    assert fit.tau_per_doubling == pytest.approx(0.22)
    assert fit.tau_at_100k == pytest.approx(2.25 - 0.5 * 0.22)
    assert fit.residual == pytest.approx(((0.02**2 + 0.04**2 + 0.14**2 + 0.08**2) / 2) ** 0.5)
    assert fit.tau_per_doubling_error == pytest.approx(fit.residual / 5**0.5)
    assert fit.tau(800_000) == pytest.approx(2.14 + 3 * 0.22)
    assert (fit.least_tokens, fit.most_tokens) == (50_000, 400_000)
    with pytest.raises(ValueError, match="a line needs 3 sizes"):
        script.fit_scaling([50_000, 50_000, 100_000], [1.0, 1.0, 1.0])


def test_expected_tau_of_accuracies() -> None:
    """1 + 0.8 + 0.8 x 0.5 = 2.2; EAGLE's single depth repeats: 1 + 0.8 + 0.64 + 0.512."""
    assert script.expected_chain_tau([0.8, 0.5], 2) == pytest.approx(2.2)
    assert script.expected_chain_tau([0.8, 0.5, 0.9], 2) == pytest.approx(2.2)
    assert script.expected_chain_tau([0.8], 3) == pytest.approx(2.952)


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "q.jsonl", [{"question_id": 1, "category": "qa", "turns": ["w5 w6 w7"]}])
    trees = [{"name": "a"}, {"name": "b", "tree": "best_first", "nodes": 3, "branch": 2}]
    asked = {
        "questions": str(tmp_path / "q.jsonl"), "max_new_tokens": 6, "runs": 1, "warmup_questions": 0, "methods": trees
    }  # fmt: skip
    recipes = [
        tiny_run(tmp_path, "one", eval=asked, train={"max_steps": 1}),
        tiny_run(tmp_path, "two", eval=asked, train={"max_steps": 1}, drafter={"kind": "medusa", "options": {}}),
    ]
    arguments = [*map(recipe_file, recipes), "--picture", str(tmp_path / "a.png")]
    arguments += ["--tokens", "10", "20", "40"]
    figures = figures_of(script, tmp_path, monkeypatch, *arguments)
    assert [(row["run"], row["kind"]) for row in figures["rows"]] == [
        (f"{name}-{size}", kind) for size in (10, 20, 40) for name, kind in (("one", "parallel"), ("two", "medusa"))
    ]
    assert all(row["chain_tau"] >= 1 and row["steps"] == 1 for row in figures["rows"])
    assert [row["answer_tokens"] >= size for row, size in zip(figures["rows"][::2], (10, 20, 40), strict=True)]
    assert figures["rows"][0]["answer_tokens"] < figures["rows"][-1]["answer_tokens"]
    assert (tmp_path / "runs" / "two-40" / "data" / "tokens").samefile(RunFolder(recipes[0]).data / "tokens")
    assert set(figures["fits"]["tree"]) == {"parallel", "medusa"}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
