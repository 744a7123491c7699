"""Token ids of a conversation, and the loss mask of exactly the tokens that the assistant generated.

Works with any chat template, with or without `{% generation %}`: answers are located by comparing renderings, and the
pieces between their borders are tokenised. Token offsets are not used: `trim_offsets` (Llama 3) shifts them.

If the ids that the target generated are known, an answer is not tokenised again: the ids are put after their own
prompt. They then include whatever the template writes between the prompt and an answer (a space, an empty <think>
block), and an answer that was cut short has no end token that would carry loss.

A template may rewrite an answer once later turns follow (Qwen3 removes its thoughts), or the prompt before it (Mistral
moves the system prompt to the last turn). Such turns stay as `rewritten_turns`, without loss, as do those of weight 0.
"""

import re
from dataclasses import replace
from itertools import accumulate, chain, pairwise, takewhile
from typing import TYPE_CHECKING, Any

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.tokens.bounded import bounded
from draftsmith.data.tokens.loss_mask import TokenizedConversation
from draftsmith.data.tokens.spans import Span, find_spans
from draftsmith.data.tokens.templates import (
    PROBE,
    TemplateProblem,
    Tools,
    longest_token_characters,
    render,
    special_ids,
    template_messages,
    token_ids,
)
from draftsmith.errors import UserError

if TYPE_CHECKING:  # torch, which the processes that tokenise do not need
    from transformers import GenerationConfig

ANSWERS_AT_FIRST = 16  # first number of answers to try; doubled each time that they fit
END_TOKENS = 16  # more than any template puts after an answer
CHARACTERS_ALWAYS_READ = 1 << 20
LOOK_BACK_CHARACTERS = 1000


def prompt_token_ids(tokenizer: Any, turns: tuple[Turn, ...] | list[Turn], tools: Tools = ()) -> list[int]:
    """Return the ids of the prompt for the next assistant turn. No BOS is added beyond the template's own."""
    return token_ids(tokenizer, render(tokenizer, tuple(turns), add_generation_prompt=True, tools=tools))


def tokenize_conversation(tokenizer: Any, conversation: Conversation) -> TokenizedConversation:
    """Tokenise a conversation with the chat template, and compute its loss mask.

    Args:
        tokenizer: The target's, with a chat template.
        conversation: Answers without `answer_ids` are tokenised. If its last answer has ids, it ends with these,
            whatever the template would write after it.

    Raises:
        UserError: The tokenizer has no chat template, or the conversation has another number of `answer_ids` than of
            answers.
        TemplateProblem: The template rejects this conversation or hides an answer, or the mask would be empty or full.
    """
    turns, tools, given = conversation.turns, conversation.tools, _ids_by_turn(conversation)
    last = len(turns) - 1
    # If the last answer has ids, they are put after its prompt, so the answer itself is not rendered.
    generation_prompt = last in given
    shown = turns[:-1] if generation_prompt else turns
    text = render(tokenizer, shown, add_generation_prompt=generation_prompt, tools=tools)
    if not generation_prompt:
        _check_last_answer_is_whole(turns, text)
    special = special_ids(tokenizer)
    spans = find_spans(tokenizer, shown, text, special, generation_prompt, tools)
    borders = []
    for index, span in spans.items():
        is_cut_short = index in given and given[index][-1] not in special
        borders += [span.start, span.content_end if is_cut_short else span.end]
    pieces = _pieces(tokenizer, text, borders)  # before an answer, the answer, before the next one, ...
    marked = None if given else _generation_mask(tokenizer, conversation, list(chain(*pieces)))
    input_ids: list[int] = []
    loss_mask: list[int] = []
    rewritten: list[int] = []
    ends: list[int] = []
    for number, (index, span) in enumerate(spans.items()):
        before, rendered = pieces[2 * number : 2 * number + 2]
        is_rewritten = index != last and _is_rewritten(tokenizer, turns[index], text, span, rendered, given.get(index))
        answer = rendered if is_rewritten else given.get(index, rendered)
        input_ids += before + answer
        ends.append(len(input_ids))
        start, weight, silent = len(input_ids) - len(answer), turns[index].weight, 0
        if is_rewritten:
            rewritten += [index] * weight
            weight = 0
        elif marked is not None:
            silent = _first_marked(marked, start, len(input_ids), number + 1) - start
        loss_mask += [0] * (len(before) + silent) + [weight] * (len(answer) - silent)
    final = given[last] if generation_prompt else []
    input_ids += pieces[-1] + final
    loss_mask += [0] * len(pieces[-1]) + [turns[last].weight] * len(final)
    ends += [len(input_ids)] if generation_prompt else []
    learned = {*spans, *([last] if generation_prompt else [])} - {*rewritten}
    if any(turns[index].weight for index in learned):  # else all have weight 0, or get separate rows
        _check_mask(loss_mask, conversation)
    tokenized = TokenizedConversation(input_ids, loss_mask, tuple(rewritten), tuple(ends))
    if last in spans and not (spans[last].follows_prompt or spans[last].never_follows):
        # Tokenise again with the last answer's ids given, so that it follows the prompt that generates it: Mistral's
        # templates write the system prompt in the last turn if it is the user's, and nowhere otherwise.
        earlier = conversation.answer_ids[:-1] or (None,) * (len(spans) - 1)
        last_ids = tokenized.answers()[-1] if turns[last].weight else pieces[-2]
        return tokenize_conversation(tokenizer, replace(conversation, answer_ids=(*earlier, last_ids)))
    return tokenized


def _is_rewritten(
    tokenizer: Any, turn: Turn, text: str, span: Span, rendered: list[int], given: list[int] | None
) -> bool:
    """Return whether the history has another text than the target generates, or generates it after another prompt.

    Args:
        turn, text, span: An answer before the last one, the rendering, and its place there.
        rendered: The answer's ids as the template writes it.
        given: Ids that the target generated, if they are known.
    """
    if given is not None:
        return not (span.follows_prompt and _same_words(tokenizer, given, rendered))
    in_place = span.follows_prompt or span.never_follows
    return not (in_place and _is_whole(turn, text[span.start : span.end]))


def tokenize_shortened(
    tokenizer: Any, conversation: Conversation, max_length_tokens: int
) -> tuple[TokenizedConversation, int] | None:
    """Tokenise as `tokenize_conversation`, after dropping last turns until the conversation fits.

    The shortened conversation still ends with an assistant turn.

    Returns:
        The tokens and the number of dropped turns; None if the turns up to the first answer with loss do not fit.
    """
    turns = conversation.turns
    _ids_by_turn(conversation)
    ends = _ends_in_reach(tokenizer, turns, max_length_tokens)
    if not ends:
        return None
    num_tried = ANSWERS_AT_FIRST
    while True:
        tried, num_tried = ends[:num_tried], 2 * num_tried
        try:
            longest = tokenize_conversation(tokenizer, up_to_turn(conversation, tried[-1]))
        except TemplateProblem:  # this turn may not be a possible end
            if tried == ends:
                raise
            continue
        history_tokens = longest.answer_ends_tokens[:-1]
        if tried == ends or (history_tokens and history_tokens[-1] > max_length_tokens):
            break
    for end, tokens in reversed(list(zip(tried, longest.answer_ends_tokens, strict=True))):
        if not any(turn.role == "assistant" and turn.weight for turn in turns[:end]):
            break
        if tokens > max_length_tokens + END_TOKENS:  # thoughts may make it longer at the end, nothing makes it shorter
            continue
        whole = end == tried[-1]
        shortened = longest if whole else tokenize_conversation(tokenizer, up_to_turn(conversation, end))
        if len(shortened.input_ids) <= max_length_tokens:
            return shortened, len(turns) - end
    return None


def _ends_in_reach(tokenizer: Any, turns: tuple[Turn, ...], max_length_tokens: int) -> list[int]:
    """Return the numbers of turns that end with an answer and whose text may fit."""
    most_characters = max(CHARACTERS_ALWAYS_READ, max_length_tokens * longest_token_characters(tokenizer))
    characters = accumulate(len(turn.content) for turn in turns)
    in_reach = takewhile(lambda turn: turn[0] <= most_characters, zip(characters, turns, strict=True))
    return [number for number, (_, turn) in enumerate(in_reach, start=1) if turn.role == "assistant"]


def up_to_turn(conversation: Conversation, end: int) -> Conversation:
    """Return the first `end` turns, with the ids of the answers among them."""
    turns = conversation.turns[:end]
    answers = sum(turn.role == "assistant" for turn in turns)
    return replace(conversation, turns=turns, answer_ids=conversation.answer_ids[:answers])


def _check_last_answer_is_whole(turns: tuple[Turn, ...], text: str) -> None:
    """Reject templates that drop part of the last answer. Earlier answers may lose their thoughts, as at inference.

    Raises:
        TemplateProblem: Part of the last answer is missing.
    """
    last = next((turn for turn in reversed(turns) if turn.role == "assistant"), Turn("assistant", ""))
    if not _is_whole(last, text):
        raise TemplateProblem(
            "the target's chat template leaves out part of the last answer (a <think> block, most likely), so that a "
            "drafter would never see it: set a tokenizer.chat_template that keeps it"
        )


def _is_whole(turn: Turn, text: str) -> bool:
    """Return whether all that a turn says is in the text, white space aside."""
    shown = "".join(text.split())
    return all("".join(part.split()) in shown for part in (turn.content, turn.reasoning_content, *turn.called))


def _ids_by_turn(conversation: Conversation) -> dict[int, list[int]]:
    """Return the known ids of answers by the index of their turn.

    Raises:
        UserError: There is not one list of ids for each answer.
    """
    answer_ids = conversation.answer_ids
    if not answer_ids:
        return {}
    answers = [index for index, turn in enumerate(conversation.turns) if turn.role == "assistant"]
    if len(answers) != len(answer_ids) or [] in answer_ids:
        raise UserError(
            f"conversation {conversation.id} has {len(answers)} assistant turns, and its answer_ids are "
            f"{len(answer_ids)}, {answer_ids.count([])} of them empty: distil it again"
        )
    return {index: ids for index, ids in zip(answers, answer_ids, strict=True) if ids is not None}


def _pieces(tokenizer: Any, text: str, borders: list[int]) -> list[list[int]]:
    """Tokenise the pieces of `text` between the borders (ascending), each as a continuation of the text before it."""
    bounds = [0, *borders, len(text)]
    pieces = [token_ids(tokenizer, text[start:end]) if end > start else [] for start, end in pairwise(bounds)]
    if list(chain(*pieces)) == token_ids(tokenizer, text):
        return pieces
    # A token would extend across a border, or a piece gets another beginning by itself (SentencePiece's first space).
    continued = [_continuation(tokenizer, text, start, end) for start, end in pairwise(bounds)]
    return [alone if ids is None else ids for ids, alone in zip(continued, pieces, strict=True)]


def _continuation(tokenizer: Any, text: str, start: int, end: int) -> list[int] | None:
    """Tokenise `text[start:end]` as a continuation of the text before; None if a token would extend across `start`."""
    seen = max(0, start - LOOK_BACK_CHARACTERS)  # tokens do not depend on text farther away
    before, through = token_ids(tokenizer, text[seen:start]), token_ids(tokenizer, text[seen:end])
    return through[len(before) :] if through[: len(before)] == before else None


def _same_words(tokenizer: Any, left: list[int], right: list[int]) -> bool:
    """Return True if both have the same text, special tokens and white space aside."""
    words = (
        tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in (left, right)
    )
    return len({"".join(text.split()) for text in words}) == 1


def _generation_mask(tokenizer: Any, conversation: Conversation, input_ids: list[int]) -> list[int] | None:
    """Return the mask of a template with `{% generation %}`; None without that mark.

    Only its beginnings are believed: transformers leaves out the later tokens of a character of several tokens (an
    emoji), and many templates leave out the end token.
    """
    template = tokenizer.get_chat_template()
    if re.search(r"\{%-?\s*generation\s*-?%\}", template) is None:
        return None
    messages, tools = template_messages(tokenizer, conversation.turns), list(conversation.tools) or None
    encoded: Any = bounded(
        lambda: tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    )
    return list(encoded["assistant_masks"]) if list(encoded["input_ids"]) == input_ids else None


def _first_marked(marked: list[int], start: int, end: int, number: int) -> int:
    """Return the first token of an answer that the template marks as generated.

    The template may exclude text that it inserts before an answer, such as an empty <think> block.

    Raises:
        TemplateProblem: The template marks no token of this answer.
    """
    first = next((t for t in range(start, end) if marked[t]), None)
    if first is None:
        raise TemplateProblem(
            f"the chat template's {{% generation %}} marks no token of assistant turn {number}: "
            "correct or remove the mark in tokenizer.chat_template"
        )
    return first


def _check_mask(loss_mask: list[int], conversation: Conversation) -> None:
    if any(loss_mask) and not all(loss_mask):
        return
    kind = "no token" if not any(loss_mask) else "every token"
    raise TemplateProblem(
        f"conversation {conversation.id}: the chat template makes {kind} an assistant token, "
        "so the loss mask is useless: correct tokenizer.chat_template"
    )


def answer_end_ids(generation_config: "GenerationConfig", tokenizer: Any) -> list[int]:
    """Return all tokens that end an answer: the eos tokens of model and tokenizer, and the template's end token.

    Raises:
        UserError: No token ends an answer, or the chat template cannot be used.
    """
    of_model = generation_config.eos_token_id
    of_model = of_model if isinstance(of_model, list) else [of_model]
    end_ids = sorted({*of_model, tokenizer.eos_token_id, template_end_token(tokenizer)} - {None})
    if not end_ids:
        raise UserError(
            "the target has no end-of-sequence token (generation_config, tokenizer and chat template name none): "
            "set tokenizer.eos_token and save the tokenizer in the model's folder"
        )
    return end_ids


def template_end_token(tokenizer: Any) -> int | None:
    """Return the token that ends an assistant turn in this template; None if the template has none.

    It need not be among the model's eos tokens (a base model given a ChatML template): generation must stop at it too.
    """
    last = tokenize_conversation(tokenizer, Conversation("probe", PROBE)).answers()[-1][-1]
    return last if last in special_ids(tokenizer) else None
