"""The comparison with transformers: what it concludes, and that both sides give the same answers."""

from pathlib import Path
from typing import Any

import pytest
from support.benchmark_scripts import benchmark, figures_of
from support.finished_run import write_lines
from support.tiny_runs import recipe_file, recipe_in, save_target, tiny_run

from draftsmith.eval.bench.costs import asking
from draftsmith.train.drafter.stage import train_drafter

script = benchmark("against_transformers")


def side(*speeds: float) -> dict[str, object]:
    return {"tokens_per_s": sorted(speeds)[len(speeds) // 2], "tokens_per_s_of_runs": list(speeds)}


def test_our_best_over_their_best_speculation_by_hand() -> None:
    """`generate` is no speculation, our loop without a draft no drafter; ratios run by run: 30/10, 40/16, 50/25."""
    sides = {
        "transformers: generate": side(90, 90, 90),
        "transformers: assisted generation": side(9, 9, 9),
        "transformers: prompt lookup": side(10, 16, 25),
        "ours: autoregressive": side(99, 99, 99),
        "ours: prompt lookup": side(20, 8, 50),
        "ours: tree": side(30, 40, 50),
    }
    found = script.conclusions(sides, ["ours: prompt lookup", "ours: tree"])
    best = found["best"]
    assert (best["ours"], best["theirs"]) == ("ours: tree", "transformers: prompt lookup")
    assert (best["ratios"], best["ratio_median"]) == ([3.0, 2.5, 2.0], 2.5)
    assert [(pair["ours"], pair["theirs"]) for pair in found["same_draft"]] == [
        ("ours: autoregressive", "transformers: generate"),
        ("ours: prompt lookup", "transformers: prompt lookup"),
    ]
    assert found["same_draft"][1]["ratios"] == [2.0, 0.5, 2.0]


def test_all_sides_give_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_target(tmp_path / "target")
    questions = [(number, f"c{number}", [f"w{5 + number} w6 w7"]) for number in range(3)]
    keys = ("question_id", "category", "turns")
    write_lines(tmp_path / "q.jsonl", [dict(zip(keys, question, strict=True)) for question in questions])
    asked = {"questions": str(tmp_path / "q.jsonl"), "max_new_tokens": 8}
    trees = [{"name": "chain"}, {"name": "tree", "tree": "best_first", "nodes": 4, "branch": 2}]
    trees.append({"name": "adaptive", "tree": "adaptive", "nodes": 4, "branch": 2})
    monkeypatch.setattr("draftsmith.eval.bench.costs.TIMED_FORWARDS", 2)  # no time is asserted
    told: dict[str, bool] = {}
    our_side = script.our_side

    def noted_side(session: Any, method: Any, *rest: Any) -> Any:
        told[method.name] = asking(method) is None
        return our_side(session, method, *rest)

    monkeypatch.setattr(script, "our_side", noted_side)
    draft = recipe_in(tmp_path, "draft", drafter={"kind": "draft_model", "options": {"num_layers": 1}}, eval=asked)
    ours = tiny_run(tmp_path, "ours", eval={**asked, "methods": trees})
    train_drafter(ours)
    figures = figures_of(
        script, tmp_path, monkeypatch, recipe_file(draft), "--ours", recipe_file(ours),
        "--prompts", "3", "--new-tokens", "8", "--runs", "1",
    )  # fmt: skip
    assert (figures["prompts"], figures["draft_model_trained"]) == (3, False)
    assert list(figures["sides"]) == [
        "transformers: generate", "transformers: assisted generation", "transformers: assisted generation, defaults",
        "transformers: prompt lookup", "ours: autoregressive", "ours: speculative sampling", "ours: prompt lookup",
        "ours: chain", "ours: tree", "ours: adaptive",
    ]  # fmt: skip
    assert {side["different_answers"] for side in figures["sides"].values()} == {0}
    assert figures["sides"]["ours: tree"]["tau"] >= 1
    assert told["adaptive"]  # knows what its rounds cost before it is timed
    assert figures["best"]["ours"] in ("ours: chain", "ours: tree", "ours: adaptive")
    assert len(figures["same_draft"]) == 3


def test_a_wrong_answer_ends_with_exit_code_1() -> None:
    """The second side gives another token in one of two prompts."""
    right: script.Side = lambda prompt: ([prompt[0], 1], 1.0, [])  # noqa: E731
    wrong: script.Side = lambda prompt: ([7, 1], 0.5, [2])  # noqa: E731
    ties: list[tuple[int, list[int], list[int]]] = []

    def is_tie(*answers: object) -> bool:
        ties.append(answers)  # type: ignore[arg-type]
        return False

    found = script.take_turns({script.BASELINE: right, "ours: x": wrong}, [[7], [8]], 2, is_tie)
    assert ties == [(1, [8, 1], [7, 1])]
    assert found["ours: x"] == {
        "tokens_per_s": 4.0, "tokens_per_s_of_runs": [4.0, 4.0], "tau": 2.0, "different_answers": 1,
        "numerical_ties": 0,
    }  # fmt: skip
    assert (found[script.BASELINE]["tokens_per_s"], found[script.BASELINE]["different_answers"]) == (2.0, 0)
