"""`draftsmith bench --engine vllm|sglang` against servers whose answers are known, and what it says of wrong input."""

import importlib.util
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.finished_run import write_questions
from support.streaming_server import ANSWER, StreamingServer
from support.tiny_models import tiny_target
from support.tiny_runs import recipe_file, recipe_in, save_target, save_trained
from typer.testing import CliRunner

from draftsmith.cli import engine_bench as bench
from draftsmith.cli.console import console
from draftsmith.cli.engine_bench import read_engine_options, vllm_arguments
from draftsmith.cli.main import app
from draftsmith.data.engines.engine import EngineSetting
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.recipes.schema import Recipe

ANSWERED = list(chain.from_iterable(ANSWER))
OTHER_ANSWER = [[30], [31, 39], [33, 34], [35, 36]]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    save_target(tmp_path / "target")
    asked = write_questions(tmp_path / "questions.jsonl", [(1, "writing", ["w5 w6"]), (2, "math", ["w7", "w8"])])
    return recipe_file(recipe_in(tmp_path, eval={"questions": asked, "max_new_tokens": 7}))


@pytest.fixture(params=["vllm", "sglang"])
def servers(request: pytest.FixtureRequest) -> Iterator[list[StreamingServer]]:
    """With and without a drafter."""
    both = [StreamingServer(engine=request.param), StreamingServer(drafts=False, engine=request.param)]
    yield both
    for server in both:
        server.stop()


def call(recipe: str, *arguments: str, engine: str = "vllm") -> Result:
    console._buffer.clear()
    return CliRunner().invoke(app, ["bench", recipe, "--engine", engine, *arguments])


def measure(recipe: str, concurrency: str, server: StreamingServer, plain: StreamingServer | None = None) -> Result:
    """Measure in these servers; returns the result of the command."""
    urls = ["--server", server.url, *([] if plain is None else ["--plain-server", plain.url])]
    return call(recipe, *urls, "--concurrency", concurrency, engine=server.engine)


def figures(recipe: str, server: StreamingServer) -> dict[str, Any]:
    text = (Path(recipe).parent / "runs" / "run" / "eval" / f"{server.engine}-server.json").read_text()
    return json.loads(text)["figures"]


def test_speedup_between_two_servers(recipe: str, servers: list[StreamingServer]) -> None:
    drafting, plain = servers
    result = measure(recipe, "2,1", drafting, plain)
    assert result.exit_code == 0, (result.output, result.exception)
    found = figures(recipe, drafting)
    assert found["engine"] == {"vllm": "vLLM", "sglang": "SGLang"}[drafting.engine]
    places = [(row["arm"], row["concurrency"]) for row in found["rows"]]
    assert places == [(arm, level) for arm in ("without drafter", "with drafter") for level in (1, 2)]
    for row in found["rows"]:
        assert (row["answers"], row["tokens"], row["failures"]) == (3, 21, {})
    # Three answers of three rounds; the first of two draft tokens is accepted.
    for row in found["rows"][2:]:
        assert (row["drafts"], row["tau"], row["tau_committed"]) == (9, 2.0, 2.0)
        assert row["acceptance_by_depth"] == [1.0, 0.0]
        assert row["speedup"] > 0
    assert "Greedy, with drafter, concurrency 1: 3 of 3 answers are the same with the drafter." in found["notes"]
    # The conversation continues with the engine's answer.
    prompts = [body["prompt"] for body in plain.bodies if body["max_tokens"] == 7]
    assert [7, *ANSWERED, 8] in prompts


def test_differing_greedy_answers_are_separated_from_ties(recipe: str, servers: list[StreamingServer]) -> None:
    drafting, plain = servers
    plain.answer = OTHER_ANSWER
    result = measure(recipe, "1", drafting, plain)
    assert result.exit_code == 0, (result.output, result.exception)
    (proof,) = figures(recipe, drafting)["greedy"]
    # The second turn of question 2 had another prompt, after another answer.
    assert proof["prompts"] == 2
    keys = ("question_id", "position", "expected", "found")
    found = [tuple(each[key] for key in keys) for each in proof["divergences"]]
    assert found == [("1/0", 2, 39, 32), ("2/0", 2, 39, 32)]
    assert "question 1/0 differs at token 2: NO TIE" in result.output


def test_one_server_shared_with_other_clients(recipe: str, servers: list[StreamingServer]) -> None:
    servers[0].others = 5
    assert measure(recipe, "1", servers[0]).exit_code == 0
    name = f"{servers[0].engine}-server-answers.jsonl"
    text = (Path(recipe).parent / "runs" / "run" / "eval" / name).read_text()
    answers = [json.loads(line) for line in text.splitlines()]
    assert [answer["ids"] for answer in answers] == [ANSWERED] * 3
    assert [(answer["question_id"], answer["turn"]) for answer in answers] == [(1, 0), (2, 0), (2, 1)]
    notes = figures(recipe, servers[0])["notes"]
    assert notes[0] == "Without --plain-server there is no speedup, and greedy answers are not compared."
    assert any("the engine counted 36 generated tokens, our answers have 21" in note for note in notes)


WRONG = [
    (["--concurrency", "1,x"], "option --concurrency: give numbers above 0, separated by commas, as 1,4,16, not '1,x'"),
    (["--concurrency", "0"], "option --concurrency: give numbers above 0"),
    (["--plain-server", "http://a"], "option --plain-server needs --server"),
    (["--server", "a:8000"], "a:8000 is no URL of a server: a:8000/v1 does not begin with http:// or https://"),
    (["--server", "http://a", "--engine-options", "{a: 1}"], "is for a server that is started here"),
    (["--engine-options", "{a"], "option --engine-options: give a mapping"),
    (["--server", "http://a", "--api-key-env", "NOT_SET"], "no environment variable NOT_SET"),
    (["eval.stop=[x]"], "set eval.stop=[]"),
    (["--engine-options", "{max_length: 5}"], "unknown key `--engine-options.max_length`"),
    (
        ["--engine-options", "{data_parallel_size: 2}"],
        "data_parallel_size=2 is for distillation; one copy of the target is measured: leave it out",
    ),
    ([], "holds no trained drafter: run `draftsmith train run` first"),
    (["--engine", "sglang"], "--engine sglang needs --server, the URL of a running server: start one with the command"),
    (["--engine", "sglang", "--dtype", "f32"], "option --dtype does not apply to --engine sglang: leave it out"),
]


def test_invalid_options_are_reported(recipe: str) -> None:
    for arguments, sentence in WRONG:
        result = call(recipe, *arguments)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), (arguments, result.output, result.exception)
        assert sentence in result.stderr


def test_server_with_the_wrong_drafting_is_refused(recipe: str, servers: list[StreamingServer]) -> None:
    drafting, plain = servers
    for given, sentence in (
        ((plain, plain), "does not draft: start it with the command that `draftsmith export` prints"),
        ((drafting, drafting), "drafts: give a server of the target without a drafter"),
    ):
        result = measure(recipe, "1", *given)
        assert result.exit_code == 2
        assert sentence in result.stderr


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_missing_vllm_is_reported_with_the_way_out(recipe: str) -> None:
    drafter = load_drafter_class("eagle").from_target(tiny_target(num_hidden_layers=4), {})
    save_trained(recipe_in(Path(recipe).parent, "run"), drafter)
    result = call(recipe)
    assert result.exit_code == 2
    assert "--engine vllm needs vLLM in this environment: pip install draftsmith[vllm]" in result.stderr


def arguments(**options: Any) -> dict[str, Any]:
    recipe = Recipe.model_validate({"name": "x", "target": {"model": "a/model", "dtype": "float32"}})
    setting = EngineSetting(recipe, None, (2,))
    return vllm_arguments(read_engine_options(json.dumps(options)), setting, 300, 16)


def test_started_server_is_sized_for_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    found = arguments()
    assert (found["model"], found["dtype"]) == ("a/model", "float32")
    assert (found["max_model_len"], found["max_num_seqs"], found["enforce_eager"]) == (300, 16, True)
    assert found["kv_cache_memory_bytes"] == 4 << 30
    given = arguments(max_model_len=512, concurrency=4, enforce_eager=False, kv_cache_memory_bytes=5, llm={"a": 1})
    assert (given["max_model_len"], given["max_num_seqs"], given["enforce_eager"]) == (512, 4, False)
    assert (given["kv_cache_memory_bytes"], given["a"]) == (5, 1)
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    on_a_gpu = arguments()
    assert on_a_gpu["enforce_eager"] is False
    assert "kv_cache_memory_bytes" not in on_a_gpu
