"""Rendering by the target's chat template, and probes of its text around answers, thoughts and calls.

Thoughts in a separate field of a turn are passed to the template under the name that it reads, or in the content
between `<think>` and `</think>` if the template expects them there.
"""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from draftsmith.data.sources.conversation import Conversation, Tool, Turn
from draftsmith.data.tokens.bounded import EndlessTemplate, bounded
from draftsmith.data.tokens.tool_calls import CallForm, call_form
from draftsmith.errors import UserError

PROBE = (Turn("user", "Say hi"), Turn("assistant", "Hello"))
THOUGHTS = "Xq7ThoughtsXq7"
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names that templates use
THOUGHTS_IN_CONTENT = "<think>\n{thoughts}\n</think>\n\n{content}"
Tools = tuple[Tool, ...]


class TemplateProblem(UserError):
    """The chat template cannot be followed through this conversation; others may pass."""


class TemplateRefusal(TemplateProblem):
    """The chat template raised, as many do on a system turn."""


def render(tokenizer: Any, turns: tuple[Turn, ...], add_generation_prompt: bool = False, tools: Tools = ()) -> str:
    """Render a conversation by the chat template.

    Raises:
        UserError: There is no template.
        TemplateRefusal: The template raises, or does not write tools.
        EndlessTemplate: The template does not end.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"the target's tokenizer ({tokenizer.name_or_path or 'unnamed'}) has no chat template: "
            "use an instruct model, or set tokenizer.chat_template and save the tokenizer in the model's folder"
        )
    way_out = "remove such turns, or set data.conversations.skip_invalid=true to skip and count them"
    if tools and template_calls(tokenizer) is None:
        raise TemplateRefusal(
            "the target's chat template does not write tools, their calls or their results, which conversations have: "
            f"{way_out}"
        )
    try:
        return _render(tokenizer, Conversation("", turns, tools=tools), add_generation_prompt)
    except (EndlessTemplate, TemplateProblem):
        raise
    except Exception as error:  # of any kind: templates are programs
        roles = ", ".join([turn.role for turn in turns[:4]] + ["..."] * (len(turns) > 4))
        raise TemplateRefusal(
            f"the target's chat template refuses a conversation with the roles {roles}: {error}; {way_out}"
        ) from None


def _render(tokenizer: Any, conversation: Conversation, generation_prompt: bool) -> str:
    messages, tools = template_messages(tokenizer, conversation.turns), list(conversation.tools) or None
    return bounded(
        lambda: tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
        )
    )


def template_messages(tokenizer: Any, turns: tuple[Turn, ...]) -> list[dict[str, Any]]:
    """Return the turns as messages, thoughts where the template looks for them.

    Raises:
        TemplateProblem: The template has no field for thoughts.
    """
    messages = [turn.message for turn in turns]
    if not any(turn.reasoning_content for turn in turns):
        return messages
    field = thoughts_field(tokenizer)
    for message in messages:
        thoughts = message.pop("reasoning_content", "")
        if thoughts:
            message |= _thoughts_fields(field, thoughts, message["content"])
    return messages


def thoughts_field(tokenizer: Any) -> str:
    """Return the field of a message in which the template looks for thoughts.

    Raises:
        TemplateProblem: The template does not write the thoughts of any answer, not even the last one.
    """
    field = _find_thoughts_field(tokenizer, str(tokenizer.chat_template))
    if field is None:
        raise TemplateProblem(
            "the target's chat template does not write the thoughts that conversations have as `reasoning_content`: "
            "write them into `content` between the tokens that the target thinks between, or remove the field"
        )
    return field


def _thoughts_fields(field: str, thoughts: str, content: str) -> dict[str, str]:
    """Return the fields of a message that hold these thoughts and this content."""
    if field == "content":
        return {"content": THOUGHTS_IN_CONTENT.format(thoughts=thoughts.strip("\n"), content=content)}
    return {field: thoughts, "content": content}


@lru_cache(maxsize=8)
def _find_thoughts_field(tokenizer: Any, template: str) -> str | None:
    """Find the field of `thoughts_field`; None if there is none."""
    question, answer = (turn.message for turn in PROBE)
    fields = [field for field in THOUGHT_FIELDS if field in template] + ["content"] * ("</think>" in template)
    for field in fields:
        thinking = answer | _thoughts_fields(field, THOUGHTS, answer["content"])
        try:
            if THOUGHTS in str(bounded(partial(tokenizer.apply_chat_template, [question, thinking], tokenize=False))):
                return field
        except Exception:  # of any kind: templates are programs
            continue
    return None


def joined_thoughts(tokenizer: Any, thoughts: str, content: str) -> str | None:
    """Return an answer with its thoughts as the target generates both, which a server gave apart.

    Returns:
        The text that the template writes after the prompt, its end token left out; None if the template does not write
        thoughts, or writes another prompt before them.
    """
    probe = (*PROBE[:1], replace(PROBE[1], reasoning_content=THOUGHTS))
    try:
        prompt = render(tokenizer, probe[:1], add_generation_prompt=True)
        text = render(tokenizer, probe)
    except TemplateProblem:
        return None
    before, _, rest = text.removeprefix(prompt).partition(THOUGHTS)
    between, found, _ = rest.partition(PROBE[1].content)
    return before + thoughts.strip("\n") + between + content if found and text.startswith(prompt) else None


def missing_header_sentence(tokenizer: Any) -> str:
    """Return a warning if the template writes the header of an answer in no generation prompt, else nothing."""
    without_prompt = render(tokenizer, PROBE[:1])
    header = template_answer_lead(tokenizer).strip()
    if not header or render(tokenizer, PROBE[:1], add_generation_prompt=True) != without_prompt:
        return ""
    return (
        f"the chat template writes the header of an answer ({header.splitlines()[0]}) in no generation prompt, so that "
        "the header carries loss and prompts end without it: set target.chat_template to one that writes it "
        "where add_generation_prompt is true"
    )


def template_calls(tokenizer: Any) -> CallForm | None:
    """Return the template's form of tool calls; None if it does not write tools, calls and results."""
    return _find_call_form(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _find_call_form(tokenizer: Any, template: str) -> CallForm | None:
    return call_form(partial(_render, tokenizer))


def template_answer_lead(tokenizer: Any) -> str:
    """Return the text that the template writes between the generation prompt and an answer, as the space of Llama 2.

    The target generates it too; it must be removed from the answer before the template adds it again.
    """
    prompt = render(tokenizer, PROBE[:1], add_generation_prompt=True)
    text = render(tokenizer, PROBE)
    answer = text.rfind(PROBE[1].content)
    return text[len(prompt) : answer] if answer >= 0 and text.startswith(prompt) else ""


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Tokenise rendered text, in which the template has written the BOS, if there is one.

    Raises:
        UserError: The text contains half a surrogate pair, as from a command line that is not UTF-8.
    """
    try:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    except TypeError:
        if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
            raise
        raise UserError(
            "a text to tokenize is not valid UTF-8 (it contains half a surrogate pair): convert it"
        ) from None


@lru_cache(maxsize=8)
def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of all special tokens."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


@lru_cache(maxsize=8)
def longest_token_characters(tokenizer: Any) -> int:
    """Return the length of the longest token, in characters."""
    return max(map(len, tokenizer.get_vocab()))
