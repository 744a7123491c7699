"""Rows of a conversation: its prompts and answers as token ids, with loss on exactly what the assistant generated.

A row grows by prefix: while the next prompt begins with the row, that prompt and its answer are appended; else the row
ends and another begins with the whole prompt. So every answer carries loss once, after exactly the prompt that the
target reads, whatever the template does with the history: one that removes earlier thoughts (Qwen3) or moves the system
turn (Mistral) opens more rows.

Distilled answers have the ids that the target read and generated, and nothing is rendered. A prompt without ids is
rendered, as it was for the target. The text of an answer without ids, from a file, is what the template writes after
the answer's prompt: in the next prompt if that has all of it, otherwise in the conversation up to the answer.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.tokens.bounded import bounded
from draftsmith.data.tokens.chat_tokens import beginning, continued_token_ids, token_ids
from draftsmith.data.tokens.loss_mask import TokenizedConversation
from draftsmith.data.tokens.templates import (
    TemplateProblem,
    answer_form,
    answer_in_history,
    last_answer,
    render,
)
from draftsmith.errors import UserError

CHARACTERS_PER_TOKEN = 3  # of text that is rendered at first; if that is too short for a row, twice as many
WATCHED_TOGETHER = 8  # conversations
MOST_ANSWERS = 1024  # of a conversation: each renders the turns before it


class Exchange(NamedTuple):
    """A prompt and its answer as token ids. weight: 0 for an answer that carries no loss, else 1."""

    prompt_ids: list[int]
    answer_ids: list[int]
    weight: int = 1


def rows_by_prefix(
    exchanges: Iterable[Exchange], max_length_tokens: int
) -> tuple[list[TokenizedConversation], Counter[str]]:
    """Build the training rows of a conversation; also count its cut and left-out answers, by names of `TokenReport`.

    Args:
        exchanges: Prompts and answers in the conversation's order.
        max_length_tokens: Longest row. An answer that reaches beyond its end is learned up to there.
    """
    rows: list[TokenizedConversation] = []
    lost: Counter[str] = Counter()
    ids: list[int] = []
    mask: list[int] = []

    def end_row() -> None:
        if 1 in mask:
            end = len(mask) - mask[::-1].index(1)  # nothing is learned from what follows
            rows.append(TokenizedConversation(ids[:end], mask[:end]))

    for prompt_ids, answer_ids, weight in exchanges:
        room = max_length_tokens - len(prompt_ids)
        if room < len(answer_ids):
            lost["answers_cut" if room > 0 else "answers_out"] += weight
            if room <= 0:
                continue
        if prompt_ids[: len(ids)] != ids:
            end_row()
            ids, mask = [], []
        mask = mask + [0] * (len(prompt_ids) - len(ids)) + [weight] * min(room, len(answer_ids))
        ids = prompt_ids + answer_ids[:room]
    end_row()
    return rows, lost


def tokenize_rows(
    tokenizer: Any, conversation: Conversation, max_length_tokens: int
) -> tuple[list[TokenizedConversation], Counter[str]]:
    """Tokenise a conversation to training rows, none if it does not fit, and count lost answers by `TokenReport` names.

    Raises:
        UserError: The tokenizer has no chat template, or the conversation's ids do not belong to its answers.
        TemplateProblem: The template rejects all of the conversation's answers.
    """
    (found,) = tokenize_batch(tokenizer, [conversation], max_length_tokens)
    if isinstance(found, TemplateProblem):
        raise found
    return found


def tokenize_batch(
    tokenizer: Any, conversations: list[Conversation], max_length_tokens: int
) -> Iterator[tuple[list[TokenizedConversation], Counter[str]] | TemplateProblem]:
    """Tokenise conversations together; yield for each the result of `tokenize_rows`, or the problem that it raises."""
    done: dict[int, tuple[list[Exchange], _Written]] = {}
    known: dict[str, list[int]] = {}
    waiting, reach = list(range(len(conversations))), CHARACTERS_PER_TOKEN * max_length_tokens
    while waiting:
        # One thread watches several templates: starting it takes longer than rendering a conversation.
        groups = [waiting[start : start + WATCHED_TOGETHER] for start in range(0, len(waiting), WATCHED_TOGETHER)]
        written = [each for group in groups for each in _write(tokenizer, [conversations[n] for n in group], reach)]
        answers = [answer for each in written for answer in each.answers]
        texts = [text for answer in answers for text in (answer.prompt, answer.prompt + answer.text)]
        known.update(zip(texts, continued_token_ids(tokenizer, texts, known), strict=True))
        too_short = []
        for index, each in zip(waiting, written, strict=True):
            exchanges, both_ids = [], list[int]()
            for answer in each.answers:
                prompt_ids, both_ids = known[answer.prompt], known[answer.prompt + answer.text]
                answer_ids = both_ids[len(prompt_ids) :]
                if prompt_ids + answer_ids != both_ids:  # a token extends from the prompt into the answer
                    answer_ids = token_ids(tokenizer, answer.text)
                exchanges.append(
                    Exchange(answer.prompt_ids or prompt_ids, answer.answer_ids or answer_ids, answer.weight)
                )
            if each.is_cut and len(both_ids) <= max_length_tokens:
                too_short.append(index)
            done[index] = exchanges, each
        waiting, reach = too_short, 2 * reach
    for index in range(len(conversations)):
        exchanges, each = done[index]
        if each.problem is not None and not exchanges:
            yield each.problem
        else:
            rows, lost = rows_by_prefix(exchanges, max_length_tokens)
            yield rows, lost + each.lost


class _Answer(NamedTuple):
    """An answer as text after its prompt, and the ids of both, where they are known."""

    prompt: str
    text: str
    prompt_ids: list[int] | None
    answer_ids: list[int] | None
    weight: int


class _Written(NamedTuple):
    """The answers of a conversation. is_cut: the last one, or its prompt, is the beginning of a longer text."""

    answers: list[_Answer]
    lost: Counter[str]
    problem: TemplateProblem | None = None
    is_cut: bool = False


def _write(tokenizer: Any, conversations: list[Conversation], reach_characters: int) -> list[_Written]:
    """Render what is not known by ids, up to a number of characters of each conversation.

    Raises:
        UserError: As `tokenize_rows`.
    """
    return bounded(lambda: [_render_answers(tokenizer, each, reach_characters) for each in conversations])


def _render_answers(tokenizer: Any, conversation: Conversation, reach_characters: int) -> _Written:
    known = known_ids(conversation)
    if all(None not in ids for ids in known.values()):
        weights = (conversation.turns[place].weight for place in known)
        return _Written(
            [_Answer("", "", *ids, each) for ids, each in zip(known.values(), weights, strict=True)], Counter()
        )
    turns, tools, form = conversation.turns, conversation.tools, answer_form(tokenizer, conversation.tools)
    answers: list[_Answer] = []
    lost: Counter[str] = Counter()
    problem: TemplateProblem | None = None

    @lru_cache(maxsize=2)  # of an answer and the next one
    def prompt_of(place: int) -> str:
        prompt = render(tokenizer, turns[:place], add_generation_prompt=True, tools=tools)
        return prompt.removesuffix(form.opening) if known[place][1] is None else prompt

    places = list(known)
    for number, place in enumerate(places, start=1):
        turn, (prompt_ids, answer_ids) = turns[place], known[place]
        text = ""
        try:
            prompt = prompt_of(place)
            if answer_ids is None and len(prompt) <= reach_characters:
                after = ""
                with suppress(TemplateProblem):
                    after = prompt_of(places[number]) if number < len(places) else ""
                after = after[len(prompt) :] if after.startswith(prompt) else ""
                text = answer_in_history(form, after, turn)
                if not text:
                    text = last_answer(tokenizer, turns[: place + 1], tools, prompt)
                    in_history = form.in_history[0] + text.removeprefix(form.lead)
                    text = in_history if after.startswith(in_history) else text
        except TemplateProblem as error:
            problem = problem or error
            lost["answers_refused"] += turn.weight
            continue
        if text.startswith(form.opening):
            prompt, text = prompt + form.opening, text.removeprefix(form.opening)
        is_cut = len(prompt) + len(text) > reach_characters
        if is_cut:
            both = beginning(prompt + text, reach_characters)
            prompt, text = both[: len(prompt)], both[len(prompt) :]
        answers.append(_Answer(prompt, text, prompt_ids, answer_ids, turn.weight))
        if is_cut or number == MOST_ANSWERS:
            lost["answers_out"] += sum(turns[later].weight for later in places[number:])
            return _Written(answers, lost, problem, is_cut)
    return _Written(answers, lost, problem)


def known_ids(conversation: Conversation) -> dict[int, tuple[list[int] | None, list[int] | None]]:
    """Return (prompt ids, answer ids) of each answer, None where unknown, by the index of the answer's turn.

    Raises:
        UserError: There is not one list of ids for each answer.
    """
    places = [place for place, turn in enumerate(conversation.turns) if turn.role == "assistant"]
    answer_ids = conversation.answer_ids or (None,) * len(places)
    prompt_ids = conversation.prompt_ids or (None,) * len(places)
    if not len(places) == len(answer_ids) == len(prompt_ids) or [] in answer_ids:
        raise UserError(
            f"conversation {conversation.id} has {len(places)} assistant turns, but the number of its answer_ids is "
            f"{len(answer_ids)}, {answer_ids.count([])} of them empty: distil it again"
        )
    return dict(zip(places, zip(prompt_ids, answer_ids, strict=True), strict=True))
