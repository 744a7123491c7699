"""The harness: questions in, records and Spec-Bench answers out; it resumes, and compares within one process only."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.table_decoder import DepthsDecoder
from support.tiny_models import smallest_llama
from transformers import LlamaForCausalLM

from draftsmith.data.sources.questions import Question
from draftsmith.errors import UserError
from draftsmith.eval.bench import spec_bench
from draftsmith.eval.bench.measured_methods import Arm
from draftsmith.eval.bench.records import RecordLog
from draftsmith.eval.bench.spec_bench import SpecBench, write_answers
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.methods.drafter import BestFirst, Chain, TreeDrafter
from draftsmith.eval.report.summary import summarize
from draftsmith.models.sampling import Sampling

V = 40
QUESTIONS = [
    Question(1, "writing", ("ab", "cd")),
    Question(2, "math", ("abc",)),
    Question("three", "math", ("b",)),
]


class LetterTokenizer:
    """Minimal tokenizer with one token per letter; id 0 ends an answer."""

    eos_token_id = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(96 + token % 26 + 1) for token in ids if token)


def letters(_tokenizer: Any, turns: list[Any]) -> list[int]:
    return [1] + [2 + ord(letter) % 26 for turn in turns for letter in turn.role[0] + turn.content]


def drafter() -> DepthsDecoder:
    return DepthsDecoder(torch.randn(3, V, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return smallest_llama(0, V, num_hidden_layers=1, max_position_embeddings=96).float()


@pytest.fixture
def bench(target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> SpecBench:
    monkeypatch.setattr(spec_bench, "prompt_token_ids", letters)
    monkeypatch.setattr(spec_bench, "answer_end_ids", lambda *_: [0])
    return SpecBench(target, LetterTokenizer(), QUESTIONS, max_new_tokens=12, seed=3)


@pytest.fixture
def methods() -> list[Arm]:
    methods = []
    for temperature in (0.0, 1.0):
        sampling, generator = Sampling(temperature), torch.Generator()
        methods.append(Arm(Autoregressive(), sampling, torch.Generator()))
        for name, builder in (("chain", Chain()), ("tree", BestFirst(6, 3))):
            methods.append(Arm(TreeDrafter(name, drafter(), builder, sampling, generator), sampling, generator))
    return methods


def test_each_method_reads_its_own_layers(bench: SpecBench, tmp_path: Path) -> None:
    """Drafters of different kinds in one run each get the features that they require."""
    widths: dict[str, set[int]] = {"deep": set(), "plain": set()}

    def watching(name: str, layers: tuple[int, ...]) -> Arm:
        decoder: Any = drafter()
        decoder.start = decoder.observe = lambda _, features: widths[name].add(features.shape[-1])
        return Arm(TreeDrafter(name, decoder, Chain(), greedy), greedy, torch.Generator(), layers)

    greedy = Sampling()
    methods = [Arm(Autoregressive(), greedy, torch.Generator()), watching("deep", (0, 1, -1)), watching("plain", (-1,))]
    bench.run(methods, RecordLog(tmp_path / "records.jsonl"), runs=2, warmup_questions=0)
    assert widths == {"deep": {3 * 16}, "plain": {16}}


def test_harness_resumes_and_writes_records(
    bench: SpecBench, methods: list[Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RecordLog(tmp_path / "records.jsonl")
    bench.run(methods, log, runs=2, warmup_questions=1)
    records = list(log)
    assert [(record.run, record.question_id) for record in records] == [
        (run, question.question_id) for run in range(2) for question in QUESTIONS
    ]
    # 4 projections, 3 matrices of the MLP, 3 norms, the head; a step reads one row of the embedding.
    assert {record.weights_bytes for record in records} == {4 * (4 * 16 * 16 + 3 * 16 * 24 + 3 * 16 + V * 16)}
    assert all(record.weights_read_s and record.weights_read_s > 0 for record in records)
    summary = summarize(records)
    assert [row["category"] for row in summary[:3]] == ["writing", "math", "overall"]
    assert len(summary) == 6 * 3
    for row in summary:
        assert (row["lossless"], row["runs"]) == (True, 2)
        assert row["greedy_identical"] is (True if row["temperature"] == 0 else None)
        assert row["tau_without_bonus"] <= row["tau"] <= row["tau_without_bonus"] + 1
        if row["method"] == "autoregressive":
            assert (row["tau"], row["speedup_mean"], row["speedup_std"]) == (1, 1, 0)
    assert [row["method"] for row in summary if row["timing"]] == ["autoregressive", "chain", "tree"] * 2
    for turn in (turn for record in records for answer in record.answers.values() for turn in answer.turns):
        assert sum(turn.round_s) == pytest.approx(turn.draft_s + turn.verify_s + turn.choose_s + turn.commit_s)
        assert sum(turn.round_s) + turn.prefill_s <= turn.wall_time_s
    # The first method rotates. After an interruption in question three only that is repeated, with the same sample.
    lines = log.file.read_text().splitlines(keepends=True)
    log.file.write_text("".join(lines[:2]) + lines[2][:40])
    log = RecordLog(log.file)
    asked: list[str] = []
    answer_of = bench.answer
    monkeypatch.setattr(bench, "answer", lambda one, *rest: asked.append(one.key) or answer_of(one, *rest))
    bench.run(methods, log, runs=1, warmup_questions=0)
    assert asked == [measured.key for measured in (*methods[2:], *methods[:2])]
    assert log.file.read_text().splitlines(keepends=True)[:2] == lines[:2]
    for before, after in zip(records[:3], log, strict=True):
        assert {key: answer.ids for key, answer in before.answers.items()} == {
            key: answer.ids for key, answer in after.answers.items()
        }


def test_sampled_answer_does_not_depend_on_other_questions(
    bench: SpecBench, methods: list[Arm], tmp_path: Path
) -> None:
    """Every method samples the same answer in another order of questions or methods, and alone."""
    bench.run(methods, RecordLog(tmp_path / "all.jsonl"), runs=2, warmup_questions=1)
    wanted = {(r.run, r.question_id): r.answers for r in RecordLog(tmp_path / "all.jsonl")}
    assert wanted[0, 1]["chain@1"].ids != wanted[1, 1]["chain@1"].ids
    assert len({str(wanted[run, 1]["autoregressive@1"].ids) for run in (0, 1)}) == 2
    methods.reverse()
    for name, questions in (("reversed", QUESTIONS[::-1]), ("alone", QUESTIONS[2:])):
        bench.questions = questions
        log = RecordLog(tmp_path / f"{name}.jsonl")
        bench.run(methods, log, runs=2, warmup_questions=0)
        for record in log:
            for key, answer in record.answers.items():
                assert answer.ids == wanted[record.run, record.question_id][key].ids, key


def test_spec_bench_can_read_the_answers(bench: SpecBench, methods: list[Arm], tmp_path: Path) -> None:
    """Apply the formulas of Spec-Bench's evaluation/speed.py to our files."""
    log = RecordLog(tmp_path / "records.jsonl")
    bench.run(methods, log, runs=1, warmup_questions=0)
    write_answers(log, tmp_path / "answers", "demo")
    files = {file.name: file for file in (tmp_path / "answers").iterdir()}
    assert sorted(files) == sorted(
        f"demo-{method}-temp-{temperature}-run-1.jsonl"
        for method in ("autoregressive", "chain", "tree")
        for temperature in (0, 1)
    )
    rows = [json.loads(line) for line in files["demo-chain-temp-0-run-1.jsonl"].read_text().splitlines()]
    accept_lengths: list[int] = []
    for row, question in zip(rows, QUESTIONS, strict=True):
        assert set(row) == {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
        (choice,) = row["choices"]
        assert len(choice["turns"]) == len(choice["wall_time"]) == len(choice["new_tokens"]) == len(question.turns)
        assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
        accept_lengths.extend(choice["accept_lengths"])
    summary = summarize(list(log))
    overall = next(row for row in summary if (row["method"], row["category"]) == ("chain", "overall"))
    assert sum(accept_lengths) / len(accept_lengths) == pytest.approx(overall["tau"])
    choices = {
        name: [json.loads(line)["choices"][0] for line in files[f"demo-{name}-temp-0-run-1.jsonl"].open()]
        for name in ("chain", "autoregressive")
    }

    def speed(name: str, tokens_of: Callable[[dict[str, Any]], int]) -> float:
        return statistics.fmean(tokens_of(choice) / sum(choice["wall_time"]) for choice in choices[name])

    def as_generated(choice: dict[str, Any]) -> int:
        return sum(choice["new_tokens"])

    mine, baseline = speed("chain", as_generated), speed("autoregressive", as_generated)
    assert mine / baseline == pytest.approx(overall["speedup_by_question_mean"])
    # The script counts the baseline's tokens by tokenizing its text, here letters, minus one per turn.
    assert (
        mine / speed("autoregressive", lambda choice: sum(len(text) - 1 for text in choice["turns"])) > mine / baseline
    )


def test_questions_that_do_not_fit_are_counted(target: LlamaForCausalLM, bench: SpecBench, methods: list[Arm]) -> None:
    long = Question(9, "math", ("a" * 90,))
    rag = Question(11, "rag", ("a" * 90,))
    bench = SpecBench(target, LetterTokenizer(), [*QUESTIONS, long, rag], 12)
    assert (bench.left_out, bench.tasks_left_out) == (2, ["rag"])
    with pytest.raises(
        UserError, match="none of the 1 questions leaves room for an answer in the target's 96 positions"
    ):
        SpecBench(target, LetterTokenizer(), [long], 12)
    later = Question(10, "math", ("a" * 70, "b" * 20))
    answer = SpecBench(target, LetterTokenizer(), [later], 12).answer(methods[0], later)
    assert (len(answer.turns), answer.turns_left_out) == (1, 1)
