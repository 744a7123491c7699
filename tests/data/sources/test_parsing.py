"""Both conversation formats are read; each kind of invalid conversation is one sentence that names the place."""

import json
from typing import Any

import pytest

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.sources.files import InvalidConversation
from draftsmith.data.sources.record_reader import parse_conversation
from draftsmith.recipes.schema import ColumnsRecipe

SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
OPENAI = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def sharegpt(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": name, "value": text} for name, text in turns]}


def test_both_formats_give_the_same_conversation() -> None:
    first, second = (parse_conversation(record, "here") for record in (SHAREGPT, OPENAI))
    assert first == second
    assert first.turns == (Turn("user", "Hi"), Turn("assistant", "Hello"))
    assert first.messages == OPENAI["messages"]


def test_system_turn_trailing_question_and_text_parts() -> None:
    record = {
        "messages": [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Bye"},
        ]
    }
    conversation = parse_conversation(record, "here")
    assert [turn.role for turn in conversation.turns] == ["system", "user", "assistant", "user"]
    assert conversation.turns[1].content == "Hi"


def test_id_depends_on_the_prompts_only() -> None:
    ids = [
        parse_conversation(sharegpt(("human", question), ("gpt", answer)), "here").id
        for question, answer in (("Hi", "Hello"), ("Hi", "something else"), ("Hi!", "Hello"))
    ]
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 16


def test_tools_are_read_in_every_form() -> None:
    function = {"name": "sky", "parameters": {}}
    call = {"id": "1", "type": "function", "function": {"name": "sky", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": "Blue?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "assistant", "content": "Yes."},
    ]
    wrapped = parse_conversation({"messages": messages, "tools": [{"type": "function", "function": function}]}, "")
    told = json.dumps({"name": "sky", "arguments": {"city": "Bern"}})
    turns = [("human", "Blue?"), ("function_call", told), ("observation", ""), ("gpt", "Yes.")]
    bare = parse_conversation({**sharegpt(*turns), "tools": json.dumps([function])}, "")
    assert bare.tools == wrapped.tools
    assert bare.id == wrapped.id
    assert [turn.called for turn in wrapped.turns] == [[], ["sky"], [], []]
    assert wrapped.turns[1].tool_calls[0]["function"]["arguments"] == {"city": "Bern"}
    assert wrapped.turns[2].message == {"role": "tool", "content": "", "tool_call_id": "1"}
    assert wrapped.id != parse_conversation({"messages": messages}, "").id
    assert wrapped.is_answered


def test_lone_surrogates_are_replaced() -> None:
    record = json.loads('{"conversations": [{"from": "human", "value": "a\\ud800"}, {"from": "gpt", "value": "b"}]}')
    assert parse_conversation(record, "here").turns[0].content == "a?"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def openai(**turn: Any) -> dict[str, Any]:
    return {"messages": [turn]}


NO_END = "a tool's exchange without an answer"
ASSISTANT_FIRST, TOO_LONG = "first turn from the assistant", "longer than any model reads"


@pytest.mark.parametrize(
    ("record", "reason", "sentence"),
    [
        ([1], "not a mapping", "f line 3: a conversation must be a JSON object, not a list"),
        ({"id": 1, "text": ""}, "no conversation key", "this one has `id`, `text`"),
        ({"messages": "Hi"}, "not a list of turns", "`messages` must be a list of turns, not a string"),
        ({"messages": []}, "no turns", "f line 3: the conversation is empty"),
        (openai(role="user"), "malformed turn", "turn 1: a turn must be an object with `role` and `content`"),
        (sharegpt(("human", "a"), ("bing", "b")), "unknown role", 'turn 2: unknown role "bing", known ones are human,'),
        (sharegpt(("gpt", "a"), ("human", "b")), ASSISTANT_FIRST, "turn 1: the conversation begins with"),
        (sharegpt(("system", "s"), ("gpt", "a")), ASSISTANT_FIRST, "turn 2: the conversation begins with"),
        (sharegpt(("human", "a"), ("human", "b")), "two user turns in a row", "turn 2: two user turns in a row"),
        (sharegpt(("human", "a"), ("tool", "b")), "result without a call", "turn 2: a tool's result must come after"),
        (sharegpt(("human", "a"), ("gpt", "b"), ("tool", "c"), ("human", "d")), NO_END, "turn 4: after a call its"),
        (sharegpt(("human", "a"), ("function_call", "{}")), "malformed tool call", "turn 2: a tool call must be an"),
        (sharegpt(("human", "a"), ("function_call", "f()")), "malformed tool call", "the function_call must be JSON"),
        (openai(role="user", content="a", tool_calls=[{}]), "malformed tool call", "a user turn calls tools"),
        (openai(role="assistant", tool_calls={"name": "f"}), "malformed tool call", "must be a list, not an object"),
        (openai(role="assistant", tool_calls=[{"name": "f", "arguments": "["}]), "malformed tool call", "must be JSON"),
        (openai(role="assistant", tool_calls=[{"name": "f", "arguments": 1}]), "malformed tool call", "not a number"),
        (
            {**sharegpt(("human", "a")), "tools": {"name": "f"}},
            "malformed tools",
            "`tools` must be a list of functions",
        ),
        ({**sharegpt(("human", "a")), "tools": [{"f": 1}]}, "malformed tools", "each an object with a `name`"),
        (sharegpt(("human", "a"), ("gpt", "b"), ("gpt", "c")), "two assistant turns in a row", "turn 3: two assistant"),
        (sharegpt(("human", "a"), ("system", "b")), "system turn not first", "turn 2: a system turn may only be the"),
        (sharegpt(("system", "a")), "no user turn", "f line 3: the conversation has no user turn"),
        (sharegpt(("human", "a"), ("gpt", " \n")), "empty assistant turn", "turn 2: the gpt turn is empty"),
        (sharegpt(("human", ""), ("gpt", "b")), "empty user turn", "turn 1: the human turn is empty"),
        (sharegpt(("human", None), ("gpt", "b")), "turn is not text", "turn 1: the turn must be text, not null"),
        (openai(role="user", content=[{"type": "image_url"}]), "turn is not text", "the turn must be text, not a list"),
        # The sentence is short however long the value.
        ({"version": 1, "rows": [SHAREGPT]}, "no conversation key", "`rows`: if `rows` holds the conversations, write"),
        ({f"key{n}": 1 for n in range(10**5)}, "no conversation key", "`key11`, ...;"),
        ({"x" * 10**6: 1}, "no conversation key", "this one has `xxx"),
        (sharegpt((nested(900), "a")), "unknown role", "turn 1: unknown role a list, known ones are human,"),
        (sharegpt(("x" * 10**6, "a")), "unknown role", 'xxx", known ones are human,'),
        (sharegpt(("human", [{"type": "text", "text": nested(900)}])), "turn is not text", "must be text, not a list"),
        (sharegpt(*[("human", "a"), ("gpt", "b")] * 5001), TOO_LONG, "has 10,002 turns and 10,002"),
        (sharegpt(("human", "a" * 8_000_001)), TOO_LONG, "has 1 turns and 8,000,001 characters"),
    ],
)
def test_invalid_conversations_are_reported(record: Any, reason: str, sentence: str) -> None:
    with pytest.raises(InvalidConversation) as caught:
        parse_conversation(record, "f line 3")
    assert caught.value.reason == reason
    message = str(caught.value)
    assert sentence in message
    assert message.startswith("f line 3")
    assert "skip_invalid=true" in message
    assert "\n" not in message
    assert len(message) < 800


# --- prompts in columns ---


def parse(record: dict[str, Any], **columns: str) -> Conversation:
    return parse_conversation(record, "f line 3", ColumnsRecipe(**columns))


def short_form(conversation: Conversation) -> str:
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
def test_common_column_names_are_recognized(record: dict[str, Any], turns: str) -> None:
    assert short_form(parse(record)) == turns


def test_column_names_of_the_recipe_take_precedence() -> None:
    record = {"prompt": "no", "messages": [], "query": "a", "more": "b", "reply": "c", "rules": "s", "response": "no"}
    assert short_form(parse(record, prompt="query", input="more", answer="reply", system="rules")) == "s:s u:a\n\nb a:c"


def test_id_does_not_depend_on_the_format() -> None:
    assert parse({"turns": ["a", "c"]}).id == parse(sharegpt(("human", "a"), ("gpt", "b"), ("human", "c"))).id


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
def test_invalid_columns_are_reported(
    record: dict[str, Any], columns: dict[str, str], reason: str, sentence: str
) -> None:
    with pytest.raises(InvalidConversation, match=sentence.replace("(", r"\(").replace(")", r"\)")) as caught:
        parse(record, **columns)
    assert caught.value.reason == reason
