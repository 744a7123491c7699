"""Sources: mixtures, the Hub, limits, splits, duplicates, and every error."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.sources import distilled
from draftsmith.data.sources.files import open_records
from draftsmith.data.sources.mixture import SourceCounts, interleave, load_conversations
from draftsmith.data.sources.questions import load_questions
from draftsmith.errors import UserError
from draftsmith.recipes.conversations import SourceRecipe
from draftsmith.recipes.schema import Recipe


def record(question: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "ä answer"}]}


def jsonl(*questions: str) -> str:
    return "".join(json.dumps(record(question), ensure_ascii=False) + "\n" for question in questions)


def questions(source: Path | str, counts: SourceCounts | None = None, **keys: Any) -> list[str]:
    return [c.turns[0].content for c in load_conversations(make_recipe(source, **keys), counts)]


def make_recipe(source: Path | str, engine: str = "transformers", **keys: Any) -> Recipe:
    data = {"conversations": {"source": str(source), **keys}, "distill": {"engine": engine}}
    return Recipe.model_validate({"name": "test", "data": data})


def test_limit_duplicates_and_skipped_records(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(jsonl("a", "a") + "{broken\n" + '{"messages": []}\n' + jsonl("b", "a", "c") + "{not reached\n")
    counts = SourceCounts()
    assert questions(file, counts, limit=3, skip_invalid=True) == ["a", "b", "c"]
    assert counts.total.duplicates == 2
    assert counts.total.invalid == {"not JSON": 1, "no question": 1}
    tally = counts.by_source["chats"]
    assert (tally.read, tally.kept) == (7, 3)  # the last line is not read


def test_answers_to_one_prompt_are_separate_conversations(tmp_path: Path) -> None:
    """If the answers are used, each is a conversation with its own id; otherwise they are one."""
    lines = [record(question) for question in ("a", "b")]
    lines += [{"conversations": [lines[0]["conversations"][0], {"from": "gpt", "value": text}]} for text in "xyx"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = SourceCounts()
    found = list(load_conversations(make_recipe(tmp_path / "a.jsonl", "none"), counts))
    assert [c.turns[1].content for c in found] == ["ä answer", "ä answer", "x", "y"]
    assert counts.total.duplicates == 1
    answered_anew = list(load_conversations(make_recipe(tmp_path / "a.jsonl")))
    assert [c.turns[0].content for c in answered_anew] == ["a", "b"]
    assert [c.id[:16] for c in found[:2]] == [c.id for c in answered_anew]  # sorted, they are in the same order
    assert len({c.id for c in found}) == 4


def test_interleaving_follows_the_weights_throughout() -> None:
    """Weights 3, 1 and 2: due at 1/6 3/6 5/6, at 1/2, at 1/4 3/4; ties in the order of the streams."""
    streams = [(3.0, iter("aaaaaaaaa")), (1.0, iter("bbbbb")), (2.0, iter("cccccc"))]
    mixed = "".join(interleave(streams))
    assert mixed.startswith("acabca" * 3)
    assert mixed == "acabca" * 3 + "bb"  # a and c are exhausted
    for claimed in range(1, 19):
        for name, share in (("a", 1 / 2), ("b", 1 / 6), ("c", 1 / 3)):
            assert abs(mixed[:claimed].count(name) - share * claimed) < 1


def mixture(tmp_path: Path, **texts: str) -> list[dict[str, Any]]:
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    return [{"source": str(tmp_path / f"{name}.jsonl")} for name in texts]


def test_mixture_of_two_sources(tmp_path: Path) -> None:
    """A prompt in both sources counts in the first; each source has its own format and limit."""
    entries = mixture(
        tmp_path, long=jsonl(*"abcdef"), other='{"query": "x"}\n{"query": "B"}\n{broken\n{"query": "y"}\n'
    )
    entries[0] |= {"weight": 2, "limit": 5}
    entries[1] |= {"name": "prompts", "columns": {"prompt": "query"}}
    recipe = make_recipe("stdlib", mixture=entries, skip_invalid=True)
    counts = SourceCounts()
    found = list(load_conversations(recipe, counts))
    assert [c.turns[0].content for c in found] == ["a", "x", "b", "c", "y", "d", "e"]
    assert [c.source for c in found] == ["long", "prompts", "long", "long", "prompts", "long", "long"]
    assert (counts.by_source["long"].read, counts.by_source["long"].kept) == (5, 5)
    prompts = counts.by_source["prompts"]
    assert (prompts.read, prompts.kept, prompts.duplicates, prompts.invalid) == (4, 2, 1, {"not JSON": 1})
    assert prompts.sentence() == "2 of 4 records kept, invalid: 1 (not JSON), duplicates: 1"
    few = make_recipe("stdlib", mixture=entries, limit=4)
    assert [c.turns[0].content for c in load_conversations(few)] == ["a", "x", "b", "c"]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"revision": "abc"}, "`revision` belongs to the entries of `mixture`: move it there"),
        ({"source": "b.jsonl"}, "`source` belongs to the entries of `mixture`: move it there"),
        ({"mixture": [{"source": "x/a.jsonl"}, {"source": "y/a.json.gz"}]}, "two sources with the name a: set another"),
        ({"mixture": [{"source": "a", "weight": 0}]}, "Input should be greater than 0"),
        ({"split": "heldout"}, "`split: heldout` needs a `heldout_frac` above 0"),
    ],
)
def test_contradictory_mixture_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Recipe.model_validate({"name": "a", "data": {"conversations": {"mixture": [{"source": "some/set"}]} | keys}})


def test_embedded_conversations() -> None:
    """They are split by module, unique, and free of the evaluation questions, which are of held-out modules."""
    splits = {
        split: [record for _, record in open_records(SourceRecipe(), split)] for split in ("train", "heldout", "all")
    }
    assert {split: len(records) for split, records in splits.items()} == {"train": 8623, "heldout": 1377, "all": 10000}
    assert len({record["id"] for record in splits["all"]}) == 10000
    modules = {split: {record["module"] for record in records} for split, records in splits.items()}
    assert modules["train"].isdisjoint(modules["heldout"])
    first_turns = {record["messages"][0]["content"] for record in splits["train"]}
    assert first_turns.isdisjoint(question.turns[0] for question in load_questions("embedded"))
    assert splits["train"][0]["id"] == "retrieval-ddfbb251a9fe"


def test_splits_are_stable(tmp_path: Path) -> None:
    """Of 500 conversations about a tenth is held out; they stay held out when others are added around them."""
    file = tmp_path / "a.jsonl"
    old = [f"question {n}" for n in range(500)]
    file.write_text(jsonl(*old))
    counts = SourceCounts()
    heldout = questions(file, split="heldout", heldout_frac=0.1)
    train = questions(file, counts, heldout_frac=0.1)
    assert counts.by_source["a"].other_split == len(heldout)
    assert sorted(heldout + train) == sorted(questions(file, split="all", heldout_frac=0.1)) == sorted(old)
    assert 30 < len(heldout) < 70  # 50 +- 3 standard deviations of 6.7
    assert set(heldout) < set(questions(file, split="heldout", heldout_frac=0.2))
    file.write_text(jsonl(*(text for n in range(500) for text in (f"new {n}", old[n])), *map(str, range(500))))
    assert [text for text in questions(file, split="heldout", heldout_frac=0.1) if text in set(old)] == heldout
    assert set(train) < set(questions(file, heldout_frac=0.1))


def test_source_without_conversations_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl("Is this a question or not?"))
    (tmp_path / "q.jsonl").write_text('{"question_id": 1, "category": "x", "turns": ["is this a question, or NOT"]}')
    with pytest.raises(UserError, match=r"holds no valid conversation \(1 contaminated\); set"):
        questions(tmp_path / "a.jsonl", decontaminate=[str(tmp_path / "q.jsonl")])
    (tmp_path / "b.jsonl").write_text('{"messages": []}\n{"messages": []}\nnope\n')
    with pytest.raises(UserError, match=r"no valid conversation: 3 \(2 no question, 1 not JSON\) skipped as invalid"):
        questions(tmp_path / "b.jsonl", skip_invalid=True)
    with pytest.raises(UserError, match=r"b\.jsonl line 3: not JSON"):
        questions(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    "prompt", [{"prompt": "a"}, {"turns": ["a", "b"]}, {"messages": [{"role": "user", "content": "a"}]}]
)
def test_prompts_without_answers_need_self_distillation(tmp_path: Path, prompt: dict[str, Any]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(prompt) + "\n" + jsonl("c"))
    assert questions(file) == ["a", "c"]
    counts = SourceCounts()
    assert questions(file, counts, engine="none") == ["c"]
    assert counts.total.invalid == {"no answer": 1}
    file.write_text(json.dumps({"turns": ["a", "b"], "answer": ["", "c"]}))
    with pytest.raises(UserError, match=r"prompts\.jsonl line 1: a question has no answer, and .*engine: none"):
        questions(file, engine="none")


def test_sharegpt_file_is_read_to_its_end_without_a_stop(tmp_path: Path) -> None:
    """Parts of split conversations begin with an answer; some are empty, or have a turn twice."""
    talks = [[("gpt", "x"), ("human", "a"), ("gpt", "b")], [], [("gpt", "x")], [("human", "c"), ("gpt", "d")] * 2]
    talks.append([("human", "e"), ("gpt", "f"), ("gpt", "g")])
    records = [{"id": "1", "conversations": [{"from": who, "value": text} for who, text in talk]} for talk in talks]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps(records))
    counts = SourceCounts()
    assert questions(file, counts, engine="none") == ["a", "c", "e"]
    repaired = {"leading assistant turns dropped": 1, "ended before a second assistant turn in a row": 1}
    assert (counts.total.repaired, counts.total.invalid) == (repaired, {"no question": 2})
    assert "repaired: 2 (1 leading assistant turns dropped, 1 ended before" in counts.total.sentence()


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's datasets are no distilled sets."""

    def hf_hub_download(name: str, file: str, **keys: Any) -> None:
        raise FileNotFoundError(file)

    monkeypatch.setattr(distilled, "hf_hub_download", hf_hub_download)


def test_rows_of_a_hub_dataset(monkeypatch: pytest.MonkeyPatch, no_card: None) -> None:
    asked: dict[str, Any] = {}

    def load_dataset(path: str, name: str = "", **keys: Any) -> list[dict[str, Any]]:
        asked.update(keys, name=path, config=name)
        return [record("a"), {"conversations": 1}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert questions("someone/chats", hub_split="test", revision="abc", limit=1) == ["a"]
    assert asked == {"name": "someone/chats", "config": "", "data_files": None, "revision": "abc", "split": "test"}
    with pytest.raises(UserError, match="someone/chats row 2: `conversations` must be a list"):
        questions("someone/chats", hub_config="main")
    assert asked["config"] == "main"


def test_unreachable_hub_is_reported(monkeypatch: pytest.MonkeyPatch, no_card: None) -> None:
    def load_dataset(name: str, **keys: Any) -> None:
        raise ConnectionError(f"Couldn't reach '{name}'\non the Hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(
        UserError, match=r"Hub dataset someone/chats \(split train\) cannot be loaded: Couldn't"
    ) as caught:
        questions("someone/chats")
    assert "set data.conversations.source to a local file" in str(caught.value)
    assert "\n" not in str(caught.value)
