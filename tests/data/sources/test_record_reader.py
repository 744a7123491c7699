"""Records in every form give the same conversation; what a record says otherwise is applied, refused or counted."""

import json
from collections import Counter
from typing import Any

import pytest

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.sources.files import InvalidConversation
from draftsmith.data.sources.record_reader import NoQuestion, parse_conversation
from draftsmith.recipes.conversations import ColumnsRecipe

ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TURNS = (Turn("user", "q"), Turn("assistant", "a"))
SYSTEM = Turn("system", "s")


def parse(record: Any, keeps_answers: bool = True, **columns: str) -> Conversation:
    return parse_conversation(record, "f line 3", ColumnsRecipe(**columns), keeps_answers)


def messages(**of_answer: Any) -> dict[str, Any]:
    return {"messages": [ASKED, ANSWERED | of_answer]}


def sharegpt(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": name, "value": text} for name, text in turns]}


def one_turn(**turn: Any) -> dict[str, Any]:
    return {"messages": [turn]}


@pytest.mark.parametrize(
    "record",
    [
        messages(),  # OpenAI
        sharegpt(("human", "q"), ("gpt", "a")),
        {"conversations": [ASKED, ANSWERED], "id": "a"},  # SpecForge
        {"conversation": [ASKED, ANSWERED], "model": "m", "language": "English"},  # LMSYS, WildChat
        {"conversations": [{"role": "human", "value": "q"}, {"role": "gpt", "value": "a"}]},  # Pygmalion
        {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": json.dumps([ASKED, ANSWERED])},
        {"messages": [ASKED, ANSWERED], "conversations": [ASKED, {"from": "gpt", "value": "a"}]},
        {"prompt": [ASKED], "completion": [ANSWERED]},  # TRL
        [ASKED, ANSWERED],
        {"messages": [ASKED | {"from": None, "value": None}, ANSWERED | {"weight": None}]},  # a table
        {"messages": [ASKED, {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}]},
        {"messages": None, "conversations": None, "turns": '["q"]', "answer": "a"},
        {"prompt": "q", "question": "q", "instruction": "", "answer": "a"},
    ],
)  # fmt: skip
def test_turns_are_read_in_every_form(record: Any) -> None:
    assert parse(record).turns == TURNS
    assert parse(record).messages == [ASKED, ANSWERED]


def test_id_depends_on_the_prompts_only() -> None:
    ids = [parse(sharegpt(("human", asked), ("gpt", said))).id for asked, said in (("q", "a"), ("q", "b"), ("q!", "a"))]
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 16
    assert parse({"turns": ["a", "c"]}).id == parse(sharegpt(("human", "a"), ("gpt", "b"), ("human", "c"))).id


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"system": "s", "messages": [ASKED, ANSWERED]}, {}),
        ({"system_prompt": "s", "conversations": [ASKED, ANSWERED]}, {}),
        ({"rules": "s", "conversation": [ASKED, ANSWERED]}, {"system": "rules"}),
        ({"system": "s ", "messages": [{"role": "developer", "content": "s"}, ASKED, ANSWERED]}, {}),
        ({"system": "s", "system_prompt": "s", "question": "q", "answer": "a"}, {}),
    ],
)
def test_system_prompt_in_a_separate_key(record: dict[str, Any], columns: dict[str, str]) -> None:
    assert parse(record, **columns).turns == (SYSTEM, *TURNS)
    assert parse(record, **columns).id != parse(messages()).id
    assert parse({"system": " ", **messages()}).turns == TURNS


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"prompt": "a"}, "u:a"),
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
        ({"prompt": "Say yes or no.\nyes", "answer": "yes"}, "u:Say yes or no.\nyes a:yes"),
    ],
)
def test_common_column_names_are_recognized(record: dict[str, Any], turns: str) -> None:
    assert " ".join(f"{turn.role[0]}:{turn.content}" for turn in parse(record).turns) == turns


def test_columns_of_the_recipe_map_any_table() -> None:
    """Several columns of the prompt are joined in order; an empty one adds nothing."""
    record = {"prompt": "no", "messages": [], "query": "a", "more": "b", "reply": "c", "rules": "s", "response": "no"}
    columns = ColumnsRecipe(prompt=["query", "more"], answer="reply", system="rules")
    named = parse_conversation(record, "", columns)
    assert named.turns == (SYSTEM, Turn("user", "a\n\nb"), Turn("assistant", "c"))
    for empty in ("", None):
        assert parse_conversation(record | {"more": empty}, "", columns).turns[1] == Turn("user", "a")
    assert parse(record, prompt="query", answer="reply").turns == (Turn("user", "a"), Turn("assistant", "c"))
    with pytest.raises(InvalidConversation, match=r"columns=\{prompt: \[instruction, input\], answer: output\}"):
        parse({"instruction": "a", "input": "", "output": "c"})


@pytest.mark.parametrize(
    ("turns", "kept", "repair"),
    [
        ([("gpt", "x"), ("human", "a"), ("gpt", "b")], "ab", "leading assistant turns dropped"),
        ([("system", "s"), ("gpt", "x"), ("gpt", "y"), ("human", "a")], "sa", "leading assistant turns dropped"),
        ([("human", "a"), ("bing", "b"), ("bard", "c")], "ab", "ended before a second assistant turn in a row"),
        ([("human", "a"), ("human", "b"), ("gpt", "c")], "a", "ended before a second user turn in a row"),
        ([("human", "a"), ("gpt", "b"), ("human", " ")], "ab", "ended before an empty user turn"),
        ([("human", "a"), ("gpt", "b"), ("system", "c")], "ab", "ended before a later system turn"),
        ([("human", "a"), ("gpt", "b")], "ab", None),
    ],
)
def test_lists_of_turns_are_repaired_and_counted(turns: Any, kept: str, repair: str | None) -> None:
    repaired: Counter[str] = Counter()
    found = parse_conversation(sharegpt(*turns), "", None, True, None, repaired)
    assert "".join(turn.content for turn in found.turns) == kept
    assert repaired == ({repair: 1} if repair else {})


@pytest.mark.parametrize("turns", [[], [("gpt", "a")], [("system", "a")], [("human", ""), ("gpt", "b")]])
def test_record_without_a_question_is_no_error_of_a_file(turns: Any) -> None:
    with pytest.raises(NoQuestion):
        parse(sharegpt(*turns))


def test_tools_are_read_in_every_form() -> None:
    function = {"name": "sky", "parameters": {}}
    call = {"id": "1", "type": "function", "function": {"name": "sky", "arguments": '{"city": "Bern"}'}}
    turns = [
        {"role": "user", "content": "Blue?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "assistant", "content": "Yes."},
    ]
    wrapped = parse({"messages": turns, "tools": [{"type": "function", "function": function}]})
    told = json.dumps({"name": "sky", "arguments": {"city": "Bern"}})
    bare_turns = [("human", "Blue?"), ("function_call", told), ("observation", ""), ("gpt", "Yes.")]
    bare = parse({**sharegpt(*bare_turns), "tools": json.dumps([function])})
    assert bare.tools == wrapped.tools
    assert bare.id == wrapped.id
    assert [turn.called for turn in wrapped.turns] == [[], ["sky"], [], []]
    assert wrapped.turns[1].tool_calls[0]["function"]["arguments"] == {"city": "Bern"}
    assert wrapped.turns[2].message == {"role": "tool", "content": "", "tool_call_id": "1"}
    assert wrapped.id != parse({"messages": turns}).id
    assert wrapped.is_answered


def record_with_calls(*results: str) -> dict[str, Any]:
    calls = [{"id": name, "function": {"name": "f", "arguments": {}}} for name in ("a1", "a2")]
    told = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in results]
    return {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": calls}, *told, ANSWERED]}


def test_tool_results_follow_their_calls() -> None:
    """Templates without call ids identify results by their order."""
    assert [turn.content for turn in parse(record_with_calls("a2", "a1")).turns[2:4]] == ["A1", "A2"]
    unnamed = record_with_calls("a2", "a1")
    del unnamed["messages"][2]["tool_call_id"]
    assert [turn.content for turn in parse(unnamed).turns[2:4]] == ["A2", "A1"]
    with pytest.raises(InvalidConversation, match='turn 4: the result\'s tool_call_id "b" matches no call before'):
        parse(record_with_calls("a1", "b"))


@pytest.mark.parametrize(
    ("key", "value", "weight"),
    [
        ("weight", 0, 0),
        ("weight", 1, 1),
        ("weight", 0.0, 0),
        ("train", False, 0),
        ("training", True, 1),
        ("loss", 0, 0),
    ],
)
def test_weights_of_answers_are_read(key: str, value: Any, weight: int) -> None:
    found = parse(messages(**{key: value}))
    assert [turn.weight for turn in found.turns] == [1, weight]
    assert found.messages[1] == ANSWERED | ({} if weight else {"weight": 0})
    assert parse(messages(**{key: value}), keeps_answers=False).turns == TURNS


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_of_answers_are_read(key: str) -> None:
    found = parse(messages(**{key: "hm"}))
    assert found.turns[1] == Turn("assistant", "a", reasoning_content="hm")
    assert found.messages[1] == ANSWERED | {"reasoning_content": "hm"}
    assert parse({"prompt": "q", "answer": "a", "reasoning_content": "hm"}).turns == found.turns


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


BAD_CALL, NO_KEY, NOT_TEXT = "malformed tool call", "no conversation key", "turn is not text"
TOO_LONG = "longer than any model reads"
INVALID = [
    ({"prompt": "q", "history": [["a", "b"]]}, "comes with a history", "write all turns into one list"),
    ({"messages": [ASKED], "functions": [{"name": "f"}]}, "tools of OpenAI's API of 2023", "write `tools`"),
    (messages(function_call={"name": "f"}), NOT_TEXT, "the turn has `function_call`"),
    ([1], "not a mapping", "f line 3: a conversation must be a JSON object, not a list"),
    ({"id": 1, "text": ""}, NO_KEY, "this one has `id`, `text`"),
    (ASKED, NO_KEY, "this is one turn: a line must hold a whole conversation"),
    ({"messages": "Hi"}, "not a list of turns", "`messages` must be a list of turns, not a string"),
    ({"conversations": "[{'from': 'human'}]"}, "not a list of turns", "`conversations` must be JSON"),
    (one_turn(role="user"), "malformed turn", "turn 1: a turn must be an object with `role` and `content`"),
    (messages(value="b"), "malformed turn", "`role`, `content`, `value` of a turn contradict each other"),
    ({"messages": [ASKED], "conversation": [ASKED, ANSWERED]}, "two lists of turns", "hold different turns"),
    ({"system": "x", "messages": [{"role": "system", "content": "y"}, ASKED]}, "two system prompts", "remove"),
    ({"system": "x", "system_prompt": "y", "prompt": "q"}, "several system columns", "columns.system"),
    (sharegpt(("human", "a"), ("alien", "b")), "unknown role", 'turn 2: unknown role "alien", known ones are human,'),
    (sharegpt(("human", "a"), ("tool", "b")), "result without a call", "turn 2: a tool's result must follow"),
    (
        sharegpt(("human", "a"), ("gpt", "b"), ("tool", "c"), ("human", "d")),
        "a tool's exchange without an answer",
        "turn 4: a tool call must",
    ),
    (one_turn(role="user", content=[{"type": "image_url"}]), NOT_TEXT, "turn 1: a part of the turn must be text, not"),
    (sharegpt(("human", "a"), ("function_call", "f()")), BAD_CALL, "the function_call must be JSON"),
    (one_turn(role="user", content="a", tool_calls=[{}]), BAD_CALL, "a user turn calls tools"),
    (one_turn(role="assistant", tool_calls={"name": "f"}), BAD_CALL, "must be a list, not an object"),
    (one_turn(role="assistant", tool_calls=[{"name": "f", "arguments": 1}]), BAD_CALL, "not a number"),
    ({"prompt": "a", "tools": {"name": "f"}}, "malformed tools", "`tools` must be a list of functions"),
    # Keys that cannot be followed.
    ({"messages": [ASKED, ANSWERED], "images": ["cat.png"]}, "comes with media", "`images` holds media"),
    (messages(image="x.png"), NOT_TEXT, "turn 2: the turn has `image`"),
    ({"prompt": "q", "documents": [{}]}, "comes with documents", "write their text into a turn"),
    ({"prompt": "q", "chat_template_kwargs": {"a": 1}}, "sets variables of the template", "set target."),
    ({"instruction": "q", "output": "a", "kto_tag": False}, "answer marked as bad", "`kto_tag` is false"),
    (messages(weight=0.5), "malformed weight", "turn 2: `weight` of the assistant's turn must be 0 or 1"),
    (messages(train="no"), "malformed weight", "`train` of the assistant's turn must be 0 or 1"),
    (messages(train=True, weight=0), "malformed weight", "`weight`, `train` of the assistant's turn must be"),
    (messages(train_detail=[{"begin_offset": 0}]), "parts of a turn are learned", "`train_detail` selects"),
    (
        {"messages": [ASKED | {"train": True}, ANSWERED]},
        "malformed weight",
        "turn 1: `train` of the user's turn must be 0,",
    ),
    (messages(thinking="x", reasoning="y"), "malformed thoughts", "two fields hold different thoughts"),
    ({"messages": [ASKED | {"thinking": "x"}]}, "malformed thoughts", "a user turn has thoughts"),
    # Prompts in columns.
    ({"prompt": " "}, "empty user turn", "`prompt` is empty"),
    ({"prompt": 3}, NOT_TEXT, "f line 3, `prompt`: the turn must be text, not a number"),
    ({"prompt": "Add.", "question": "a"}, "several prompt columns", "`prompt`, `question` could"),
    ({"prompt": "q", "response": "a", "answer": "b"}, "several answer columns", "columns.answer"),
    # The sentence is short however long the value.
    ({"version": 1, "rows": [messages()]}, NO_KEY, "`rows`: if `rows` holds the conversations, write"),
    ({f"key{n}": 1 for n in range(10**5)}, NO_KEY, "`key11`, ...;"),
    (sharegpt((nested(900), "a")), "unknown role", "turn 1: unknown role a list, known ones are human,"),
    (sharegpt(("human", [{"type": "text", "text": nested(900)}])), NOT_TEXT, "turn must be text, not"),
    (sharegpt(*[("human", "a"), ("gpt", "b")] * 5001), TOO_LONG, "has 10,002 turns and 10,002"),
    (sharegpt(("human", "a" * 8_000_001)), TOO_LONG, "has 1 turns and 8,000,001 characters"),
]
OF_NAMED_COLUMNS = [
    ({"text": "a"}, "no prompt column", "columns.prompt names, only `text`", {"prompt": "query"}),
    ({"prompt": "a"}, "no answer column", "there is no column `reply`", {"answer": "reply"}),
    ({"query": None}, NOT_TEXT, "must be text, not null", {"prompt": "query"}),
    ({"prompt": "a", "y": 3}, "answers do not fit the prompts", "text for each of the 1 prompt", {"answer": "y"}),
    (
        {"turns": ["a", "b"], "y": ["x"]},
        "answers do not fit the prompts",
        "text for each of the 2 prompts",
        {"answer": "y"},
    ),
]


@pytest.mark.parametrize(
    ("record", "reason", "sentence", "columns"), [*((*case, {}) for case in INVALID), *OF_NAMED_COLUMNS]
)
def test_invalid_records_are_reported(record: Any, reason: str, sentence: str, columns: dict[str, str]) -> None:
    with pytest.raises(InvalidConversation) as caught:
        parse(record, **columns)
    assert caught.value.reason == reason
    message = str(caught.value)
    assert sentence in message
    assert message.startswith("f line 3")
    assert "skip_invalid=true" in message
    assert "\n" not in message
    assert len(message) < 800
