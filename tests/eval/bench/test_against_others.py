"""The comparison with transformers and llama.cpp: its conclusions, and equal answers of all sides."""

from pathlib import Path
from typing import Any

import pytest
from support.benchmark_scripts import benchmark, figures_of
from support.finished_run import write_questions
from support.tiny_runs import recipe_file, tiny_run

from draftsmith.errors import UserError
from draftsmith.eval.serving import llama_server
from draftsmith.train.drafter.stage import train_drafter

script = benchmark("against_others")


def side(*speeds: float) -> dict[str, object]:
    return {"tokens_per_s": sorted(speeds)[len(speeds) // 2], "tokens_per_s_of_runs": list(speeds)}


SIDES = {
    "transformers: generate": side(90, 90, 90),
    "transformers: assisted generation": side(9, 9, 9),
    "transformers: prompt lookup": side(10, 16, 25),
    "llama.cpp: F32": side(1, 1, 1),
    "llama.cpp: BF16": side(33, 20, 25),
    "ours: autoregressive": side(99, 99, 99),
    "ours: prompt lookup": side(20, 8, 50),
    "ours: tree": side(30, 40, 50),
}


def test_conclusions_by_hand() -> None:
    """Ratios per run to `generate` without speculation: 30/10, 40/16, 50/25.

    Over llama.cpp in the same dtype 99/33, 99/20, 99/25 without a draft, and 30/33, 40/20, 50/25.
    """
    found = script.conclusions(SIDES, ["ours: prompt lookup", "ours: tree"], None)
    best = found["best"]
    assert (best["ours"], best["theirs"]) == ("ours: tree", "transformers: prompt lookup")
    assert (best["ratios"], best["ratio_median"]) == ([3.0, 2.5, 2.0], 2.5)
    assert [(pair["ours"], pair["theirs"]) for pair in found["same_draft"]] == [
        ("ours: autoregressive", "transformers: generate"),
        ("ours: prompt lookup", "transformers: prompt lookup"),
    ]
    assert found["llama_cpp"] == []  # has the target's weights in none of its dtypes
    plain, best = script.conclusions(SIDES, ["ours: prompt lookup", "ours: tree"], "BF16")["llama_cpp"]
    assert plain["ratios"] == pytest.approx([3.0, 4.95, 3.96])
    assert best["ratios"] == pytest.approx([30 / 33, 2.0, 2.0])


@pytest.mark.slow
def test_all_sides_give_equal_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [(number, f"c{number}", [f"w{5 + number} w6 w7"]) for number in range(3)]
    asked = {"questions": write_questions(tmp_path / "q.jsonl", questions), "max_new_tokens": 8}
    trees = [{"name": "chain"}, {"name": "tree", "tree": "best_first", "nodes": 4, "branch": 2}]
    draft = tiny_run(tmp_path, "draft", drafter={"kind": "draft_model", "options": {"num_layers": 1}}, eval=asked)
    ours = tiny_run(tmp_path, "ours", eval={**asked, "methods": trees})
    for recipe in (draft, ours):
        train_drafter(recipe)
    figures = figures_of(
        script, tmp_path, monkeypatch, recipe_file(draft), "--ours", recipe_file(ours),
        "--prompts", "3", "--new-tokens", "8", "--runs", "1",
    )  # fmt: skip
    assert (figures["prompts"], figures["draft_model_trained"]) == (3, True)
    assert list(figures["sides"]) == [
        "transformers: generate", "transformers: assisted generation", "transformers: assisted generation, defaults",
        "transformers: prompt lookup", "ours: autoregressive", "ours: speculative sampling", "ours: prompt lookup",
        "ours: chain", "ours: tree",
    ]  # fmt: skip
    assert {side["different_answers"] for side in figures["sides"].values()} == {0}
    assert figures["sides"]["ours: tree"]["tau"] >= 1
    assert figures["best"]["ours"] in ("ours: chain", "ours: tree")
    assert len(figures["same_draft"]) == 3
    assert figures["llama_cpp"] == []
    assert "no llama.cpp: the target is no GGUF file (target.gguf_file)" in capsys.readouterr().out


def test_program_that_is_not_llama_server_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"option --llama-server: .* is no program"):
        llama_server.find_server(tmp_path)


def test_wrong_answer_is_counted_by_hand() -> None:
    """The other sides differ in a token of one of two prompts, and take half a second for two tokens each.

    After its first token an answer has one more, in a quarter of a second: 4 tokens/s.
    """

    def right_answer(prompt: list[int]) -> Any:
        return script.TimedAnswer([prompt[0], 1], 1.0)

    def wrong_answer(prompt: list[int]) -> Any:
        return script.TimedAnswer([7, 1], 0.5, 0.25, [2])

    ties: list[tuple[int, list[int], list[int]]] = []

    def is_tie(*answers: object) -> bool:
        ties.append(answers)  # type: ignore[arg-type]
        return False

    sides = {
        script.BASELINE: script.Side(right_answer),
        "ours: x": script.Side(wrong_answer),
        "llama.cpp: F32": script.Side(wrong_answer, script.SAME_WEIGHTS),
        "llama.cpp: Q8_0": script.Side(wrong_answer, script.OTHER_MODEL),
    }
    found = script.take_turns(sides, [[7], [8]], 2, is_tie)
    assert ties == [(1, [8, 1], [7, 1])]
    expected = {
        "model": script.TARGET, "tokens_per_s": 4.0, "tokens_per_s_of_runs": [4.0, 4.0], "decode_tokens_per_s": 4.0,
        "tau": 2.0, "different_answers": 1, "numerical_ties": 0,
    }  # fmt: skip
    assert found["ours: x"] == expected
    assert found["llama.cpp: F32"] == expected | {"model": script.SAME_WEIGHTS, "numerical_ties": None}
    counted = {"different_answers": None, "numerical_ties": None}
    assert found["llama.cpp: Q8_0"] == expected | {"model": script.OTHER_MODEL} | counted
    baseline = found[script.BASELINE]
    assert (baseline["tokens_per_s"], baseline["different_answers"]) == (2.0, 0)
    assert (baseline["decode_tokens_per_s"], baseline["tau"]) == (None, None)
