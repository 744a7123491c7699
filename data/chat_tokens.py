"""Token ids of a conversation and the mask of exactly those that the assistant produced.

Works with any chat template, with or without `{% generation %}`, by comparing renderings. For the assistant turn i of
a conversation whose full rendering is F:

1. its start is where the generation prompt ends: render(turns before i, add_generation_prompt) is a prefix of F;
   templates that write history differently (a generation prompt with an opened <think>, a system prompt that moves to
   the last user turn) fall back to where the content itself starts;
2. its content's end is found with a marker: render again with the content replaced by the marker; what follows the
   marker there is what follows the content in F. So a content that the template trims or strips of its thoughts is
   still found;
3. its end is the first special token after the content, within the length of the turn's own ending
   (`<|im_end|>`, but not the newline after it). A template without an end token carries the content alone.

Character positions become token positions by tokenising the pieces between them; where pieces do not add up to the
whole (a token across a border), by the longest common prefix of ids. Offsets are not used: `trim_offsets` (Llama 3)
moves them.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError

from draftsmith.data.conversations import Conversation, Turn
from draftsmith.recipes.errors import UserError

MARKER = "Xq7AnswerMarkerXq7"
PROBE = (Turn("user", "Say hi"), Turn("assistant", "Hello"))


class TemplateProblem(UserError):
    """The chat template cannot be followed through this conversation; others may pass."""


class TemplateRefusal(TemplateProblem):
    """The chat template raised, as many do on a system turn."""


@dataclass(frozen=True)
class TokenizedConversation:
    """`loss_mask[t]` is 1 iff `input_ids[t]` is a token of an assistant turn, its end token included."""

    input_ids: list[int]
    loss_mask: list[int]

    def answers(self) -> list[list[int]]:
        """The ids of each assistant turn: the runs of ones."""
        runs: list[list[int]] = []
        previous = 0
        for token_id, carries_loss in zip(self.input_ids, self.loss_mask, strict=True):
            if carries_loss and not previous:
                runs.append([])
            if carries_loss:
                runs[-1].append(token_id)
            previous = carries_loss
        return runs


@dataclass(frozen=True)
class _Span:
    """Character positions of an assistant turn in the full rendering."""

    start: int
    content_end: int
    turn_end: int


def prompt_token_ids(tokenizer: Any, turns: tuple[Turn, ...] | list[Turn]) -> list[int]:
    """Ids of the prompt that asks the target for the next assistant turn. No BOS is added beyond the template's own."""
    return _token_ids(tokenizer, _render(tokenizer, tuple(turns), add_generation_prompt=True))


def tokenize_conversation(tokenizer: Any, conversation: Conversation) -> TokenizedConversation:
    """Tokenise through the chat template, with the loss mask.

    Raises:
        UserError: The tokenizer has no chat template.
        TemplateProblem: The template refuses this conversation or hides an answer, or the mask would be empty or full.
    """
    turns = conversation.turns
    text = _render(tokenizer, turns)
    _check_last_answer_is_whole(turns, text)
    spans = [_find_span(tokenizer, turns, index, text) for index, turn in enumerate(turns) if turn.role == "assistant"]
    borders = sorted({position for span in spans for position in (span.start, span.content_end, span.turn_end)})
    input_ids, token_at = _tokenize_with_borders(tokenizer, text, borders)
    special = special_ids(tokenizer)
    loss_mask = [0] * len(input_ids)
    marked = _generation_mask(tokenizer, conversation, input_ids)
    for number, span in enumerate(spans, start=1):
        start, content_end, turn_end = (token_at[p] for p in (span.start, span.content_end, span.turn_end))
        end_token = next((t for t in range(content_end, turn_end) if input_ids[t] in special), None)
        end = content_end if end_token is None else end_token + 1
        if marked is not None:
            start = _first_marked(marked, start, content_end, number)
        loss_mask[start:end] = [1] * (end - start)
    _check_mask(loss_mask, conversation)
    return TokenizedConversation(input_ids, loss_mask)


def tokenize_truncated(
    tokenizer: Any, conversation: Conversation, max_length_tokens: int
) -> tuple[TokenizedConversation, int] | None:
    """Like `tokenize_conversation`, cut on a turn boundary so that it fits and still ends with an assistant turn.

    Returns:
        The tokens and the number of turns dropped from the end; None if even the first exchange does not fit.
    """
    turns = conversation.turns
    for end in range(len(turns), 0, -1):
        if turns[end - 1].role != "assistant":
            continue
        tokenized = tokenize_conversation(tokenizer, Conversation(conversation.id, turns[:end]))
        if len(tokenized.input_ids) <= max_length_tokens:
            return tokenized, len(turns) - end
    return None


def template_end_token(tokenizer: Any) -> int | None:
    """The token that ends an assistant turn in this template, or None where the template has none.

    It need not be among the model's eos tokens (a base model given a ChatML template): generation must stop at it too.
    """
    last = tokenize_conversation(tokenizer, Conversation("probe", PROBE)).answers()[-1][-1]
    return last if last in special_ids(tokenizer) else None


def template_answer_lead(tokenizer: Any) -> str:
    """What the template itself writes between the generation prompt and an answer, such as the space of Llama 2.

    The target generates it; it must be taken off the answer before the template adds it again.
    """
    prompt = _render(tokenizer, PROBE[:1], add_generation_prompt=True)
    text = _render(tokenizer, PROBE)
    return text[len(prompt) : text.rindex(PROBE[1].content)] if text.startswith(prompt) else ""


def _render(tokenizer: Any, turns: tuple[Turn, ...], add_generation_prompt: bool = False) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            f"the target's tokenizer ({tokenizer.name_or_path or 'unnamed'}) has no chat template: "
            "take an instruct model, or set tokenizer.chat_template and save the tokenizer beside the model"
        )
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise TemplateRefusal(
            f"the target's chat template refuses a conversation with the roles {_roles(turns)}: {error}; "
            "remove such turns, or set data.conversations.skip_invalid=true to skip and count them"
        ) from None


def _roles(turns: tuple[Turn, ...]) -> str:
    shown = [turn.role for turn in turns[:4]]
    return ", ".join(shown) + (", ..." if len(turns) > len(shown) else "")


def _find_span(tokenizer: Any, turns: tuple[Turn, ...], index: int, text: str) -> _Span:
    """Where assistant turn `index` lies in the full rendering `text` (steps 1 to 3 of the module)."""
    marked_turns = (*turns[:index], Turn("assistant", MARKER), *turns[index + 1 :])
    marked_text = _render(tokenizer, marked_turns)
    before, _, after = marked_text.partition(MARKER)
    ending = _render(tokenizer, marked_turns[: index + 1]).partition(MARKER)[2]
    prompt = _render(tokenizer, turns[:index], add_generation_prompt=True)
    if marked_text.count(MARKER) != 1 or not text.endswith(after):
        raise TemplateProblem(
            f"the target's chat template drops or rewrites turn {index + 1} of a conversation, so that the assistant's "
            "tokens cannot be told apart: correct tokenizer.chat_template"
        )
    if text.startswith(prompt):
        start = len(prompt)
    elif text.startswith(before):
        start = len(before)
    else:
        raise TemplateProblem(
            f"the target's chat template writes the text before turn {index + 1} differently once later turns follow, "
            "so that the assistant's tokens cannot be told apart: correct tokenizer.chat_template"
        )
    content_end = max(start, len(text) - len(after))
    return _Span(start, content_end, min(len(text), content_end + len(ending)))


def _check_last_answer_is_whole(turns: tuple[Turn, ...], text: str) -> None:
    """Thoughts may go missing from the history, as at inference, but what the target just said must all be there."""
    last = next((turn.content for turn in reversed(turns) if turn.role == "assistant"), "")
    if "".join(last.split()) not in "".join(text.split()):
        raise TemplateProblem(
            "the target's chat template leaves out part of the last answer (a <think> block, most likely), so that a "
            "drafter would never see it: set a tokenizer.chat_template that keeps it"
        )


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _tokenize_with_borders(tokenizer: Any, text: str, borders: list[int]) -> tuple[list[int], dict[int, int]]:
    """Token ids of `text` and the token position of each character position in `borders` (ascending)."""
    input_ids = _token_ids(tokenizer, text)
    pieces: list[int] = []
    token_at: dict[int, int] = {}
    for start, end in zip([0, *borders], [*borders, len(text)], strict=True):
        if end > start:
            pieces += _token_ids(tokenizer, text[start:end])
        token_at[end] = len(pieces)
    if pieces == input_ids:
        return input_ids, token_at
    return input_ids, {border: _common_prefix(_token_ids(tokenizer, text[:border]), input_ids) for border in borders}


def _common_prefix(left: list[int], right: list[int]) -> int:
    return next((t for t, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _generation_mask(tokenizer: Any, conversation: Conversation, input_ids: list[int]) -> list[int] | None:
    """The mask that a template with `{% generation %}` gives itself; None without that mark.

    Only its beginnings are believed: transformers leaves out the later tokens of a character of several tokens (an
    emoji), and many templates leave out the end token.
    """
    template = tokenizer.get_chat_template()
    if "generation %}" not in template.replace("-%}", " %}").replace("  %}", " %}").replace("endgeneration", ""):
        return None
    encoded = tokenizer.apply_chat_template(
        conversation.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(encoded["assistant_masks"]) if list(encoded["input_ids"]) == input_ids else None


def _first_marked(marked: list[int], start: int, content_end: int, number: int) -> int:
    """The template may count what it inserts before an answer (an empty <think> block) as not generated."""
    first = next((t for t in range(start, content_end) if marked[t]), None)
    if first is None:
        raise TemplateProblem(
            f"the chat template's {{% generation %}} marks no token of assistant turn {number}: "
            "correct or remove the mark in tokenizer.chat_template"
        )
    return first


@lru_cache(maxsize=8)
def special_ids(tokenizer: Any) -> frozenset[int]:
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def _check_mask(loss_mask: list[int], conversation: Conversation) -> None:
    if any(loss_mask) and not all(loss_mask):
        return
    kind = "no token" if not any(loss_mask) else "every token"
    raise TemplateProblem(
        f"conversation {conversation.id}: the chat template makes {kind} an assistant token, "
        "so the loss mask is useless: correct tokenizer.chat_template"
    )
