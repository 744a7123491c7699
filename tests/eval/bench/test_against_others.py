"""The comparison with transformers and llama.cpp: what it concludes, that both sides give the same answers, and how a
`llama-server` is started, asked and ended: one without a model."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import llamacpp
from support.benchmark_scripts import benchmark, figures_of
from support.fake_llama_server import fake_llama
from support.finished_run import write_lines
from support.tiny_runs import recipe_file, recipe_in, save_target, tiny_run

from draftsmith.models.weights import sampled_hash
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetRecipe
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
    """`generate` is no speculation, our loop without a draft no drafter; ratios run by run: 30/10, 40/16, 50/25.

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
    assert found["llama_cpp"] == []  # in no dtype of it has the target's weights
    plain, best = script.conclusions(SIDES, ["ours: prompt lookup", "ours: tree"], "BF16")["llama_cpp"]
    assert plain["ratios"] == pytest.approx([3.0, 4.95, 3.96])
    assert best["ratios"] == pytest.approx([30 / 33, 2.0, 2.0])


def questions_in(folder: Path) -> str:
    """Three."""
    questions = [(number, f"c{number}", [f"w{5 + number} w6 w7"]) for number in range(3)]
    keys = ("question_id", "category", "turns")
    write_lines(folder / "q.jsonl", [dict(zip(keys, question, strict=True)) for question in questions])
    return str(folder / "q.jsonl")


def test_all_sides_give_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"questions": questions_in(tmp_path), "max_new_tokens": 8}
    trees = [{"name": "chain"}, {"name": "tree", "tree": "best_first", "nodes": 4, "branch": 2}]
    trees.append({"name": "adaptive", "tree": "adaptive", "nodes": 4, "branch": 2})
    monkeypatch.setattr("draftsmith.eval.bench.costs.TIMED_FORWARDS", 2)  # no time is asserted
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
        "ours: chain", "ours: tree", "ours: adaptive",
    ]  # fmt: skip
    assert {side["different_answers"] for side in figures["sides"].values()} == {0}
    assert figures["sides"]["ours: tree"]["tau"] >= 1
    assert figures["best"]["ours"] in ("ours: chain", "ours: tree", "ours: adaptive")
    assert len(figures["same_draft"]) == 3
    assert figures["llama_cpp"] == []
    assert "no llama.cpp: the target is no GGUF file (target.gguf_file)" in capsys.readouterr().out


def gguf_target(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A file that nobody can read, and in the cache what it has been converted to."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(folder / "cache"))
    (folder / "weights").mkdir()
    file = folder / "weights" / "tiny.gguf"
    file.write_text("GGUF")
    save_target(folder / "cache" / "gguf" / f"tiny-{sampled_hash([file])}-float32")
    return {"model": str(file.parent), "gguf_file": file.name}


def test_beside_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe whose drafter was not trained; no `--ours`. The server says 4 ms for each token after the first."""
    target = gguf_target(tmp_path, monkeypatch)
    recipe = recipe_in(tmp_path, "plain", target=target, eval={"questions": questions_in(tmp_path)})
    server = fake_llama(tmp_path / "bin")
    figures = figures_of(
        script, tmp_path, monkeypatch, recipe_file(recipe), "--llama-server", str(server),
        "--prompts", "3", "--new-tokens", "8", "--runs", "2",
    )  # fmt: skip
    sides = figures["sides"]
    for dtype in ("F32", "BF16", "Q8_0", "Q4_0"):
        found = sides[f"llama.cpp: {dtype}"]
        assert found["decode_tokens_per_s"] == pytest.approx(7 / 0.028)
        same = dtype in ("F32", "BF16")
        assert found["model"] == (script.SAME_WEIGHTS if same else script.OTHER_MODEL)
        assert (found["different_answers"], found["numerical_ties"]) == (3 if same else None, None)
    assert sides["transformers: generate"]["decode_tokens_per_s"] is None
    assert [pair["theirs"] for pair in figures["llama_cpp"]] == ["llama.cpp: F32"] * 2
    said = capsys.readouterr().out
    assert f"no assisted generation: recipe plain has no trained draft_model drafter in {tmp_path}" in said

    started, asked = calls(server)
    assert [words[2].rpartition("-")[2] for words in started] == ["F32.gguf", "BF16.gguf", "Q8_0.gguf", "Q4_0.gguf"]
    for words in started:
        assert words[3:10] == ["-t", str(torch.get_num_threads()), "-c", "2048", "-np", "1", "--port"]
        with pytest.raises(ProcessLookupError):  # it was ended and waited for
            os.kill(words[0], 0)
    assert len(asked) == 4 * 3 * 3  # dtypes, prompts, runs and the one that warms up
    assert len({tuple(each["prompt"]) for each in asked}) == 3
    assert all(len({str(each) for each in asked[first : first + 4]}) == 1 for first in range(0, 36, 4))  # in turns
    assert (asked[0]["n_predict"], asked[0]["temperature"], asked[0]["cache_prompt"]) == (8, 0, False)


def calls(server: Path) -> tuple[list[Any], list[Any]]:
    """Of a fake server: its process id and what it was started with, each time, and what it was asked."""
    lines = [json.loads(line) for line in server.with_name("calls.jsonl").read_text().splitlines()]
    return [line for line in lines if isinstance(line, list)], [line for line in lines if isinstance(line, dict)]


def test_a_server_that_does_not_start_or_answer(tmp_path: Path) -> None:
    server = fake_llama(tmp_path / "bin")
    with llamacpp.llama_server(server, tmp_path / "x.gguf", 1, 3000) as served:
        assert served([4, 5], 3) == ([6, 7, 8], 0.008)
        with pytest.raises(UserError, match=r"llama-server says 400: .*unlucky"):
            served([13], 3)
        ((pid, *words),) = calls(server)[0]
        assert words[words.index("-c") + 1] == "3000"
        os.kill(pid, 9)
        with pytest.raises(UserError, match="llama-server does not answer"):
            served([4, 5], 3)
    server.with_name("dies").touch()
    refused = pytest.raises(UserError, match="ended with exit code 3; the last line of its log: error: no such tensor")
    with refused, llamacpp.llama_server(server, tmp_path / "x.gguf", 1, 1):
        pass


def test_where_a_server_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The named one, one of PATH, what was built; and none, which is said."""
    named, on_path, built = (fake_llama(tmp_path / name) for name in ("named", "path", "built"))
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr(llamacpp, "BUILT", built.parent)
    assert (llamacpp.find_server(named), llamacpp.find_server(None)) == (named, on_path)
    on_path.unlink()
    assert llamacpp.find_server(None) == built
    built.unlink()
    recipe = TargetRecipe(model=str(tmp_path), gguf_file="tiny.gguf")
    assert llamacpp.programs_and_files(recipe, torch.device("cpu"), None)[1] == {}
    assert llamacpp.programs_and_files(recipe, torch.device("cuda"), named)[1] == {}
    said = capsys.readouterr().out
    assert "there is no llama-server, which `make llamacpp-env` builds" in said
    assert "it runs on the CPU, the target on cuda" in said
    with pytest.raises(UserError, match=r"option --llama-server: .* is no program"):
        llamacpp.find_server(tmp_path)


def test_a_wrong_answer_is_counted_by_hand() -> None:
    """The other sides give another token in one of two prompts, and two tokens in half a second each. After the first
    there is one token an answer, in a quarter of a second: 4 tokens/s."""

    def right(prompt: list[int]) -> Any:
        return script.Answer([prompt[0], 1], 1.0)

    def wrong(prompt: list[int]) -> Any:
        return script.Answer([7, 1], 0.5, 0.25, [2])

    ties: list[tuple[int, list[int], list[int]]] = []

    def is_tie(*answers: object) -> bool:
        ties.append(answers)  # type: ignore[arg-type]
        return False

    sides = {
        script.BASELINE: script.Side(right),
        "ours: x": script.Side(wrong),
        "llama.cpp: F32": script.Side(wrong, script.SAME_WEIGHTS),
        "llama.cpp: Q8_0": script.Side(wrong, script.OTHER_MODEL),
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
