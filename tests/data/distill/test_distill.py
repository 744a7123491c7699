"""Self-distillation: the regenerated history, resume (invariant 7), answers cut short, and every error."""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
from support import tiny_tokenizers as templates
from support.chat_families import FAMILIES, TOOL_FAMILIES
from support.tiny_tokenizers import tiny_tokenizer

from draftsmith.data.distill import distill as distill_module
from draftsmith.data.distill.distill import DistillReport, distill
from draftsmith.data.distill.ledger import LedgerView
from draftsmith.data.distill.limits import TargetLimits
from draftsmith.data.distill.settings import distill_settings
from draftsmith.data.distill.token_dataset import TokenReport, build_token_dataset
from draftsmith.data.engines.engine import Completion, Failure, Outcome, Request
from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.tokens.rows import tokenize_rows
from draftsmith.errors import UserError
from draftsmith.files import write_json
from draftsmith.models.target.loading import freeze_date
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import TEMPLATE_DATE, RunFolder, run_lock
from draftsmith.recipes.schema import Recipe

QUESTIONS = [["one", "two", "three"], ["alone"], ["first", "second"], ["q4"], ["q5", "q6"], ["q7"], ["q8"]]


def write_source(file: Path, questions: list[list[str]] = QUESTIONS) -> None:
    with file.open("w") as stream:
        for asked in questions:
            turns = [t for q in asked for t in ({"from": "human", "value": q}, {"from": "gpt", "value": "old " + q})]
            stream.write(json.dumps({"conversations": turns}) + "\n")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_source(tmp_path / "chats.jsonl")
    return tmp_path / "chats.jsonl"


def make_recipe(source: Path, **distill_keys: Any) -> Recipe:
    data = {"conversations": {"source": str(source)}, "distill": distill_keys, "max_length_tokens": 512}
    return Recipe.model_validate({"name": "test", "data": data})


class HashEngine:
    """Answers with a hash of its prompt, so an answer proves which history it was given."""

    max_length_tokens: int | None = None
    answers_per_call = 2

    def __init__(self, tokenizer: Any, concurrency: int = 3, fail_at_call: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.concurrency = concurrency
        self.fail_at_call = fail_at_call
        self.in_flight: list[Request] = []
        self.calls: list[list[str]] = []
        self.seeds: list[int] = []

    def answer(self, prompt: str) -> str:
        return "h" + hashlib.sha256(prompt.encode()).hexdigest()[:6]

    def submit(self, request: Request) -> None:
        assert request.key not in {other.key for other in self.in_flight}
        self.in_flight.append(request)
        self.seeds.append(request.seed)
        assert len(self.in_flight) <= self.concurrency

    def collect(self) -> list[tuple[str, Outcome]]:
        if len(self.calls) == self.fail_at_call:
            raise KeyboardInterrupt
        # The newest first: an engine may answer in any order.
        count = self.answers_per_call
        batch, self.in_flight = self.in_flight[-count:], self.in_flight[:-count]
        self.calls.append([self.tokenizer.decode(request.prompt_ids) for request in batch])
        return [(r.key, self.complete(text)) for r, text in zip(batch, self.calls[-1], strict=True)]

    def complete(self, prompt: str) -> Outcome:
        ids = self.tokenizer(self.answer(prompt) + "<|im_end|>")["input_ids"]
        return Completion(ids, "stop")

    def close(self) -> None:
        self.in_flight = []


class CutEngine(HashEngine):
    """Leaves its answers to `cut_questions` unfinished."""

    cut_questions = ("two", "alone")

    def complete(self, prompt: str) -> Outcome:
        if any(f"{question}<|im_end|>\n<|im_start|>assistant" in prompt for question in self.cut_questions):
            return Completion(self.tokenizer("and so on")["input_ids"], "length")
        return super().complete(prompt)


def run_folder(recipe: Recipe, data: Path) -> RunFolder:
    folder = RunFolder(recipe)
    folder.data = data
    return folder


def run(recipe: Recipe, data: Path, engine: Any, **options: Any) -> DistillReport:
    with mock.patch.object(distill_module, "open_engine", return_value=closing(engine)):
        return distill(recipe, engine.tokenizer, run_folder(recipe, data), **options)


def read_distilled(data: Path) -> Iterator[Conversation]:
    return LedgerView(data).distilled()


def load_answered(data: Path) -> dict[str, Conversation]:
    """Return the conversations that have answers, by their first questions."""
    return {found.turns[0].content: found for found in read_distilled(data)}


def records_and_failures(data: Path) -> tuple[list[Any], Counter[str]]:
    view = LedgerView(data)
    return list(view.records()), view.failed


def test_every_turn_is_regenerated_with_the_regenerated_history(source: Path, tmp_path: Path) -> None:
    engine = HashEngine(tiny_tokenizer(templates.CHATML))
    report = run(make_recipe(source), tmp_path / "out", engine)
    assert (report.kept, report.answers) == (7, 11)
    turns = load_answered(tmp_path / "out")["one"].turns
    prompt = ""
    for question, answer in zip(turns[0::2], turns[1::2], strict=True):
        prompt += f"<|im_start|>user\n{question.content}<|im_end|>\n<|im_start|>assistant\n"
        assert answer.content == engine.answer(prompt)
        prompt += f"{answer.content}<|im_end|>\n"
    assert [turn.content for turn in turns[0::2]] == ["one", "two", "three"]
    assert not any("old" in text for call in engine.calls for text in call)
    assert len(set(engine.seeds)) == 11
    assert all(0 <= seed < 1 << 63 for seed in engine.seeds)


@pytest.mark.parametrize("fail_at_call", [1, 3])
def test_resumed_equals_uninterrupted(source: Path, tmp_path: Path, fail_at_call: int) -> None:
    tokenizer = tiny_tokenizer(templates.CHATML)
    recipe = make_recipe(source)
    run(recipe, tmp_path / "whole", CutEngine(tokenizer))
    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "parts", CutEngine(tokenizer, fail_at_call=fail_at_call))
    report = run(recipe, tmp_path / "parts", CutEngine(tokenizer, concurrency=2))
    assert records_and_failures(tmp_path / "parts") == records_and_failures(tmp_path / "whole")
    assert (report.failed + report.failed_before).total() == 1
    assert report.already_done + report.kept == len(QUESTIONS) - 1
    again = CutEngine(tokenizer)
    assert run(recipe, tmp_path / "parts", again).already_done == len(QUESTIONS) - 1
    assert again.calls == []


def test_no_answer_is_requested_twice(source: Path, tmp_path: Path) -> None:
    """Interrupted after every call: the ledger holds the answers of unfinished conversations."""
    tokenizer = tiny_tokenizer(templates.CHATML)
    asked: list[str] = []
    for _ in range(20):
        engine = HashEngine(tokenizer, fail_at_call=1)
        with contextlib.suppress(KeyboardInterrupt):
            run(make_recipe(source), tmp_path / "out", engine)
        asked += [prompt for call in engine.calls for prompt in call]
    assert len(load_answered(tmp_path / "out")) == len(QUESTIONS)
    assert len(asked) == len(set(asked)) == 11


def test_failures_are_recorded_and_retried_on_demand(source: Path, tmp_path: Path) -> None:
    """A conversation whose second turn fails keeps its first answer for the next try."""
    tokenizer = tiny_tokenizer(templates.CHATML)

    class Failing(HashEngine):
        def complete(self, prompt: str) -> Outcome:
            failing = "two<|im_end|>" in prompt or "alone<|im_end|>" in prompt
            return Failure("HTTP 400: no") if failing else super().complete(prompt)

    run(make_recipe(source), tmp_path / "whole", HashEngine(tokenizer))
    report = run(make_recipe(source), tmp_path / "out", Failing(tokenizer))
    assert dict(report.failed) == {"HTTP 400: no": 2}
    assert "--retry-failed" in report.sentence()
    assert LedgerView(tmp_path / "out").failed == {"HTTP 400: no": 2}
    engine = HashEngine(tokenizer)
    report = run(make_recipe(source), tmp_path / "out", engine)
    assert (report.already_done, report.failed_before, report.failed) == (5, {"HTTP 400: no": 2}, {})
    assert report.sentence().startswith(
        "5 were distilled before\nleft out before: 2 (HTTP 400: no); `draftsmith distill --"
    )
    assert engine.calls == []
    report = run(make_recipe(source), tmp_path / "out", engine, retry_failed=True)
    assert (report.retried, report.kept, report.answers, report.failed_before) == (2, 2, 3, {})
    assert list(LedgerView(tmp_path / "out").records()) == list(LedgerView(tmp_path / "whole").records())


def test_cut_answers_are_dropped(source: Path, tmp_path: Path) -> None:
    """A cut first answer drops the conversation; a later one ends it before the question of that answer."""
    recipe = make_recipe(source, cut_answers="drop")
    report = run(recipe, tmp_path / "out", CutEngine(tiny_tokenizer(templates.CHATML)))
    assert report.answers_cut_short == 2
    assert dict(report.failed) == {"answer cut short by max_new_tokens": 1}
    assert dict(report.shortened) == {"answer cut short by max_new_tokens": 1}
    by_question = load_answered(tmp_path / "out")
    assert "alone" not in by_question
    assert [turn.role for turn in by_question["one"].turns] == ["user", "assistant"]
    cut = "left out: 1 (answer cut short by max_new_tokens)"
    assert cut in report.sentence()
    assert "; raise data.distill.max_new_tokens" in report.sentence()
    report.kept = 99  # one in a hundred needs no advice
    assert cut in report.sentence()
    assert "raise" not in report.sentence()


def test_many_cut_answers_stop_distillation(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of eleven are below the limit of a fifth and above that of a sixth, which the second one exceeds."""
    engine = CutEngine(tiny_tokenizer(templates.CHATML))
    monkeypatch.setattr(distill_module, "CUT_AT_FIRST", 11)
    assert run(make_recipe(source), tmp_path / "few", engine).answers_cut_short == 2
    monkeypatch.setattr(distill_module, "MOST_CUT_FRAC", 1 / 6)
    all_at_once = CutEngine(engine.tokenizer, concurrency=7)
    all_at_once.answers_per_call = 7
    with pytest.raises(
        UserError, match=r"2 of the first 8 .* cut at 512 tokens.*; then delete \S+/many or give this"
    ) as e:
        run(make_recipe(source), tmp_path / "many", all_at_once)
    # Those that came after the second cut one, in the same call, are stored too.
    assert set(load_answered(tmp_path / "many")) == {"one", "first", "q4", "q5", "q7", "q8"}
    assert "enable_thinking: false" in str(e.value)
    run(make_recipe(source, cut_answers="keep"), tmp_path / "kept", engine)


def test_cut_answers_are_kept(source: Path, tmp_path: Path) -> None:
    """The answer carries loss up to the cut; no end token and no later turn follows."""
    tokenizer = tiny_tokenizer(templates.CHATML)
    report = run(make_recipe(source, cut_answers="keep"), tmp_path / "out", CutEngine(tokenizer))
    assert report.answers_cut_short == 2
    assert not report.failed
    assert dict(report.shortened) == {"answer cut short by max_new_tokens": 2}
    answer_ids = tokenizer("and so on")["input_ids"]
    cut = {d.turns[-2].content: d for d in read_distilled(tmp_path / "out") if d.shortened}
    assert set(cut) == set(CutEngine.cut_questions)
    for distilled in cut.values():
        tokens = tokenize_rows(tokenizer, distilled, 512)[0][-1]
        assert tokens.input_ids[-len(answer_ids) :] == answer_ids
        assert tokens.loss_mask[-len(answer_ids) :] == [1] * len(answer_ids)


def test_no_request_is_sent_if_a_started_training_needs_the_old_rows(source: Path, tmp_path: Path) -> None:
    """A higher limit is refused before any answer is requested; with the old limit the run continues."""
    few, all_of_them = make_recipe(source), make_recipe(source)
    few.data.conversations.limit = 3
    engine = HashEngine(tiny_tokenizer(templates.CHATML))
    run(few, tmp_path / "run" / "data", engine)
    (tmp_path / "run" / "drafter").mkdir()
    (tmp_path / "run" / "drafter" / "settings.json").touch()
    engine.calls.clear()
    with pytest.raises(UserError, match="holds an unfinished training"):
        run(all_of_them, tmp_path / "run" / "data", engine)
    assert engine.calls == []
    assert run(few, tmp_path / "run" / "data", engine).already_done == 3


def test_answers_that_the_template_does_not_write_whole_fail(source: Path, tmp_path: Path) -> None:
    """A server's text with two ends of thoughts, of which Qwen3's template writes the last part."""
    engine = HashEngine(FAMILIES["Qwen3"].tokenizer())
    engine.complete = lambda prompt: Completion(None, "stop", "a</think>b</think>c")  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"gave an answer to train on: 7 \(rewritten by the chat template\)"):
        run(make_recipe(source), tmp_path / "out", engine)
    engine.complete = lambda prompt: Completion(  # type: ignore[method-assign]
        None, "stop", "a</think>b</think>c" if "three<|im_end|>" in prompt else "fine"
    )
    report = run(make_recipe(source), tmp_path / "last", engine)
    assert (report.kept, report.shortened) == (7, {"rewritten by the chat template": 1})
    assert len(load_answered(tmp_path / "last")["one"].turns) == 4  # the answers before the one that is rewritten


def test_thoughts_and_weights_of_given_answers_are_kept(tmp_path: Path) -> None:
    """From the file to the rows: thoughts carry loss, answers of weight 0 do not."""
    asked = {"role": "user", "content": "Say hi"}
    answers = [
        {"role": "assistant", "content": "Hello", "weight": 0},
        {"role": "assistant", "content": "Bye", "reasoning_content": "one"},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [asked, answers[0], asked, answers[1]]}))
    recipe, tokenizer = make_recipe(tmp_path / "a.jsonl", engine="none"), FAMILIES["Qwen3"].tokenizer()
    distill(recipe, tokenizer, run_folder(recipe, tmp_path / "out"))
    (made,) = read_distilled(tmp_path / "out")
    assert [turn.weight for turn in made.turns] == [1, 0, 1, 1]
    ((row,), _) = tokenize_rows(tokenizer, made, 1000)
    assert [tokenizer.decode(answer) for answer in row.answers()] == ["<think>\none\n</think>\n\nBye<|im_end|>"]


def learned(recipe: Recipe, tokenizer: Any, folder: RunFolder) -> tuple[list[str], TokenReport]:
    """Distil as `draftsmith distill` does; return the answers to learn."""
    report = build_token_dataset(recipe, tokenizer, folder, distill(recipe, tokenizer, folder).ids)
    rows = datasets.load_from_disk(report.path)
    pairs = (zip(row["input_ids"], row["loss_mask"], strict=True) for row in rows)
    return sorted(tokenizer.decode([token_id for token_id, loss in pair if loss]) for pair in pairs), report


def test_rows_are_those_of_the_sources_as_they_are_now(tmp_path: Path) -> None:
    """With given answers: one corrected, one added before another to the same prompt, a lower limit."""
    file, tokenizer = tmp_path / "a.jsonl", tiny_tokenizer(templates.CHATML)
    recipe = make_recipe(file, engine="none")
    folder = run_folder(recipe, tmp_path / "out")
    for answers, left_out in ((["wrong"], 0), (["right"], 1), (["other", "right"], 1), (["other"], 2)):
        file.write_text("".join(json.dumps({"prompt": "one", "response": answer}) + "\n" for answer in answers))
        found, report = learned(recipe, tokenizer, folder)
        assert found == sorted(answer + "<|im_end|>" for answer in answers)
        assert report.not_in_recipe == left_out
        assert ("stored conversations are not in the recipe" in report.sentence()) == (left_out > 0)


@pytest.mark.parametrize("engine", ["transformers", "none"])
def test_processes_of_a_launch_share_the_conversations(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first holds the lock for all; both together give what one alone gives, which the last one sees."""
    recipe, tokenizer = make_recipe(source, engine=engine), tiny_tokenizer(templates.CHATML)
    run(recipe, tmp_path / "whole", HashEngine(tokenizer))
    monkeypatch.setenv("WORLD_SIZE", "2")
    reports = []
    for number in ("1", "0"):
        monkeypatch.setenv("RANK", number)
        reports.append(run(recipe, tmp_path / "out", HashEngine(tokenizer)))
    assert [(report.kept, report.left) for report in reports] == [(3, 4), (4, 0)]
    assert "4 conversations are left to the other processes" in reports[0].sentence()
    said = capfd.readouterr().err
    assert all(f"process {n} of 2 answers {share} of 7 conversations\n" in said for n, share in ((2, 3), (1, 4)))
    assert records_and_failures(tmp_path / "out") == records_and_failures(tmp_path / "whole")
    with run_lock(tmp_path / "out", "distill"), pytest.raises(UserError, match="out is in use by `draftsmith distill`"):
        run(recipe, tmp_path / "out", HashEngine(tokenizer))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=1", "seed = 0, now it is 1"),
        ("target.model=other/model", "target.model = 'embedded', now it is 'other/model'"),
        ("target.quantization=nf4", "target.quantization = None, now it is 'nf4'"),
        ("data.distill.temperature=0.5", "data.distill.temperature"),
        ("data.conversations.split=all", "data.conversations.split = 'train'"),
        ("data.conversations.decontaminate=[]", "data.conversations.decontaminate (hashes of the question files)"),
        ("data.reasoning_tokens=[<a>, </a>]", "data.reasoning_tokens = None, now it is ['<a>', '</a>']"),
    ],
)
def test_changed_settings_are_refused_in_the_same_folder(source: Path, tmp_path: Path, override: str, key: str) -> None:
    engine, recipe = HashEngine(tiny_tokenizer(templates.CHATML)), make_recipe(source)
    run(recipe, tmp_path / "out", engine)
    engine.calls.clear()
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe.model_dump(mode="json")))
    changed = load_recipe(str(tmp_path / "recipe.yaml"), [override])
    with pytest.raises(UserError) as caught:
        run(changed, tmp_path / "out", engine)
    assert f"was started with {key}" in str(caught.value)
    assert "restore the key, give the recipe another `name`, or delete that folder to distil again" in str(caught.value)
    assert engine.calls == []


def test_settings_are_fixed_by_the_first_stored_answer(source: Path, tmp_path: Path) -> None:
    """An engine that does not start or always fails fixes none; one answer does, also of an unfinished conversation."""
    out, file = tmp_path / "out", tmp_path / "out" / "distill_settings.json"
    first, second = make_recipe(source), make_recipe(source, temperature=0.5)
    tokenizer = tiny_tokenizer(templates.CHATML)
    failing = HashEngine(tokenizer)
    failing.complete = lambda prompt: Failure("HTTP 400")  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"none of the 7 conversations .* 7 \(HTTP 400\); change the recipe and run it"):
        run(first, out, failing)
    with pytest.raises(KeyboardInterrupt):
        run(first, out, HashEngine(tokenizer, fail_at_call=0))
    assert not file.exists()
    write_json(file, distill_settings(first, None, tokenizer))
    with pytest.raises(KeyboardInterrupt):
        run(second, out, HashEngine(tokenizer, concurrency=1, fail_at_call=1))
    with pytest.raises(UserError, match=r"started with data\.distill\.temperature = 0\.5, now it is 0\.0"):
        run(first, out, HashEngine(tokenizer))
    assert run(second, out, HashEngine(tokenizer)).failed == {}
    assert len(load_answered(out)) == 7
    assert records_and_failures(out)[1] == {}


def test_call_without_new_answers_leaves_the_settings(source: Path, tmp_path: Path) -> None:
    """A smaller length, refused later for a training that was started, does not shut out the original settings."""
    tokenizer, out = tiny_tokenizer(templates.CHATML), tmp_path / "run" / "data"
    recipe = make_recipe(source)
    run(recipe, out, HashEngine(tokenizer))
    fixed = (out / "distill_settings.json").read_text()
    shorter = recipe.model_copy(deep=True)
    shorter.data.max_length_tokens = 300
    assert run(shorter, out, HashEngine(tokenizer)).kept == 0
    assert (out / "distill_settings.json").read_text() == fixed
    write_source(source, [*QUESTIONS, ["q9"]])
    assert run(shorter, out, HashEngine(tokenizer)).kept == 1  # shortened by the smaller length from now on
    with pytest.raises(UserError, match=r"data\.max_length_tokens = 300, now it is 512"):
        run(recipe, out, HashEngine(tokenizer))


OUTSIDE = "<|tool|>"


def test_token_ids_beyond_the_embedding(tmp_path: Path) -> None:
    """They are reported before the engine is opened, or left out and counted; with engine none also in answers."""
    write_source(tmp_path / "a.jsonl", [["one"], [f"use {OUTSIDE} now"]])
    tokenizer = tiny_tokenizer(templates.CHATML)
    tokenizer.add_special_tokens({"extra_special_tokens": [OUTSIDE]})
    size = tokenizer.convert_tokens_to_ids(OUTSIDE)
    engine, limits = HashEngine(tokenizer), TargetLimits(size)
    recipe, out = make_recipe(tmp_path / "a.jsonl"), tmp_path / "out"
    sentence = rf"holds <\|tool\|> \(id {size}\), and the target's embedding has {size} rows: use the tokenizer"
    with pytest.raises(UserError, match=sentence):
        run(recipe, out, engine, limits=limits)
    assert engine.calls == []
    recipe.data.conversations.skip_invalid = True
    report = run(recipe, out, engine, limits=limits)
    assert (report.kept, report.sources.total.kept) == (1, 1)
    assert report.sources.total.invalid == {"tokens beyond the target's embedding": 1}
    write_source(tmp_path / "a.jsonl", [[f"use {OUTSIDE}"]])
    with pytest.raises(UserError, match="every conversation holds tokens beyond the target's embedding"):
        run(recipe, tmp_path / "all", engine, limits=limits)
    answered = [{"from": "human", "value": "q"}, {"from": "gpt", "value": OUTSIDE}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"conversations": answered}))
    given = make_recipe(tmp_path / "a.jsonl", engine="none")
    with pytest.raises(UserError, match=sentence):
        distill(given, tokenizer, run_folder(given, tmp_path / "none"), limits=limits)
    run(make_recipe(tmp_path / "a.jsonl"), tmp_path / "again", engine, limits=limits)  # the target's answers differ
    with pytest.raises(UserError, match=r"chat template writes <\|im_start\|> \(id \d+\), and the target's embedding"):
        run(recipe, tmp_path / "own", engine, limits=TargetLimits(1))


CALL = '<tool_call>\n{"name": "%s", "arguments": {"city": "Bern"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("sky", "sea")]


class CallingEngine(HashEngine):
    """Answers with the given texts in order, then with hashes."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        super().__init__(tokenizer)
        self.texts = list(texts)

    def answer(self, prompt: str) -> str:
        return self.texts.pop(0) if self.texts else super().answer(prompt)


def tool_calls_message(*names: str) -> dict[str, Any]:
    calls = [{"id": f"id{name}", "function": {"name": name, "arguments": '{"city": "Rome"}'}} for name in names]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def tool_result(name: str) -> dict[str, Any]:
    return {"role": "tool", "content": f"{name} is blue", "tool_call_id": f"id{name}"}


def chat_message(text: str, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": text}


def run_tools(tmp_path: Path, *texts: str, messages: list[dict[str, Any]]) -> tuple[DistillReport, Conversation, Any]:
    file = tmp_path / "tools.jsonl"
    file.write_text(json.dumps({"messages": messages, "tools": TOOLS}))
    engine = CallingEngine(TOOL_FAMILIES["Qwen2.5"].tokenizer(), *texts)
    report = run(make_recipe(file), tmp_path / "out", engine)
    (found,) = read_distilled(tmp_path / "out")
    return report, found, engine


ASKED = [
    chat_message("Blue?", "user"),
    tool_calls_message("sky", "sea"),
    tool_result("sky"),
    tool_result("sea"),
    chat_message("Yes."),
    chat_message("Bye", "user"),
]


def test_target_that_calls_the_same_tools_gets_their_results(tmp_path: Path) -> None:
    _, found, engine = run_tools(tmp_path, f"Let me see.\n{CALL % 'sky'}\n{CALL % 'sea'}", messages=ASKED)
    roles = [turn.role for turn in found.turns]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user", "assistant"]
    call = found.turns[1]
    assert (call.content, call.called) == ("Let me see.", ["sky", "sea"])
    assert [each["id"] for each in call.tool_calls] == ["idsky", "idsea"]
    assert call.tool_calls[0]["function"]["arguments"] == {"city": "Bern"}  # generated by the target
    (second,) = engine.calls[1]
    assert second.startswith("<|im_start|>system\nYou help.\n\n# Tools")
    assert '"city": "Bern"' in second
    assert "Rome" not in second
    assert second.endswith(
        "user\n<tool_response>\nsky is blue\n</tool_response>\n<tool_response>\nsea is blue\n</tool_response>"
        "<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    rows, _ = tokenize_rows(engine.tokenizer, found, 4096)
    assert [row.answers() for row in rows] == [list(found.answer_ids)]  # one row, each answer with loss, as it was said
    assert found.tools == tuple(TOOLS)


def test_prompts_of_a_folder_have_one_date(source: Path, tmp_path: Path) -> None:
    """Its settings keep the date; answers of another day are refused, and old folders without a date go on."""

    def dated(day: int) -> Any:
        tokenizer = tiny_tokenizer("{{ strftime_now('%d %b') }}\n" + templates.CHATML)
        freeze_date(tokenizer, date(2026, 3, day))
        return tokenizer

    few, more = make_recipe(source), make_recipe(source)
    few.data.conversations.limit = 3
    run(few, tmp_path / "out", HashEngine(dated(1)))
    with pytest.raises(UserError, match=r"started with target.template_date = '2026-03-01', now it is '2026-03-02'"):
        run(more, tmp_path / "out", HashEngine(dated(2)))
    engine = HashEngine(dated(1))
    run(more, tmp_path / "out", engine)
    assert all(prompt.startswith("01 Mar") for call in engine.calls for prompt in call)
    made = next(iter(read_distilled(tmp_path / "out")))
    assert [engine.tokenizer.decode(ids or [])[:6] for ids in made.prompt_ids] == ["01 Mar"] * len(made.answer_ids)
    settings = tmp_path / "out" / "distill_settings.json"
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != TEMPLATE_DATE}))
    assert run(more, tmp_path / "out", HashEngine(dated(2))).already_done == len(QUESTIONS)
