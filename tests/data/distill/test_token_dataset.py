"""The Arrow dataset: every answer after its prompt, reused for the same inputs only, complete or absent."""

import multiprocessing
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from support import tiny_tokenizers as templates
from support.chat_families import FAMILIES
from support.tiny_tokenizers import tiny_tokenizer
from tqdm import tqdm

from draftsmith.data.distill import token_dataset as token_rows
from draftsmith.data.distill.ledger import SHARDS, UNFINISHED, Ledger, LedgerView
from draftsmith.data.distill.token_dataset import Work, build_token_dataset, write_token_rows
from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.tokens.rows import tokenize_rows
from draftsmith.errors import UserError
from draftsmith.recipes.run_folder import RunFolder, run_lock
from draftsmith.recipes.schema import Recipe


def write_distilled(folder: Path, answers: list[list[str]]) -> None:
    shutil.rmtree(folder / SHARDS, ignore_errors=True)
    ledger = Ledger(folder)
    for number, said in enumerate(answers):
        turns = [turn for text in said for turn in (Turn("user", "Say hi"), Turn("assistant", text))]
        ledger.commit([], [Conversation(f"{9 - number}", tuple(turns))])


def build(data: Path, max_length_tokens: int = 128, template: str = templates.CHATML, **settings: Any) -> Any:
    recipe = Recipe.model_validate({"name": "test", "data": {"max_length_tokens": max_length_tokens, **settings}})
    folder = RunFolder(recipe)
    folder.data = data
    return build_token_dataset(recipe, tiny_tokenizer(template), folder)


def load(data: Path) -> Any:
    return datasets.load_from_disk(str(data / "tokens"))


def test_dataset_is_reused_until_an_input_changes(tmp_path: Path) -> None:
    write_distilled(tmp_path, [["Hello"], ["Hello there", "Bye"]])
    first = build(tmp_path)
    again = build(tmp_path)
    assert not first.reused
    assert again.reused
    assert again.rows == first.rows
    assert not build(tmp_path, max_length_tokens=127).reused
    assert not build(tmp_path, max_length_tokens=127, template=templates.ZEPHYR).reused
    write_distilled(tmp_path, [["Hello"]])
    assert build(tmp_path, max_length_tokens=127, template=templates.ZEPHYR).rows == 1
    assert len(load(tmp_path)) == 1


def test_interrupted_build_leaves_the_old_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distilled(tmp_path, [["Hello"]])
    build(tmp_path)
    write_distilled(tmp_path, [["Hello"], ["Bye"]])

    def raise_interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("datasets.Dataset.save_to_disk", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path)
    assert len(load(tmp_path)) == 1
    assert build(tmp_path).rows == 2
    assert not list(tmp_path.glob("*.partial"))


def test_rows_of_a_started_training_are_not_replaced(tmp_path: Path) -> None:
    """With other rows it could not be resumed; once it is finished or deleted, they may change. So with linked data."""
    data, drafter = tmp_path / "run" / "data", tmp_path / "run" / "drafter"
    write_distilled(data, [["Hello"]])
    build(data)
    drafter.mkdir()
    (drafter / "settings.json").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data").symlink_to(data)
    write_distilled(data, [["Hello"], ["Bye"]])
    for folder in (data, tmp_path / "other" / "data"):
        with pytest.raises(
            UserError, match=r"an unfinished training on the token dataset of .*: finish it with `draftsmith train`"
        ):
            build(folder)
    assert len(load(data)) == 1
    write_distilled(data, [["Hello"]])
    assert build(data).reused  # as `draftsmith run` does before it resumes the training
    (drafter / "training.json").touch()
    write_distilled(data, [["Hello"], ["Bye"]])
    with run_lock(tmp_path / "run", "train"), pytest.raises(UserError, match=r"run is in use by `draftsmith train`"):
        build(data)
    assert len(load(data)) == 1
    assert build(data).rows == 2


def test_too_long_conversations_are_cut(tmp_path: Path) -> None:
    """An answer is learned up to the limit."""
    write_distilled(tmp_path, [["Hello"], ["Hello", "Bye"], ["Hello " * 50]])
    last = list(LedgerView(tmp_path).distilled())[-1]
    ((row,), _) = tokenize_rows(tiny_tokenizer(templates.CHATML), last, 1000)
    report = build(tmp_path, max_length_tokens=len(row.input_ids))
    assert (report.rows, report.answers_cut, report.answers_out, report.too_long) == (3, 1, 1, 0)
    assert "; of 3 conversations 1 answers cut at data.max_length_tokens, 1 answers beyond data" in report.sentence()
    first, second, third = load(tmp_path)["input_ids"]
    assert first[: len(second)] != second == third
    assert len(first) == len(second)


def test_dataset_without_rows_is_an_error(tmp_path: Path) -> None:
    write_distilled(tmp_path, [["Hello"]])
    with pytest.raises(UserError, match=r"1 read, 1 longer than 8 tokens.*raise data\.max_length_tokens"):
        build(tmp_path, max_length_tokens=8)
    assert not (tmp_path / "tokens").exists()
    shutil.rmtree(tmp_path / SHARDS)
    (tmp_path / UNFINISHED).rmdir()
    with pytest.raises(UserError, match="shards does not exist"):
        build(tmp_path)


def conversation(number: int, answer: str = "Hello", ids: list[int] | None = None) -> Conversation:
    turns = (Turn("user", f"Say hi {number}"), Turn("assistant", f"{answer} {number} " * (1 + number % 5)))
    return Conversation(f"{number:04d}", turns, answer_ids=(ids,))


def write_rows(tmp_path: Path, conversations: list[Conversation], processes: int = 1, **work: Any) -> Any:
    """Return the report and the rows of conversations, by default of at most 60 tokens."""
    file = tmp_path / f"{processes}.arrow"
    settings = Work(**{"tokenizer": tiny_tokenizer(templates.CHATML), "max_length_tokens": 60, **work})
    with tqdm(disable=True) as bar:
        report = write_token_rows(iter(conversations), settings, file, processes, bar)
    return report, datasets.Dataset.from_file(str(file))


@pytest.fixture
def forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork worker processes, which start faster than spawned ones."""
    monkeypatch.setattr(token_rows, "get_context", lambda _: multiprocessing.get_context("fork"))


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])  # spawned, as in real runs
def test_rows_do_not_depend_on_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    monkeypatch.setattr(token_rows, "get_context", lambda _: multiprocessing.get_context(start))
    monkeypatch.setattr(token_rows, "CHUNK_CONVERSATIONS", 3)
    numbers = range(40)
    too_long = Conversation("l", (Turn("user", "b " * 90), Turn("assistant", "a")))
    fitting = [conversation(n, ids=None if n % 2 else [5, 6, n]) for n in numbers]
    answered = [*fitting[:11], too_long, replace(too_long, answer_ids=([1] * 70,)), *fitting[11:]]
    results = [write_rows(tmp_path, answered, processes) for processes in (1, 2)]
    assert results[0][0] == results[1][0]
    assert (results[0][0].rows, results[0][0].too_long, results[0][0].conversations) == (40, 2, 42)
    assert results[0][1].to_dict() == results[1][1].to_dict()
    tokenizer = tiny_tokenizer(templates.CHATML)
    expected = [row for each in fitting for row in tokenize_rows(tokenizer, each, 60)[0]]
    rows = results[0][1]
    assert list(rows["input_ids"]) == [row.input_ids for row in expected]
    assert list(rows["loss_mask"]) == [row.loss_mask for row in expected]
    assert list(rows["length"]) == [len(row.input_ids) for row in expected]
    assert list(rows["conversation"]) == [*range(11), *range(13, 42)]


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize("processes", [1, 2])
def test_reader_stays_close_to_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    """Bound the memory: the reader is ahead of the writer by the chunks in flight at most."""
    monkeypatch.setattr(token_rows, "CHUNK_CONVERSATIONS", 2)
    read, done, furthest = 0, 0, 0

    class Bar:
        def update(self, count: int) -> None:
            nonlocal done
            done += count

    def reading() -> Iterator[Conversation]:
        nonlocal read, furthest
        for number in range(60):
            read += 1
            furthest = max(furthest, read - done)
            yield conversation(number)

    counts = write_token_rows(reading(), Work(tiny_tokenizer(templates.CHATML), 60), tmp_path / "x", processes, Bar())
    assert counts.rows == done == 60
    assert furthest <= 2 * (processes * token_rows.CHUNKS_PER_PROCESS + 1) + 1


def test_answers_that_the_template_refuses_are_counted(tmp_path: Path) -> None:
    """Of four answers one says what the template refuses in the last turn, where its thoughts are written."""
    family = FAMILIES["Qwen3"]
    refusing = "{% if 'Bye' in messages[-1].content and messages[-1].role == 'assistant' %}{{ raise_exception('no') }}"
    tokenizer = replace(family, template=refusing + "{% endif %}" + family.template).tokenizer()
    texts = ["<think>\none\n</think>\n\nHello", "<think>\na</think>Bye", "<think>\nb\n</think>\n\nok", "end"]
    turns = [turn for text in texts for turn in (Turn("user", "Say hi"), Turn("assistant", text))]
    report, _ = write_rows(tmp_path, [Conversation("x", tuple(turns))], tokenizer=tokenizer, max_length_tokens=200)
    assert (report.rows, report.extra_rows, report.answers_refused) == (3, 2, 1)
    assert "(2 of them because later prompts change earlier turns)" in report.sentence()
    assert "; of 1 conversations 1 answers refused by the" in report.sentence()
