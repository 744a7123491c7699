"""Where the assistant's turns are in the text that a chat template renders, found by comparing renderings.

For the assistant turn i of a conversation whose full rendering is F:

1. its start is where the generation prompt ends: render(turns before i, add_generation_prompt) is a prefix of F;
   templates that write history differently (a generation prompt with an opened <think>, a system prompt that moves to
   the last user turn) fall back to where the content itself starts, or the template's lead before it;
2. its content's end is found with a marker: render again with the content replaced by the marker; what follows the
   marker there is what follows the content in F. So a content that the template trims or strips of its thoughts is
   still found;
3. its end is the first special token after the content, within the length of the turn's own ending
   (`<|im_end|>`, but not the newline after it). A template without an end token carries the content alone.

In a turn that calls tools the marker stands for the functions' names, and the call's own ending is part of the turn's.

This takes three renderings of the conversation for each answer. Of many answers only the two at each end are located
so; the text around the others is read off renderings in which markers replace all contents together.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.tokens.templates import PROBE, TemplateProblem, Tools, render, template_answer_lead, token_ids
from draftsmith.data.tokens.tool_calls import common_end

MARKER = "Xq7AnswerMarkerXq7"
AT_EACH_END = 2  # answers
MOST_RENDERED_ONE_BY_ONE = 256  # answers, of a template that writes its history in several ways


@dataclass(frozen=True)
class Span:
    """Character positions of an assistant turn in a rendering; `end` is after its end token, if it has one.

    follows_prompt: the text before it is the prompt that generates it. never_follows: nor does it where it is the last
    turn, as the prompt opens thoughts that the template does not write.
    """

    start: int
    content_end: int
    end: int
    follows_prompt: bool = True
    never_follows: bool = False


def find_spans(
    tokenizer: Any,
    turns: tuple[Turn, ...],
    text: str,
    special: frozenset[int],
    generation_prompt: bool = False,
    tools: Tools = (),
) -> dict[int, Span]:
    """Find each assistant turn in the rendering `text`, by its index; in time linear in the text.

    Args, Raises: As `find_span`; TemplateProblem too for a long conversation whose turns the template writes unalike.
    """
    answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    between = answers[AT_EACH_END:-AT_EACH_END]
    one_by_one = answers if not between else answers[:AT_EACH_END] + answers[-AT_EACH_END:]
    span_of = partial(
        find_span, tokenizer, turns, text=text, special=special, generation_prompt=generation_prompt, tools=tools
    )
    spans = {index: span_of(index) for index in one_by_one}
    if between:
        plain = not tools and not any(
            turn.role == "tool" or turn.tool_calls or turn.reasoning_content for turn in turns
        )
        found = _spans_between(tokenizer, turns, answers, text, spans, generation_prompt) if plain else {}
        if not found and len(answers) > MOST_RENDERED_ONE_BY_ONE:
            raise TemplateProblem(
                f"the target's chat template does not write all {len(answers)} answers of a conversation in the same "
                f"way, and more than {MOST_RENDERED_ONE_BY_ONE} cannot be located one by one: use shorter "
                "conversations, or correct tokenizer.chat_template"
            )
        spans |= found or {index: span_of(index) for index in between}
    return {index: spans[index] for index in answers}


def _spans_between(
    tokenizer: Any,
    turns: tuple[Turn, ...],
    answers: list[int],
    text: str,
    spans: dict[int, Span],
    generation_prompt: bool,
) -> dict[int, Span]:
    """Locate the answers between those at both ends, whose spans are known.

    Empty if the template does not write all answers in the same way. `around[n]` is the text between the answers n - 1
    and n, questions included.
    """
    around = _around_markers(tokenizer, turns, ("assistant",), generation_prompt)
    without_contents = _around_markers(tokenizer, turns, ("assistant", "user"), generation_prompt)
    first, model, last = spans[answers[0]], spans[answers[1]], answers[-AT_EACH_END]
    if not around or not without_contents or not text.startswith(around[1], first.content_end):
        return {}
    systems = len(turns) + 1 - len(without_contents)
    headers = {without_contents[index - systems] for index in answers[1:-1]}  # between a question and its answer
    question = (*turns[: answers[1] - 1], Turn("user", MARKER))
    opened = render(tokenizer, question, add_generation_prompt=True).rpartition(MARKER)[2].removeprefix(max(headers))
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
        if opened and text.startswith(opened, begin):  # the answer may continue an opening in its prompt
            return {}
        content_end = _content_end(text, begin, turns[index].content, after)
        found[index] = replace(model, start=begin - lead, content_end=content_end, end=content_end + len(ending))
        if content_end < begin:
            return {}
    return found if found.pop(last) == spans[last] else {}


def _around_markers(
    tokenizer: Any, turns: tuple[Turn, ...], roles: tuple[str, ...], generation_prompt: bool
) -> list[str]:
    """Return the texts that the template writes around the contents of these roles; empty if they cannot be split."""
    marked = tuple(Turn(turn.role, MARKER) if turn.role in roles else turn for turn in turns)
    around = render(tokenizer, marked, generation_prompt).split(MARKER)
    return around if len(around) == 1 + sum(turn.role in roles for turn in turns) else []


def _content_end(text: str, begin: int, content: str, after: str) -> int:
    """Return the end of the content that starts at `begin`, unchanged, trimmed or without thoughts; -1 if unclear."""
    for shown in (content, content.strip()):
        if text.startswith(shown + after, begin):
            return begin + len(shown)
    end = text.find(after, begin)
    shown = "".join(text[begin:end].split())
    return -1 if after in content or shown not in "".join(content.split()) else end


def find_span(
    tokenizer: Any,
    turns: tuple[Turn, ...],
    index: int,
    text: str,
    special: frozenset[int],
    generation_prompt: bool,
    tools: Tools,
) -> Span:
    """Find assistant turn `index` in the rendering `text` (steps 1 to 3 of the module).

    Args:
        special: Ids of the special tokens, one of which ends a turn.
        generation_prompt: `text` ends with a generation prompt.
        tools: Tools of the conversation.

    Raises:
        TemplateProblem: The template drops or rewrites the text by which the turn is found.
    """
    turn = turns[index]
    calls = tuple({**call, "function": {"name": MARKER, "arguments": {}}} for call in turn.tool_calls)
    marked = replace(turn, tool_calls=calls) if calls else replace(turn, content=MARKER)
    marked_turns = (*turns[:index], marked, *turns[index + 1 :])
    marked_text = render(tokenizer, marked_turns, generation_prompt, tools)
    before, after = marked_text.partition(MARKER)[0], marked_text.rpartition(MARKER)[2]
    as_last = render(tokenizer, marked_turns[: index + 1], tools=tools)
    ending = as_last.rpartition(MARKER)[2]
    if calls:  # the call's arguments differ, and may follow the name
        after = common_end(after, text)
        ending = common_end(ending, render(tokenizer, turns[: index + 1], tools=tools))
    if marked_text.count(MARKER) != max(1, len(calls)) or not text.endswith(after):
        raise TemplateProblem(
            f"the target's chat template drops or rewrites turn {index + 1} of a conversation, so that the assistant's "
            "tokens cannot be located: correct tokenizer.chat_template"
        )
    prompt = render(tokenizer, turns[:index], add_generation_prompt=True, tools=tools)
    follows_prompt, never_follows = text.startswith(prompt), False
    if follows_prompt:
        start = len(prompt)
    else:
        lead = _lead_of_call(tokenizer, marked, tools) if calls else template_answer_lead(tokenizer)
        if not text.startswith(before) or (calls and not (lead and before.endswith(lead))):
            raise TemplateProblem(
                f"the target's chat template writes the text before turn {index + 1} differently once later turns "
                "follow, so that the assistant's tokens cannot be located: correct tokenizer.chat_template"
            )
        start = len(before.removesuffix(lead))
        never_follows = prompt.startswith(text[:start]) and not as_last.startswith(prompt)
    content_end = max(start, len(text) - len(after))
    ending = text[content_end : content_end + len(ending)]
    tokens = tokenizer.convert_ids_to_tokens([each for each in token_ids(tokenizer, ending) if each in special])
    end_tokens = [token for token in tokens if token in ending]  # `unk_token` does not occur in texts
    if not end_tokens:
        end = content_end + len(ending.rstrip()) * bool(calls)
        return Span(start, content_end, end, follows_prompt, never_follows)
    end_token = end_tokens[-1 if calls else 0]  # a call may have a special token at its own end
    end = ending.rindex(end_token) if calls else ending.index(end_token)
    return Span(start, content_end, content_end + end + len(end_token), follows_prompt, never_follows)


def _lead_of_call(tokenizer: Any, marked: Turn, tools: Tools) -> str:
    """Return the text between the generation prompt and the first function's name, as `template_answer_lead`."""
    prompt = render(tokenizer, PROBE[:1], add_generation_prompt=True, tools=tools)
    text = render(tokenizer, (PROBE[0], marked), tools=tools)
    return text.removeprefix(prompt).partition(MARKER)[0] if text.startswith(prompt) else ""
