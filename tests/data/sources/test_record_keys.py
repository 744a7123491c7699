"""Keys that change a record's meaning are applied or refused; all others are counted by name."""

import json
from collections import Counter
from typing import Any

import pytest

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.sources.files import InvalidConversation
from draftsmith.data.sources.record_reader import parse_conversation
from draftsmith.recipes.schema import ColumnsRecipe

ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TURNS = (Turn("user", "q"), Turn("assistant", "a"))


def parse(record: Any, keeps_answers: bool = True, **columns: str) -> Conversation:
    return parse_conversation(record, "f line 3", ColumnsRecipe(**columns), keeps_answers)


def messages(**of_answer: Any) -> dict[str, Any]:
    return {"messages": [ASKED, ANSWERED | of_answer]}


@pytest.mark.parametrize(
    "record",
    [
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
    ],
)  # fmt: skip
def test_turns_are_read_in_every_form(record: Any) -> None:
    assert parse(record).turns == TURNS


def test_list_of_turns_with_another_name() -> None:
    record = {"dialogue": [ASKED, ANSWERED], "messages": [ASKED]}
    assert parse(record, messages="dialogue").turns == TURNS
    del record["messages"]
    with pytest.raises(InvalidConversation, match=r"if `dialogue` holds the turns, set data.*columns.messages to"):
        parse(record)
    with pytest.raises(InvalidConversation, match=r"no column `chat`, which .*columns.messages names, only `dialogue`"):
        parse(record, messages="chat")


SYSTEM = Turn("system", "s")


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
    assert parse(record, **columns).id != parse({"messages": [ASKED, ANSWERED]}).id
    assert parse({"system": " ", "messages": [ASKED, ANSWERED]}).turns == TURNS


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
    assert found.is_learned == bool(weight)
    assert found.messages[1] == ANSWERED | ({} if weight else {"weight": 0})
    assert parse(messages(**{key: value}), keeps_answers=False).turns == TURNS


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_of_answers_are_read(key: str) -> None:
    found = parse(messages(**{key: "hm"}))
    assert found.turns[1] == Turn("assistant", "a", reasoning_content="hm")
    assert found.messages[1] == ANSWERED | {"reasoning_content": "hm"}
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "a"}]
    assert parse(messages(content=parts)).turns == found.turns
    assert parse({"prompt": "q", "answer": "a", "reasoning_content": "hm"}).turns == found.turns


def test_llamafactory_history_is_read() -> None:
    record = {"instruction": "q", "output": "a", "system": "s", "history": [["q0", "a0"]]}
    earlier = (Turn("user", "q0"), Turn("assistant", "a0"))
    assert parse(record).turns == (SYSTEM, *earlier, *TURNS)
    assert parse(record | {"history": []}).turns == (SYSTEM, *TURNS)


def test_function_calls_of_the_older_api() -> None:
    call = {"name": "sky", "arguments": '{"city": "Bern"}'}
    turns = [
        ASKED,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "sky", "content": "blue"},
    ]
    found = parse({"messages": [*turns, ANSWERED], "functions": [{"name": "sky", "parameters": {}}]})
    newer = [ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "name": "sky", "content": "blue"}]
    assert found == parse({"messages": [*newer, ANSWERED], "tools": [{"name": "sky", "parameters": {}}]})
    assert found.tools


def record_with_calls(*results: str) -> dict[str, Any]:
    calls = [{"id": name, "function": {"name": "f", "arguments": {}}} for name in ("a1", "a2")]
    told = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in results]
    return {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": calls}, *told, ANSWERED]}


def test_tool_results_follow_their_calls() -> None:
    """Templates without call ids identify results by their order."""
    assert [turn.content for turn in parse(record_with_calls("a2", "a1")).turns[2:4]] == ["A1", "A2"]
    assert parse(record_with_calls("a2", "a1")) == parse(record_with_calls("a1", "a2"))
    unnamed = record_with_calls("a2", "a1")
    del unnamed["messages"][2]["tool_call_id"]
    assert [turn.content for turn in parse(unnamed).turns[2:4]] == ["A2", "A1"]
    with pytest.raises(InvalidConversation, match='turn 4: the result\'s tool_call_id "b" is none of the calls before'):
        parse(record_with_calls("a1", "b"))


ALPACA = "### Instruction:\nAdd.\n\n### Output:\nreturn a + b"


@pytest.mark.parametrize(
    ("record", "reason", "sentence"),
    [
        ({"messages": [ASKED, ANSWERED], "images": ["cat.png"]}, "comes with media", "`images` belongs to the turns"),
        (messages(image="x.png"), "turn is not text", "turn 2: the turn has `image`"),
        (messages(refusal="no"), "turn is not text", "the turn has `refusal`"),
        ({"prompt": "q", "documents": [{}]}, "comes with documents", "write them into a turn"),
        ({"prompt": "q", "chat_template_kwargs": {"a": 1}}, "sets variables of the template", "set target."),
        ({"prompt": "q", "completion": "a", "label": False}, "answer marked as bad", "`label` is false"),
        ({"instruction": "q", "output": "a", "kto_tag": False}, "answer marked as bad", "`kto_tag` is false"),
        (messages(weight=0.5), "weight other than 0 or 1", "turn 2: `weight` of a turn must be 0"),
        (messages(train="no"), "weight other than 0 or 1", 'true or false, not "no"'),
        (messages(train=True, weight=0), "malformed turn", "`weight`, `train` of a turn contradict each other"),
        (messages(train_detail=[{"begin_offset": 0}]), "parts of a turn are learned", "`train_detail` says which"),
        ({"messages": [ASKED | {"train": True}, ANSWERED]}, "learns a user turn", "turn 1: `train` asks to"),
        (messages(thinking="x", reasoning="y"), "malformed thoughts", "two fields hold different thoughts"),
        ({"messages": [ASKED | {"thinking": "x"}]}, "malformed thoughts", "a user turn has thoughts"),
        (messages(value="b"), "malformed turn", "`role`, `content`, `value` of a turn contradict each other"),
        (messages(**{"from": "human"}), "malformed turn", "`role`, `from`, `content` of a turn contradict"),
        ({"messages": [{"speaker": "me", "text": "q"}]}, "malformed turn", "this one has `speaker`, `text`"),
        ({"messages": [ASKED], "conversation": [ASKED, ANSWERED]}, "two lists of turns", "hold different turns"),
        ({"system": "x", "messages": [{"role": "system", "content": "y"}, ASKED]}, "two system prompts", "remove"),
        ({"system": "x", "system_prompt": "y", "prompt": "q"}, "several system columns", "columns.system"),
        ({"conversations": "[{'from': 'human'}]"}, "not a list of turns", "`conversations` must be JSON"),
        ({"prompt": ALPACA, "instruction": "Add."}, "several prompt columns", "`prompt`, `instruction` could"),
        ({"prompt": ALPACA, "output": "return a + b"}, "the prompt holds the answer", "`prompt` ends with the"),
        ({"prompt": "[INST] q [/INST] a", "completion": "a"}, "the prompt holds the answer", "ends with the"),
        ({"prompt": "q", "response": "a", "answer": "b"}, "several answer columns", "columns.answer"),
        ({"prompt": "q", "history": ["a"]}, "malformed history", "must be a list of pairs"),
        (ASKED, "no conversation key", "this is one turn: a line must hold a whole conversation"),
    ],
)  # fmt: skip
def test_unsupported_keys_are_refused(record: Any, reason: str, sentence: str) -> None:
    with pytest.raises(InvalidConversation) as caught:
        parse(record)
    assert caught.value.reason == reason
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("f line 3")


def test_keys_about_answers_are_ignored_in_self_distillation() -> None:
    turns = messages(weight=0.5, train_detail=[{"begin_offset": 0}])
    assert parse(turns | {"kto_tag": False}, keeps_answers=False).turns == TURNS
    assert parse({"prompt": "q", "response": "a", "answer": "b"}, keeps_answers=False).turns == TURNS


def test_prompt_column_named_by_the_recipe_and_harmless_keys() -> None:
    record = {"prompt": ALPACA, "instruction": "Add.", "output": "return a + b"}
    assert parse(record, prompt="instruction").turns == (Turn("user", "Add."), Turn("assistant", "return a + b"))
    assert parse({"prompt": "q", "question": "q", "instruction": "", "answer": "a"}).turns == TURNS
    assert parse({"prompt": "Say yes or no.\nyes", "answer": "yes"}).turns[1].content == "yes"


def test_unused_keys_are_counted() -> None:
    unread: Counter[str] = Counter()
    record = messages(weight=1, redacted=True, name="x") | {
        "system": "s",
        "tools": "",
        "model": "m",
        "tags": [],
        "turn": 1,
    }
    for _ in range(2):
        parse_conversation(record, "", None, True, unread)
    assert unread == {"model": 2, "turn": 2, "turns.redacted": 2, "turns.name": 2}
    parse_conversation({"prompt": "q", "answer": 3, "input": "", "source": "s"}, "", None, True, unread)
    assert (unread["answer"], unread["source"], unread["prompt"]) == (1, 1, 0)
    hostile: Counter[str] = Counter()
    parse_conversation(messages(**{f"k{n}": 1 for n in range(10**4)}) | {"x" * 10**5: 1}, "", None, True, hostile)
    assert len(hostile) <= 65 + 1
    assert max(map(len, hostile)) <= 46
