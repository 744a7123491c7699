"""Rendering by the target's chat template: the one way to a prompt, for distilling, training, serving and measuring.

What a template does is found by rendering probes, once for each template: how it writes an answer, where it reads
thoughts, and how it writes tool calls. Thoughts in a separate field of a turn are passed under the name that the
template reads, or in the content between `<think>` and `</think>` if it expects them there.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from draftsmith.data.sources.conversation import Conversation, Tool, Turn, common_length
from draftsmith.data.tokens.bounded import EndlessTemplate, bounded
from draftsmith.data.tokens.tool_calls import CallForm, call_form
from draftsmith.errors import UserError

PROBE = (Turn("user", "Say hi"), Turn("assistant", "Hello"))
MARK = "Xq7MarkXq7"  # a text that is in no template
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names that templates use
THOUGHTS_IN_CONTENT = "<think>\n{thoughts}\n</think>\n\n{content}"
SKIP_SUCH = "or set data.conversations.skip_invalid=true to skip and count such conversations"
Tools = tuple[Tool, ...]


class TemplateProblem(UserError):
    """Error of the chat template with one conversation, such as an answer that it leaves out; others may be fine."""


class TemplateRefusal(TemplateProblem):
    """Error of a chat template that raises, as many do on a system turn, or leaves out tools."""


def render(tokenizer: Any, turns: tuple[Turn, ...], add_generation_prompt: bool = False, tools: Tools = ()) -> str:
    """Render a conversation to text by the tokenizer's chat template.

    Raises:
        UserError: There is no template, or none for this conversation.
        TemplateRefusal: The template raises, or leaves out tools or their results.
        EndlessTemplate: The template exceeds a limit of time, memory or length.
    """
    template = chosen_template(tokenizer, tools)
    if (tools or any(turn.role == "tool" for turn in turns)) and _find_call_form(tokenizer, template) is None:
        raise TemplateRefusal(
            "the target's chat template does not write tools, their calls or their results, which conversations have: "
            f"remove such turns, set target.chat_template, {SKIP_SUCH}"
        )
    try:
        return _render(tokenizer, template, turns, tools, add_generation_prompt)
    except (EndlessTemplate, TemplateProblem):
        raise
    except Exception as error:  # of any kind: templates are programs
        roles = ", ".join([turn.role for turn in turns[:4]] + ["..."] * (len(turns) > 4))
        raise TemplateRefusal(
            f"the target's chat template refuses a conversation with the roles {roles}: {error}; "
            f"remove such turns, {SKIP_SUCH}"
        ) from None


def chosen_template(tokenizer: Any, tools: Tools = ()) -> str:
    """Return the text of the tokenizer's chat template; of several named ones, the one for conversations with `tools`.

    Raises:
        UserError: The tokenizer has no template, or several and none of them is the default.
    """
    try:
        return str(tokenizer.get_chat_template(tools=list(tools) or None))
    except ValueError:
        names = sorted(tokenizer.chat_template or ())
        lack = f"chat templates named {', '.join(names)} and no default one" if names else "no chat template"
        raise UserError(
            f"the target's tokenizer ({tokenizer.name_or_path or 'unnamed'}) has {lack}: "
            "use an instruct model, or set target.chat_template"
        ) from None


def _render(
    tokenizer: Any, template: str, turns: tuple[Turn, ...], tools: Tools = (), generation_prompt: bool = False
) -> str:
    """Render turns by one template."""
    messages = [turn.message for turn in turns]
    if any(turn.reasoning_content for turn in turns):
        field = thoughts_field(tokenizer, template)
        for message in messages:
            if thoughts := message.pop("reasoning_content", ""):
                message |= _with_thoughts(field, thoughts, message["content"])
    return _apply(tokenizer, template, messages, tools, generation_prompt)


def _apply(
    tokenizer: Any,
    template: str,
    messages: list[dict[str, Any]],
    tools: Tools = (),
    generation_prompt: bool = False,
) -> str:
    return bounded(
        lambda: tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
    )


# ---- what a template does ----


def _probe(tokenizer: Any, template: str, messages: list[dict[str, Any]], generation_prompt: bool = False) -> str:
    """Render messages; empty if the template refuses them, or cannot be used at all."""
    try:
        return _apply(tokenizer, template, messages, (), generation_prompt)
    except EndlessTemplate:
        raise
    except Exception:  # of any kind: templates are programs
        return ""


@dataclass(frozen=True)
class AnswerForm:
    """Texts that a chat template writes around an answer.

    opening: end of the generation prompt that is in no finished conversation, as R1's `<think>`.
    lead: text between the prompt and the answer's content, as the space of Llama 2.
    ending: text after the content, up to the end token; empty without an end token. tail: the text after `ending`.
    in_history: lead and ending of an answer that other turns follow.
    """

    opening: str
    lead: str
    ending: str
    tail: str
    in_history: tuple[str, str]


def answer_form(tokenizer: Any, tools: Tools = ()) -> AnswerForm:
    """Return the texts that the chat template, for conversations with these tools, writes around an answer.

    Raises:
        UserError: There is no template.
        TemplateProblem: The template does not write an answer after its question, or writes it twice.
    """
    template = chosen_template(tokenizer, tools)
    render(tokenizer, PROBE[:1])  # a template that refuses a question
    return _find_answer_form(tokenizer, template)


@lru_cache(maxsize=8)
def _find_answer_form(tokenizer: Any, template: str) -> AnswerForm:
    question, answer = PROBE
    prompt = _render(tokenizer, template, (question,), generation_prompt=True)
    text = _render(tokenizer, template, PROBE)
    shared = prompt[: common_length(prompt, text)]
    lead, is_written, rest = text[len(shared) :].partition(answer.content)
    if question.content not in shared or not is_written or answer.content in rest:
        raise TemplateProblem(
            "the target's chat template drops or repeats an answer, or drops or rewrites the question before it (one "
            "that reads a list of parts drops both): set target.chat_template"
        )
    ending, tail = _split_after_end_token(tokenizer, rest)
    in_history = (lead, ending)
    longer = _probe(tokenizer, template, [turn.message for turn in (*PROBE, question)], True)
    earlier_lead, is_written, rest = longer.removeprefix(shared).partition(answer.content)
    if is_written and longer.startswith(shared):
        in_history = (earlier_lead, ending and _split_after_end_token(tokenizer, rest)[0])
    return AnswerForm(prompt[len(shared) :], lead, ending, tail, in_history)


def _split_after_end_token(tokenizer: Any, text: str, is_last: bool = False) -> tuple[str, str]:
    """Split a text after its first, or its last, special token; the first part is empty if it has none."""
    places = [(text.rfind if is_last else text.find)(token) + len(token) for token in special_tokens(tokenizer)]
    ends = [end for token, end in zip(special_tokens(tokenizer), places, strict=True) if end >= len(token)]
    end = (max if is_last else min)(ends, default=0)
    return text[:end], text[end:]


def answer_in_history(form: AnswerForm, text: str, turn: Turn) -> str:
    """Return an answer as the template writes it at the start of `text`; empty if not found, or with calls or thoughts.

    Args:
        text: The rendered text after the answer's prompt, later turns included.
    """
    if turn.tool_calls or turn.reasoning_content:
        return ""
    forms = (form.in_history, (form.lead, form.ending))
    contents = (turn.content, turn.content.strip())
    written = (lead + content + ending for lead, ending in forms for content in contents)
    return next((each for each in written if text.startswith(each)), "")


def last_answer(tokenizer: Any, turns: tuple[Turn, ...], tools: Tools = (), prompt: str | None = None) -> str:
    """Return the text that the template writes for the last turn, an answer, after its prompt, with its end token.

    A template may write the history, or the prompt itself, differently once the answer is there (Mistral's system turn
    moves): then the answer is rendered after another question.

    Args:
        prompt: Text of the prompt, without `AnswerForm.opening`; by default it is rendered.

    Raises:
        TemplateProblem: The template refuses the answer, leaves out a part of it, or writes it after another prompt.
    """
    form, turn = answer_form(tokenizer, tools), turns[-1]
    for before in (turns[:-1], PROBE[:1]):
        if prompt is None:
            prompt = render(tokenizer, before, add_generation_prompt=True, tools=tools).removesuffix(form.opening)
        text = render(tokenizer, (*before, turn), tools=tools)
        if text.startswith(prompt):
            break
        prompt = None
    if prompt is None:
        raise TemplateProblem(
            "the target's chat template does not write an answer after the prompt that generates it (the prompt says "
            "that there are no thoughts, and the answer has some, most likely): set target.chat_template_kwargs as "
            "they were for the answers, or target.chat_template"
        )
    written = text[len(prompt) :]
    if not form.ending or written.endswith(form.ending + form.tail):
        written = written.removesuffix(form.tail)
    else:
        written = _split_after_end_token(tokenizer, written, is_last=True)[0]
    shown = "".join(written.split())
    if not all("".join(part.split()) in shown for part in (turn.content, turn.reasoning_content, *turn.called)):
        raise TemplateProblem(
            "the target's chat template leaves out part of an answer (its thoughts, most likely), so that a drafter "
            "would never see it: set a target.chat_template that writes it"
        )
    return written


def thoughts_field(tokenizer: Any, template: str) -> str:
    """Return the name of the message's field from which a template reads thoughts, such as `reasoning_content`.

    Raises:
        TemplateProblem: The template does not write the thoughts of any answer, not even the last one.
    """
    field = _find_thoughts_field(tokenizer, template)
    if field is None:
        raise TemplateProblem(
            "the target's chat template does not write the thoughts that conversations have as `reasoning_content`: "
            "write them into `content` between the tokens that the target thinks between, or remove the field"
        )
    return field


@lru_cache(maxsize=8)
def _find_thoughts_field(tokenizer: Any, template: str) -> str | None:
    """Find the field of `thoughts_field`; None if there is none, which is remembered too."""
    question, answer = (turn.message for turn in PROBE)
    fields = [field for field in THOUGHT_FIELDS if field in template] + ["content"] * ("</think>" in template)
    for field in fields:
        if MARK in _probe(tokenizer, template, [question, answer | _with_thoughts(field, MARK, answer["content"])]):
            return field
    return None


def _with_thoughts(field: str, thoughts: str, content: str) -> dict[str, str]:
    """Return the fields of a message that hold these thoughts and this content."""
    if field == "content":
        return {"content": THOUGHTS_IN_CONTENT.format(thoughts=thoughts.strip("\n"), content=content)}
    return {field: thoughts, "content": content}


def template_calls(tokenizer: Any, tools: Tools = ()) -> CallForm | None:
    """Return how the template writes tool calls; None if it does not write tools, calls and results."""
    return _find_call_form(tokenizer, chosen_template(tokenizer, tools))


@lru_cache(maxsize=8)
def _find_call_form(tokenizer: Any, template: str) -> CallForm | None:
    def write(conversation: Conversation, generation_prompt: bool) -> str:
        return _render(tokenizer, template, conversation.turns, conversation.tools, generation_prompt)

    return call_form(write)


@lru_cache(maxsize=8)
def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of all special tokens of a tokenizer, by their texts."""
    added = {token.content: key for key, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of all special tokens of a tokenizer."""
    return frozenset(special_tokens(tokenizer).values())
