"""The Arrow dataset: every answer after its prompt, reused for the same inputs only, complete or absent."""

import multiprocessing
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from support import tiny_tokenizers as templates
from support.chat_families import FAMILIES, FIELD_OF_THOUGHTS, Family, mark_loss
from support.tiny_tokenizers import tiny_tokenizer
from tqdm import tqdm

from draftsmith.data.distill import token_dataset as token_rows
from draftsmith.data.distill.ledger import SHARDS, UNFINISHED, Ledger, LedgerView
from draftsmith.data.distill.token_dataset import Work, build_token_dataset, tokenize_rows, write_token_rows
from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.tokens.chat_tokens import prompt_token_ids, tokenize_conversation
from draftsmith.data.tokens.loss_mask import reasoning_ids
from draftsmith.data.tokens.templates import TemplateProblem
from draftsmith.errors import UserError
from draftsmith.recipes.run_folder import RunFolder, run_lock
from draftsmith.recipes.schema import DataRecipe, Recipe


def write_distilled(folder: Path, answers: list[list[str]]) -> None:
    shutil.rmtree(folder / SHARDS, ignore_errors=True)
    ledger = Ledger(folder)
    for number, said in enumerate(answers):
        turns = [turn for text in said for turn in (Turn("user", "Say hi"), Turn("assistant", text))]
        ledger.commit([], [Conversation(f"{9 - number}", tuple(turns))])


def build(data: Path, max_length_tokens: int = 128, template: str = templates.CHATML) -> Any:
    recipe = Recipe.model_validate({"name": "test", "data": {"max_length_tokens": max_length_tokens}})
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
    too_long = Conversation("l", (Turn("user", "a"), Turn("assistant", "b " * 90)))
    fitting = [conversation(n, ids=None if n % 2 else [5, 6, n]) for n in numbers]
    answered = [*fitting[:11], too_long, replace(too_long, answer_ids=([1] * 70,)), *fitting[11:]]
    results = [write_rows(tmp_path, answered, processes) for processes in (1, 2)]
    assert results[0][0] == results[1][0]
    assert (results[0][0].rows, results[0][0].too_long, results[0][0].conversations) == (40, 2, 42)
    assert results[0][1].to_dict() == results[1][1].to_dict()
    tokenizer = tiny_tokenizer(templates.CHATML)
    expected = [tokenize_conversation(tokenizer, each) for each in fitting]
    rows = results[0][1]
    assert list(rows["input_ids"]) == [row.input_ids for row in expected]
    assert list(rows["loss_mask"]) == [row.loss_mask for row in expected]
    assert list(rows["length"]) == [len(row.input_ids) for row in expected]
    assert list(rows["conversation"]) == [*range(11), *range(13, 42)]


def test_first_answer_is_cut_at_the_maximum_length(tmp_path: Path) -> None:
    """The row is the prompt and the answer's first tokens, with loss; no row without ids or of a prompt alone."""
    tokenizer = tiny_tokenizer(templates.CHATML)
    said = [5 + n % 7 for n in range(90)]
    long = Conversation("long", (Turn("user", "a"), Turn("assistant", "x")), answer_ids=(said,))
    unasked = Conversation("unasked", (Turn("user", "a " * 200), Turn("assistant", "x")), answer_ids=([5, 6],))
    without_ids = Conversation("no ids", (Turn("user", "a"), Turn("assistant", "b " * 90)))
    answered = [long, without_ids, unasked, conversation(3, ids=[5, 6, 7])]
    counts, rows = write_rows(tmp_path, answered, cut_answers=True)
    assert (counts.rows, counts.answers_cut, counts.too_long, counts.shortened) == (2, 1, 2, 0)
    row = rows[0]
    prompt = prompt_token_ids(tokenizer, long.turns[:1])
    assert row["input_ids"] == prompt + said[: 60 - len(prompt)]
    assert row["loss_mask"] == [0] * len(prompt) + [1] * (60 - len(prompt))


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


def test_answers_whose_thoughts_leave_the_history_get_separate_rows() -> None:
    """Every answer carries loss once, after exactly the prompt that the target was given."""
    tokenizer = FAMILIES["Qwen3"].tokenizer()
    texts = ["<think>\none\n</think>\n\nHello", "Say hi", "<think>\nthree\n</think>\n\nBye"]
    turns = [turn for text in texts for turn in (Turn("user", "Say hi"), Turn("assistant", text))]
    ids = [tokenizer.encode(text + "<|im_end|>", add_special_tokens=False) for text in texts]
    thinking = Conversation("thinking", tuple(turns), answer_ids=tuple(ids))
    rows, cut = tokenize_rows(tokenizer, thinking, 1000)
    assert not cut
    assert [row.answers() for row in rows] == [[ids[1], ids[2]], [ids[0]]]
    first_prompt = prompt_token_ids(tokenizer, turns[:1])
    assert rows[1].input_ids == first_prompt + ids[0]
    assert rows[0].input_ids == prompt_token_ids(tokenizer, turns[:-1]) + ids[2]
    # Rows and turns that do not fit are left out.
    assert tokenize_rows(tokenizer, thinking, len(rows[0].input_ids) - 1)[1] == {"shortened": 1}
    assert tokenize_rows(tokenizer, thinking, 5) == ([], Counter())


@pytest.mark.parametrize("are_known", [True, False])
@pytest.mark.parametrize("system", [(), (Turn("system", "Be rude."),)], ids=["", "system"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_is_learned_after_the_prompt_that_the_target_read(
    family: str, system: tuple[Turn, ...], are_known: bool
) -> None:
    tokenizer = FAMILIES[family].tokenizer()
    answers = [Turn("assistant", text) for text in ("Hello", "Hello there", "Say hi", "Bye", "you are", "ok")]
    turns = (*system, *(turn for answer in answers for turn in (Turn("user", "Say hi"), answer)))
    ids = [tokenizer.encode(answer.content + FAMILIES[family].end, add_special_tokens=False) for answer in answers]
    answered = Conversation("x", turns, answer_ids=tuple(ids) if are_known else ())
    try:
        rows, _ = tokenize_rows(tokenizer, answered, 4096)
    except TemplateProblem:
        assert family in ("Gemma 2", "Mistral v0.1")  # without system turns
        return
    read = []
    for row in rows:
        loss = row.loss_mask
        begins = [place for place in range(1, len(loss)) if loss[place] > loss[place - 1]]
        read += ["".join(tokenizer.decode(row.input_ids[:place]).split()) for place in begins]
    prompts = [
        "".join(tokenizer.decode(prompt_token_ids(tokenizer, turns[:number])).split())
        for number, turn in enumerate(turns)
        if turn.role == "assistant"
    ]
    if family == "R1" and not are_known:  # its template never writes the thoughts that its prompts open
        prompts = [prompt.removesuffix("<think>") for prompt in prompts]
    assert sorted(read) == sorted(prompts)


def test_rewritten_answers_without_a_row_are_counted(tmp_path: Path) -> None:
    """Of three, one thinks too long for a row, and one says what the template refuses in the last turn; one is left."""
    family = FAMILIES["Qwen3"]
    refusing = "{% if 'Bye' in messages[-1].content and messages[-1].role == 'assistant' %}{{ raise_exception('no') }}"
    tokenizer = replace(family, template=refusing + "{% endif %}" + family.template).tokenizer()
    texts = [f"<think>\n{'one ' * 90}\n</think>\n\nHello", "<think>\na</think>Bye", "<think>\nb\n</think>\n\nok", "end"]
    turns = [turn for text in texts for turn in (Turn("user", "Say hi"), Turn("assistant", text))]
    report, _ = write_rows(tmp_path, [Conversation("x", tuple(turns))], tokenizer=tokenizer, max_length_tokens=200)
    assert (report.rows, report.extra_rows, report.answers_too_long, report.answers_refused) == (2, 1, 1, 1)
    assert "; of 1 conversations 1 rewritten answers too long, 1 rewritten answers refused" in report.sentence()


ASKED = "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("family", [FAMILIES["Qwen3"], FIELD_OF_THOUGHTS], ids=["content", "field"])
@pytest.mark.parametrize("in_field", [False, True])
def test_given_answers_whose_thoughts_leave_the_history_carry_loss_once(family: Family, in_field: bool) -> None:
    """Without ids, each answer carries loss once, in full; its shortened copy in the history carries none."""
    tokenizer = family.tokenizer()
    answers = [
        Turn("assistant", text, reasoning_content=thoughts)
        if in_field
        else Turn("assistant", f"<think>\n{thoughts}\n</think>\n\n{text}")
        for thoughts, text in (("one", "Hello"), ("two", "Bye"))
    ]
    conversation = Conversation("x", (Turn("user", "Say hi"), answers[0], Turn("user", "Say hi"), answers[1]))
    rows, _ = tokenize_rows(tokenizer, conversation, 1000)
    said = [
        f"«<think>\n{thoughts}\n</think>\n\n{text}<|im_end|>»\n"
        for thoughts, text in (("one", "Hello"), ("two", "Bye"))
    ]
    assert [mark_loss(tokenizer, row) for row in rows] == [
        ASKED + "Hello<|im_end|>\n" + ASKED + said[1], ASKED + said[0]
    ]  # fmt: skip


def test_answers_of_weight_0_carry_no_loss() -> None:
    """The conversation is cut after the last answer with loss only if it is too long."""
    tokenizer = tiny_tokenizer(templates.CHATML)
    asked = Turn("user", "Say hi")
    wrong, right = Turn("assistant", "Hello", weight=0), Turn("assistant", "Bye")
    rows, _ = tokenize_rows(tokenizer, Conversation("x", (asked, wrong, asked, right)), 1000)
    assert [mark_loss(tokenizer, row) for row in rows] == [ASKED + "Hello<|im_end|>\n" + ASKED + "«Bye<|im_end|>»\n"]
    rows, _ = tokenize_rows(tokenizer, Conversation("x", (asked, right, asked, wrong)), 1000)
    assert [mark_loss(tokenizer, row) for row in rows] == [ASKED + "«Bye<|im_end|>»\n" + ASKED + "Hello<|im_end|>\n"]
    length = len(rows[0].input_ids)
    assert tokenize_rows(tokenizer, Conversation("x", (asked, wrong, asked, right)), length - 1) == ([], Counter())
    assert tokenize_rows(tokenizer, Conversation("x", (asked, wrong)), 1000) == ([], Counter())


def test_rewritten_answer_of_weight_0_has_no_row() -> None:
    tokenizer = FAMILIES["Qwen3"].tokenizer()
    asked, thinking = Turn("user", "Say hi"), "<think>\none\n</think>\n\nHello"
    first, last = Turn("assistant", thinking), Turn("assistant", thinking, weight=0)
    rows, _ = tokenize_rows(tokenizer, Conversation("x", (asked, first, asked, last)), 1000)
    assert [mark_loss(tokenizer, row) for row in rows] == [ASKED + f"«{thinking}<|im_end|>»\n"]
    rows, _ = tokenize_rows(tokenizer, Conversation("x", (asked, last, asked, first)), 1000)
    assert len(rows) == 1


def test_thoughts_carry_no_loss_if_masked(tmp_path: Path) -> None:
    """Only the text after the thoughts carries loss; a row of thoughts alone is left out and counted."""
    tokenizer = FAMILIES["Qwen3"].tokenizer()
    texts = ["<think>\none\n</think>\n\nHello", "<think>\nthree\n</think>\n\nBye"]
    turns = [turn for text in texts for turn in (Turn("user", "Say hi"), Turn("assistant", text))]
    ids = [tokenizer.encode(text + "<|im_end|>", add_special_tokens=False) for text in texts]
    thought = tokenizer.encode("<think>\none", add_special_tokens=False)
    cut = Conversation("cut", (Turn("user", "Say hi"), Turn("assistant", "<think>\none")), answer_ids=(thought,))
    answered = [Conversation("thinking", tuple(turns), answer_ids=tuple(ids)), cut]
    around = reasoning_ids(tokenizer, DataRecipe(reasoning="mask"))
    assert around is not None
    assert tokenizer.convert_ids_to_tokens(list(around)) == ["<think>", "</think>"]
    report, rows = write_rows(tmp_path, answered, tokenizer=tokenizer, max_length_tokens=1000, reasoning=around)
    learned = [[i for i, loss in zip(row["input_ids"], row["loss_mask"], strict=True) if loss] for row in rows]
    assert list(map(tokenizer.decode, learned)) == ["\n\nBye<|im_end|>", "\n\nHello<|im_end|>"]
    thoughts = sum(each.index(around[1]) + 1 for each in ids) + len(tokenizer.encode("<think>\none"))
    assert (report.rows, report.thoughts_alone, report.reasoning_tokens) == (2, 1, thoughts)
    assert "1 examples of thoughts alone left out" in report.sentence()
    with pytest.raises(UserError, match=r"no token \[THINK\], .* set data.reasoning_tokens to the tokens"):
        reasoning_ids(tokenizer, DataRecipe(reasoning="mask", reasoning_tokens=("[THINK]", "</think>")))
