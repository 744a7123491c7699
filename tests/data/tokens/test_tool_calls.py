"""Tools: the calls of an answer as each template writes them, and the masks of conversations with tools."""

from dataclasses import replace
from typing import Any

import pytest
from support.chat_families import QWEN25_TOOLS, TOOL_FAMILIES
from support.tiny_tokenizers import CHATML, tiny_tokenizer

from draftsmith.data.sources.conversation import Conversation, Turn, tool_call
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.data.tokens.rows import tokenize_rows
from draftsmith.data.tokens.templates import TemplateRefusal, template_calls

WEATHER = {"name": "get_weather", "description": "Of a city.", "parameters": {"type": "object", "properties": {}}}
TOOLS = ({"type": "function", "function": WEATHER},)
ID = "abcdefghi"
CALLING = Turn("assistant", "", (tool_call("get_weather", {"city": "Zürich", "days": 2}, ID),))
RESULT = Turn("tool", '{"sky": "clear"}', name="get_weather", tool_call_id=ID)
TALK = Conversation(
    "id",
    (
        Turn("user", "Is it fine?"),
        CALLING,
        RESULT,
        Turn("assistant", "It is."),
        Turn("user", "Bye"),
        Turn("assistant", "Bye."),
    ),
    tools=TOOLS,
)
# The text that each family writes for the call, with its end token.
CALLS = {
    "Qwen2.5": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
    "<|im_end|>",
    "Llama 3.1": '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}<|eot_id|>',
    "Mistral v0.3": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}, '
    '"id": "abcdefghi"}]</s>',
    "Qwen3-Coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call><|im_end|>",
}


def decode_answers(tokenizer: Any, conversation: Conversation) -> list[str]:
    rows, _ = tokenize_rows(tokenizer, conversation, 4096)
    return [tokenizer.decode(each) for row in rows for each in row.answers()]


@pytest.fixture(params=CALLS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_tool_call_carries_loss_and_its_result_does_not(family: str) -> None:
    """Every answer follows its own prompt, also where tools move to the last question (Mistral)."""
    tokenizer = TOOL_FAMILIES[family].tokenizer()
    lead = " " if family.startswith("Mistral") else ""
    answers = [CALLS[family], *(f"{lead}{text}{tokenizer.eos_token}" for text in ("It is.", "Bye."))]
    assert decode_answers(tokenizer, TALK) == answers
    assert decode_answers(tokenizer, replace(TALK, turns=TALK.turns[:2])) == answers[:1]
    rows, _ = tokenize_rows(tokenizer, TALK, 4096)
    last = rows[-1].input_ids
    assert tokenizer.decode(last).count("clear") == 1
    assert last[: -len(rows[-1].answers()[-1])] == prompt_token_ids(tokenizer, TALK.turns[:5], TOOLS)
    assert prompt_token_ids(tokenizer, TALK.turns[:1], TOOLS) != prompt_token_ids(tokenizer, TALK.turns[:1])


def test_calls_are_parsed_as_the_template_writes_them(family: str) -> None:
    tokenizer = TOOL_FAMILIES[family].tokenizer()
    form = template_calls(tokenizer)
    assert form is not None
    said = CALLS[family].removesuffix(tokenizer.eos_token)
    assert form.names(said) == ["get_weather"]
    assert form.names("It is {fine}.") == []
    turn = form.turn(said, [ID])
    if family == "Qwen3-Coder":  # invalid JSON: the text stays
        assert turn == Turn("assistant", said)
    else:
        assert turn == CALLING
    assert form.turn("It is.", []) == Turn("assistant", "It is.")
    broken = said[: said.index("Zür")]
    assert form.turn(broken, []) == Turn("assistant", broken)


def test_calls_after_thoughts_carry_loss() -> None:
    """Qwen3 keeps thoughts before a call until the next question, and removes them after it, from prompts too."""
    tokenizer = TOOL_FAMILIES["Qwen3"].tokenizer()
    call, thoughts = CALLS["Qwen2.5"], "<think>\nLook.\n</think>\n\n"
    form = template_calls(tokenizer)
    assert form is not None
    turn = form.turn(thoughts + call.removesuffix("<|im_end|>"), [ID])
    assert turn == Turn("assistant", thoughts.strip(), CALLING.tool_calls)
    ids = tokenizer(thoughts + call)["input_ids"]
    thinking = Conversation("id", (TALK.turns[0], turn, *TALK.turns[2:4]), tools=TOOLS, answer_ids=(ids, None))
    assert decode_answers(tokenizer, thinking) == [
        thoughts + call,
        "<think>\n\n</think>\n\nIt is.<|im_end|>",
    ]
    assert decode_answers(tokenizer, TALK)[0] == call
    later = replace(thinking, turns=(*thinking.turns, *TALK.turns[4:]), answer_ids=(ids, None, None))
    assert len(tokenize_rows(tokenizer, later, 4096)[0]) == 2  # without the thoughts, as the later prompt is


def test_several_calls_after_text() -> None:
    form = template_calls(TOOL_FAMILIES["Qwen2.5"].tokenizer())
    assert form is not None
    call = '<tool_call>\n{"name": "%s", "arguments": {"text": "<tool_call> {}"}}\n</tool_call>'
    turn = form.turn("Let me see.\n" + call % "a" + "\n" + call % "b", ["first"])
    assert (turn.content, turn.called) == ("Let me see.", ["a", "b"])
    assert [call["id"] for call in turn.tool_calls] == ["first", "call00002"]
    mistral = template_calls(TOOL_FAMILIES["Mistral v0.3"].tokenizer())
    assert mistral is not None
    assert mistral.names('[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]') == ["a", "b"]


def test_template_without_tools_is_refused() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    assert template_calls(tokenizer) is None
    later = "{% elif m.role == 'tool' and loop.index0 + 2 >= messages | length %}"  # earlier results are left out
    dropping = replace(TOOL_FAMILIES["Qwen2.5"], template=QWEN25_TOOLS.replace("{% elif m.role == 'tool' %}", later))
    assert template_calls(dropping.tokenizer()) is None
    with pytest.raises(TemplateRefusal, match="does not write tools, their calls or their results"):
        tokenize_rows(tokenizer, TALK, 4096)
