"""Where the answers are in what a chat template renders, found by comparing renderings.

For the assistant turn i of a conversation whose full rendering is F:

1. its start is where the generation prompt ends: render(turns before i, add_generation_prompt) is a prefix of F;
   templates that write history differently (a generation prompt with an opened <think>, a system prompt that moves to
   the last user turn) fall back to where the content itself starts, or the template's lead before it;
2. its content's end is found with a marker: render again with the content replaced by the marker; what follows the
   marker there is what follows the content in F. So a content that the template trims or strips of its thoughts is
   still found;
3. its end is the first special token after the content, within the length of the turn's own ending
   (`<|im_end|>`, but not the newline after it). A template without an end token carries the content alone.

These are three renderings of everything for each answer. Of many answers only the two at each end are found so; what
is around those in between is read off renderings in which markers stand for all contents together.
"""

from dataclasses import dataclass
from typing import Any

from draftsmith.data.sources.conversation import Turn
from draftsmith.recipes.errors import UserError

MARKER = "Xq7AnswerMarkerXq7"
AT_EACH_END = 2  # answers
MOST_RENDERED_ONE_BY_ONE = 256  # answers, of a template that writes its history in several ways
PROBE = (Turn("user", "Say hi"), Turn("assistant", "Hello"))


class TemplateProblem(UserError):
    """The chat template cannot be followed through this conversation; others may pass."""


class TemplateRefusal(TemplateProblem):
    """The chat template raised, as many do on a system turn."""


@dataclass(frozen=True)
class Span:
    """Character positions of an assistant turn in a rendering; `end` is after its end token, if it has one."""

    start: int
    content_end: int
    end: int


def render(tokenizer: Any, turns: tuple[Turn, ...], add_generation_prompt: bool = False) -> str:
    """The conversation as the template writes it.

    Raises:
        UserError: There is no template.
        TemplateRefusal: It raises.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"the target's tokenizer ({tokenizer.name_or_path or 'unnamed'}) has no chat template: "
            "take an instruct model, or set tokenizer.chat_template and save the tokenizer beside the model"
        )
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # of any kind: templates are programs
        roles = ", ".join([turn.role for turn in turns[:4]] + ["..."] * (len(turns) > 4))
        raise TemplateRefusal(
            f"the target's chat template refuses a conversation with the roles {roles}: {error}; "
            "remove such turns, or set data.conversations.skip_invalid=true to skip and count them"
        ) from None


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of rendered text: the template has written the BOS, if there is one."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def template_answer_lead(tokenizer: Any) -> str:
    """What the template itself writes between the generation prompt and an answer, such as the space of Llama 2.

    The target generates it; it must be taken off the answer before the template adds it again.
    """
    prompt = render(tokenizer, PROBE[:1], add_generation_prompt=True)
    text = render(tokenizer, PROBE)
    answer = text.rfind(PROBE[1].content)
    return text[len(prompt) : answer] if answer >= 0 and text.startswith(prompt) else ""


def find_spans(
    tokenizer: Any, turns: tuple[Turn, ...], text: str, special: frozenset[int], asking: bool = False
) -> dict[int, Span]:
    """Find each assistant turn in the rendering `text`, by its index; in time linear in the text.

    Args, Raises: As `find_span`; TemplateProblem too for a long conversation whose turns the template writes unalike.
    """
    answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    between = answers[AT_EACH_END:-AT_EACH_END]
    one_by_one = answers if not between else answers[:AT_EACH_END] + answers[-AT_EACH_END:]
    spans = {index: find_span(tokenizer, turns, index, text, special, asking) for index in one_by_one}
    if between:
        found = _spans_between(tokenizer, turns, answers, text, spans, asking)
        if not found and len(answers) > MOST_RENDERED_ONE_BY_ONE:
            raise TemplateProblem(
                f"the target's chat template does not write all {len(answers)} answers of a conversation alike, and so "
                "many cannot be told apart one by one: take shorter conversations, or correct tokenizer.chat_template"
            )
        spans |= found or {i: find_span(tokenizer, turns, i, text, special, asking) for i in between}
    return {index: spans[index] for index in answers}


def _spans_between(
    tokenizer: Any, turns: tuple[Turn, ...], answers: list[int], text: str, spans: dict[int, Span], asking: bool
) -> dict[int, Span]:
    """The spans of the answers between those at both ends, which are known; none if the template writes them unalike.

    `around[n]` is what the template writes before the n-th answer and after the one before it, questions included.
    """
    around = _around_markers(tokenizer, turns, ("assistant",), asking)
    without_contents = _around_markers(tokenizer, turns, ("assistant", "user"), asking)
    first, model, last = spans[answers[0]], spans[answers[1]], answers[-AT_EACH_END]
    if not around or not without_contents or not text.startswith(around[1], first.content_end):
        return {}
    systems = len(turns) + 1 - len(without_contents)
    headers = {without_contents[index - systems] for index in answers[1:-1]}  # between a question and its answer
    asked = (*turns[: answers[1] - 1], Turn("user", MARKER))
    opened = render(tokenizer, asked, add_generation_prompt=True).rpartition(MARKER)[2].removeprefix(max(headers))
    begin = first.content_end + len(around[1])  # of the content
    if len(headers) > 1 or begin < model.start:
        return {}
    lead, ending = begin - model.start, text[model.content_end : model.end]
    found: dict[int, Span] = {}
    content_end = model.content_end
    for number, index in enumerate(answers[2 : 1 - AT_EACH_END], start=2):
        before, after = around[number : number + 2]
        if not (text.startswith(before, content_end) and after.startswith(ending)):
            return {}
        begin = content_end + len(before)
        if opened and text.startswith(opened, begin):  # an answer that goes on where its prompt ended, perhaps
            return {}
        content_end = _content_end(text, begin, turns[index].content, after)
        found[index] = Span(begin - lead, content_end, content_end + len(ending))
        if content_end < begin:
            return {}
    return found if found.pop(last) == spans[last] else {}


def _around_markers(tokenizer: Any, turns: tuple[Turn, ...], roles: tuple[str, ...], asking: bool) -> list[str]:
    """What the template writes around the contents of these roles; nothing if contents or template confuse that."""
    marked = tuple(Turn(turn.role, MARKER) if turn.role in roles else turn for turn in turns)
    around = render(tokenizer, marked, asking).split(MARKER)
    return around if len(around) == 1 + sum(turn.role in roles for turn in turns) else []


def _content_end(text: str, begin: int, content: str, after: str) -> int:
    """Where the content that begins there ends, as it is, trimmed, or without its thoughts; -1 if that is not clear."""
    for shown in (content, content.strip()):
        if text.startswith(shown + after, begin):
            return begin + len(shown)
    end = text.find(after, begin)
    shown = "".join(text[begin:end].split())
    return -1 if after in content or shown not in "".join(content.split()) else end


def find_span(
    tokenizer: Any, turns: tuple[Turn, ...], index: int, text: str, special: frozenset[int], asking: bool = False
) -> Span:
    """Find assistant turn `index` in the rendering `text` (steps 1 to 3 of the module).

    Args:
        special: Ids among which an end token is.
        asking: `text` ends with a generation prompt.

    Raises:
        TemplateProblem: The template drops or rewrites what is needed to tell.
    """
    marked_turns = (*turns[:index], Turn("assistant", MARKER), *turns[index + 1 :])
    marked_text = render(tokenizer, marked_turns, asking)
    before, _, after = marked_text.partition(MARKER)
    ending = render(tokenizer, marked_turns[: index + 1]).partition(MARKER)[2]
    prompt = render(tokenizer, turns[:index], add_generation_prompt=True)
    if marked_text.count(MARKER) != 1 or not text.endswith(after):
        raise TemplateProblem(
            f"the target's chat template drops or rewrites turn {index + 1} of a conversation, so that the assistant's "
            "tokens cannot be told apart: correct tokenizer.chat_template"
        )
    if text.startswith(prompt):
        start = len(prompt)
    elif text.startswith(before):
        start = len(before.removesuffix(template_answer_lead(tokenizer)))
    else:
        raise TemplateProblem(
            f"the target's chat template writes the text before turn {index + 1} differently once later turns follow, "
            "so that the assistant's tokens cannot be told apart: correct tokenizer.chat_template"
        )
    content_end = max(start, len(text) - len(after))
    ending = text[content_end : content_end + len(ending)]
    tokens = tokenizer.convert_ids_to_tokens([each for each in token_ids(tokenizer, ending) if each in special])
    end_token = next(
        (token for token in tokens if token in ending), None
    )  # the token for what is unknown is in no text
    if end_token is None:
        return Span(start, content_end, content_end)
    return Span(start, content_end, content_end + ending.index(end_token) + len(end_token))
