"""`draftsmith bench --engine vllm|sglang` against servers whose answers are known, and what it says of wrong input."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.finished_run import write_questions
from support.streaming_server import ANSWER, StreamingServer
from support.tiny_runs import recipe_file, recipe_in, save_target
from typer.testing import CliRunner

from draftsmith.cli.console import console
from draftsmith.cli.engine_bench import ServingOptions
from draftsmith.cli.main import app
from draftsmith.data.sources.questions import Question

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
    assert "Greedy, with drafter, concurrency 1: 3 of 3 answers equal those without drafting." in found["notes"]
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
    assert "question 1/0 differs at token 2: NOT A TIE" in result.output


def test_one_server_shared_with_other_clients(recipe: str, servers: list[StreamingServer]) -> None:
    servers[0].others = 5
    assert measure(recipe, "1", servers[0]).exit_code == 0
    name = f"{servers[0].engine}-server-answers.jsonl"
    text = (Path(recipe).parent / "runs" / "run" / "eval" / name).read_text()
    answers = [json.loads(line) for line in text.splitlines()]
    assert [answer["ids"] for answer in answers] == [ANSWERED] * 3
    assert [(answer["question_id"], answer["turn"]) for answer in answers] == [(1, 0), (2, 0), (2, 1)]
    notes = figures(recipe, servers[0])["notes"]
    assert notes[0] == "Without --plain-server no speedup is computed and greedy answers are not compared."
    assert any("the engine counted 36 generated tokens, our answers have 21" in note for note in notes)


def test_server_with_the_wrong_drafting_is_refused(recipe: str, servers: list[StreamingServer]) -> None:
    drafting, plain = servers
    for given, sentence in (
        ((plain, plain), "does not draft: start it with the command that `draftsmith export` prints"),
        ((drafting, drafting), "drafts: give a server of the target without drafter"),
    ):
        result = measure(recipe, "1", *given)
        assert result.exit_code == 2
        assert sentence in result.stderr


def test_questions_spread_over_the_set() -> None:
    questions = [Question(number, "all", ("w5",)) for number in range(20)]
    some = ServingOptions(questions_per_request=1)
    assert [question.question_id for question in some.choose(questions, 4)] == [0, 2, 5, 7, 10, 12, 15, 17]
    assert [len(some.choose(questions, concurrency)) for concurrency in (1, 16, 64)] == [8, 16, 20]
    assert ServingOptions().choose(questions, 1) == questions
