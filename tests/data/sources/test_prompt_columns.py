"""Prompts in columns: the usual names, the recipe's own, answers that are there or not, and what is refused."""

from typing import Any

import pytest
from support.places import MATERIAL

from draftsmith.data.sources.conversation import Conversation, InvalidConversation, parse_conversation
from draftsmith.recipes.schema import ColumnsRecipe

SPEC_BENCH = MATERIAL / "spec_bench" / "question.jsonl"


def parse(record: dict[str, Any], **columns: str) -> Conversation:
    return parse_conversation(record, "f line 3", ColumnsRecipe(**columns))


def short(conversation: Conversation) -> str:
    return " ".join(f"{turn.role[0]}:{turn.content}" for turn in conversation.turns)


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"prompt": "a"}, "u:a"),
        ({"instruction": "a", "input": "b", "output": "c"}, "u:a\n\nb a:c"),
        ({"instruction": "a", "input": "", "output": "c"}, "u:a a:c"),
        ({"instruction": "a", "context": "b", "response": "c", "category": "qa"}, "u:a\n\nb a:c"),
        ({"question": "a", "answer": "b"}, "u:a a:b"),
        ({"system_prompt": "s", "question": "a", "response": "b"}, "s:s u:a a:b"),
        ({"system_prompt": " ", "question": "a"}, "u:a"),
        ({"prompt": "a", "completion": ""}, "u:a"),
        ({"prompt": "a", "answer": None}, "u:a"),
        ({"question": "a", "answer": 3}, "u:a"),
        ({"question_id": 81, "category": "writing", "turns": ["a", "b", "c"], "reference": ["x"]}, "u:a a: u:b a: u:c"),
        ({"turns": ["a", "b"], "answer": ["x", "y"]}, "u:a a:x u:b a:y"),
        ({"turns": ["a", "b"], "answer": ["", "y"]}, "u:a a: u:b a:y"),
        ({"messages": None, "prompt": "a"}, "u:a"),
        ({"messages": [{"role": "user", "content": "m"}], "prompt": "a"}, "u:m"),
    ],
)
def test_the_usual_names(record: dict[str, Any], turns: str) -> None:
    assert short(parse(record)) == turns


def test_the_recipes_names_come_first() -> None:
    record = {"prompt": "no", "messages": [], "query": "a", "more": "b", "reply": "c", "rules": "s", "response": "no"}
    assert short(parse(record, prompt="query", input="more", answer="reply", system="rules")) == "s:s u:a\n\nb a:c"


def test_the_id_is_that_of_the_same_prompts_in_another_format() -> None:
    listed = {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"},
            {"from": "human", "value": "c"},
        ]
    }
    assert parse({"turns": ["a", "c"]}).id == parse(listed).id


@pytest.mark.parametrize(
    ("record", "columns", "reason", "sentence"),
    [
        ({"text": "a"}, {}, "no conversation key", "or a prompt column (data.conversations.columns.prompt names it)"),
        ({"text": "a"}, {"prompt": "query"}, "no prompt column", "no column `query`, which .* names, only `text`"),
        ({"prompt": "a"}, {"input": "more"}, "no input column", "no column `more`"),
        ({"prompt": "a"}, {"answer": "reply"}, "no answer column", "no column `reply`"),
        ({"prompt": " "}, {}, "empty user turn", "`prompt` is empty"),
        ({"turns": ["a", ""]}, {}, "empty user turn", "`turns` is empty"),
        ({"turns": []}, {}, "no turns", "the conversation is empty"),
        ({"prompt": 3}, {}, "turn is not text", "f line 3, `prompt`: the turn must be text, not a number"),
        ({"query": None}, {"prompt": "query"}, "turn is not text", "must be text, not null"),
        ({"prompt": "a", "y": 3}, {"answer": "y"}, "answers do not fit the prompts", "text for each of the 1 prompt"),
        ({"turns": ["a", "b"], "y": ["x"]}, {"answer": "y"}, "answers do not fit the prompts", "each of the 2 prompts"),
    ],
)  # fmt: skip
def test_mistakes(record: dict[str, Any], columns: dict[str, str], reason: str, sentence: str) -> None:
    with pytest.raises(InvalidConversation, match=sentence.replace("(", r"\(").replace(")", r"\)")) as caught:
        parse(record, **columns)
    assert caught.value.reason == reason
