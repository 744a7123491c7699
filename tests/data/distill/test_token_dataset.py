"""The Arrow dataset: rows of `tokenize_conversation`, reused for the same inputs only, complete or absent."""

import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
from support import tiny_tokenizers as templates
from support.tiny_tokenizers import tiny_tokenizer

from draftsmith.data.distill.ledger import CLAIMS, DONE, SHARDS, FinishedConversation, Ledger, LedgerView
from draftsmith.data.distill.token_dataset import build_token_dataset
from draftsmith.data.tokens.chat_tokens import tokenize_conversation
from draftsmith.errors import UserError
from draftsmith.recipes.run_folder import RunFolder, run_lock
from draftsmith.recipes.schema import Recipe


def write_distilled(folder: Path, answers: list[list[str]]) -> None:
    shutil.rmtree(folder / SHARDS, ignore_errors=True)
    with Ledger(folder) as ledger:
        ids = [f"{9 - number}" for number in range(len(answers))]
        ledger.claim(ids)
        finished = []
        for key, said in zip(ids, answers, strict=True):
            question = {"role": "user", "content": "Say hi"}
            messages = [turn for answer in said for turn in (question, {"role": "assistant", "content": answer})]
            finished.append(FinishedConversation(key, DONE, None, {"messages": messages}))
        ledger.commit([], finished)


def build(data: Path, max_length_tokens: int = 128, template: str = templates.CHATML) -> Any:
    recipe = Recipe.model_validate({"name": "test", "data": {"max_length_tokens": max_length_tokens}})
    folder = RunFolder(recipe)
    folder.data = data
    return build_token_dataset(recipe, tiny_tokenizer(template), folder, progress=False)


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
            UserError, match=r"started on the rows of .*, is not finished.*: finish it with `draftsmith train`"
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


def test_too_long_conversations_are_cut_or_counted(tmp_path: Path) -> None:
    write_distilled(tmp_path, [["Hello"], ["Hello", "Bye"], ["Hello " * 50]])
    last = list(LedgerView(tmp_path).distilled())[-1]
    length = len(tokenize_conversation(tiny_tokenizer(templates.CHATML), last).input_ids)
    report = build(tmp_path, max_length_tokens=length)
    assert (report.rows, report.shortened, report.too_long) == (2, 1, 1)
    assert "; of 3 conversations 1 shortened by whole turns, 1 too long" in report.sentence()
    rows = load(tmp_path)["input_ids"]
    assert rows[0] == rows[1]


def test_dataset_without_rows_is_an_error(tmp_path: Path) -> None:
    write_distilled(tmp_path, [["Hello"]])
    with pytest.raises(UserError, match=r"1 read, 1 longer than 8 tokens.*raise data\.max_length_tokens"):
        build(tmp_path, max_length_tokens=8)
    assert not (tmp_path / "tokens").exists()
    shutil.rmtree(tmp_path / SHARDS)
    (tmp_path / CLAIMS).unlink()
    with pytest.raises(UserError, match="shards does not exist"):
        build(tmp_path)
