"""The corpus of the embedded target: deterministic, split by module, short enough, free of repetition."""

import json
import random
from collections import Counter

import pytest
from support.places import ROOT

from draftsmith.data.stdlib import conversations as stdlib_conversations
from draftsmith.data.stdlib import phrasing as stdlib_phrasing
from draftsmith.data.stdlib.conversations import MAKERS, build_conversations, has_repeated_run, is_heldout
from draftsmith.data.stdlib.items import stdlib_items

QUESTIONS = ROOT / "data" / "stdlib" / "embedded.jsonl"
SAMPLE_MODULE = '''
import os

def join(first, *rest, sep=os.sep, **options):
    """Join parts. Second sentence.

    More text.
    """
    if not rest:
        raise ValueError("nothing to join")
    return sep.join(check(first, rest))

class Box:
    """A box."""

    def _hidden(self):
        return None
'''


@pytest.fixture
def sample_items(tmp_path):
    (tmp_path / "sample.py").write_text(SAMPLE_MODULE)
    (tmp_path / "_private.py").write_text("def f():\n    pass\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "inside.py").write_text("def f():\n    pass\n")
    return {item.qualname: item for item in stdlib_items(tmp_path)}


def test_items_carry_signature_calls_returns_and_raises(sample_items):
    assert list(sample_items) == ["join", "Box", "Box._hidden"]  # source order; nothing private, broken or of a test
    item = sample_items["join"]
    assert item.signature == "join(first, *rest, sep=os.sep, **options)"
    assert item.calls == ("ValueError", "sep.join", "check")
    assert item.returns == ("sep.join(check(first, rest))",)
    assert item.raises == ("ValueError",)
    assert "Join parts" in item.source
    assert "Join parts" not in item.body
    assert not sample_items["Box._hidden"].is_public


def test_answers_are_read_off_the_item(sample_items):
    assert stdlib_phrasing.arguments_answer(sample_items["join"]) == (
        "`join` takes 4 arguments:\n- `first`: required\n- `*rest`: extra positional arguments\n"
        "- `sep`: default `os.sep`\n- `**options`: extra keyword arguments"
    )
    assert stdlib_phrasing.docstring_answer(sample_items["join"]) == 'Its docstring says: "Join parts."'


def test_renaming_an_argument_changes_only_that_name(sample_items):
    turns = stdlib_phrasing._rename_argument(random.Random(0), sample_items["join"])
    assert turns is not None
    new = turns[1].split("`")[3]
    assert turns[1].count(f"{new}") == 3  # the sentence, the parameter, the one use
    assert "import" not in turns[1]


def test_same_seed_same_conversations():
    first = build_conversations(seed=0, split="all")
    stdlib_conversations._all_conversations.cache_clear()
    assert build_conversations(seed=0, split="all") == first


def test_size_and_categories():
    conversations = build_conversations(split="all")
    counts = Counter(conversation["category"] for conversation in conversations)
    assert 9_000 <= len(conversations) <= 10_000
    assert set(counts) == set(MAKERS)
    assert min(counts.values()) >= 500
    assert len({conversation["id"] for conversation in conversations}) == len(conversations)
    assert build_conversations(split="all", limit=5) == conversations[:5]


def test_splits_share_no_module():
    train = {conversation["module"] for conversation in build_conversations(split="train")}
    heldout = {conversation["module"] for conversation in build_conversations(split="heldout")}
    assert heldout
    assert not train & heldout
    assert all(is_heldout(module) for module in heldout)


def test_snippets_never_cross_the_split():
    modules = {module for item in stdlib_items() if is_heldout(module := item.module)}
    for conversation in build_conversations(split="train"):
        if conversation["category"] == "retrieval":
            lines = [line for line in conversation["messages"][0]["content"].splitlines() if line.startswith("[")]
            named = {line.split("`")[1] for line in lines}
            assert not any(name.rpartition(".")[0] in modules for name in named)


def test_turns_alternate_and_answers_do_not_repeat_themselves():
    for conversation in build_conversations(split="all"):
        roles = [message["role"] for message in conversation["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message["content"].strip() for message in conversation["messages"])
        answers = [message["content"] for message in conversation["messages"] if message["role"] == "assistant"]
        assert not any(has_repeated_run(answer) for answer in answers)


def test_repeated_run_needs_eight_equal_pieces():
    assert has_repeated_run("a b c d e f g h a b c d e f g h".replace("a", "x"), run_pieces=7)
    assert not has_repeated_run("a b c d e f g h")


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="wanted 'train', 'heldout' or 'all'"):
        build_conversations(split="test")


def test_committed_questions_are_spec_bench_lines():
    questions = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    assert len(questions) == 96
    assert [question["question_id"] for question in questions] == list(range(1, 97))
    assert len({question["category"] for question in questions}) >= 6
    assert all(set(question) == {"question_id", "category", "turns"} for question in questions)
    assert any(len(question["turns"]) > 1 for question in questions)
    assert all(turn.strip() for question in questions for turn in question["turns"])


def test_questions_do_not_occur_in_training():
    trained = {c["messages"][0]["content"] for c in build_conversations(split="train")}
    questions = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    assert not trained & {question["turns"][0] for question in questions}
