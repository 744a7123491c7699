"""Token ids of prompts, and the tokens that end an answer."""

import re
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.tokens.templates import Tools, answer_form, render, special_ids
from draftsmith.errors import UserError

if TYPE_CHECKING:  # torch, which the processes that tokenise do not need
    from transformers import GenerationConfig

AROUND_CHARACTERS = 24  # on either side of a border, which decide whether a token extends across it
LOOK_AHEAD_CHARACTERS = 4096  # in search of a space, where a text may be cut without changing the tokens before
SPACE = re.compile(r"(?<=\S)\s")


def prompt_token_ids(tokenizer: Any, turns: tuple[Turn, ...] | list[Turn], tools: Tools = ()) -> list[int]:
    """Render the prompt for the next assistant turn and return its token ids. Only the template may add a BOS."""
    return token_ids(tokenizer, render(tokenizer, tuple(turns), add_generation_prompt=True, tools=tools))


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Tokenise text that a chat template rendered. No BOS is added, as the template writes it if the model needs one.

    Raises:
        UserError: The text contains half a surrogate pair, as from a command line that is not UTF-8.
    """
    return batch_token_ids(tokenizer, [text])[0]


def batch_token_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Tokenise several rendered texts in one call, as `token_ids` does, with the same errors."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    try:
        if backend is None or not texts:
            return [list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts]
        backend.no_truncation()
        backend.no_padding()
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    except TypeError:
        if not any("\ud800" <= character <= "\udfff" for text in texts for character in text):
            raise
        raise UserError(
            "a text to tokenize is not valid UTF-8 (it contains half a surrogate pair): convert it"
        ) from None


@lru_cache(maxsize=8)
def longest_token_characters(tokenizer: Any) -> int:
    """Return the length of the vocabulary's longest token, in characters."""
    return max(map(len, tokenizer.get_vocab()))


def continued_token_ids(tokenizer: Any, texts: list[str], known: dict[str, list[int]]) -> list[list[int]]:
    """Tokenise each text as if it were alone; if a text begins with the one before it, read only the added part.

    That is done only if no token extends across the border: if the few characters around the border have the same
    tokens together as apart.

    Args:
        known: Token ids of texts that need not be tokenised again.
    """
    added = [text[len(before) :] if text.startswith(before) else text for before, text in pairwise(["", *texts])]
    added = ["" if text in known else more for text, more in zip(texts, added, strict=True)]
    borders = [
        (before[-AROUND_CHARACTERS:], more[:AROUND_CHARACTERS])
        for before, text, more in zip(["", *texts], texts, added, strict=False)
        if before and more and len(more) < len(text)
    ]
    sides = dict.fromkeys(side for left, right in borders for side in (left, right, left + right))
    ids = batch_token_ids(tokenizer, [*added, *sides])
    ids_of = dict(zip(sides, ids[len(added) :], strict=True))
    is_clean = {border: ids_of[border[0]] + ids_of[border[1]] == ids_of["".join(border)] for border in borders}
    found: list[list[int]] = []
    for index, (text, more) in enumerate(zip(texts, added, strict=True)):
        before = texts[index - 1] if index else ""
        if text in known:
            found.append(known[text])
        elif not before or not text.startswith(before):
            found.append(ids[index])
        elif not more or is_clean[before[-AROUND_CHARACTERS:], more[:AROUND_CHARACTERS]]:
            found.append(found[-1] + ids[index])
        else:
            found.append(token_ids(tokenizer, text))
    return found


def beginning(text: str, length: int) -> str:
    """Return the first `length` characters of a text, up to the next space, where a cut does not change the tokens."""
    space = SPACE.search(text, length, length + LOOK_AHEAD_CHARACTERS)
    return text[: space.start() if space else length + LOOK_AHEAD_CHARACTERS]


def answer_end_ids(generation_config: "GenerationConfig", tokenizer: Any) -> list[int]:
    """Return the ids of all tokens that end an answer: eos tokens of model and tokenizer, and the template's end token.

    Raises:
        UserError: No token ends an answer, or the chat template cannot be used.
    """
    of_model = generation_config.eos_token_id
    of_model = of_model if isinstance(of_model, list) else [of_model]
    end_ids = sorted({*of_model, tokenizer.eos_token_id, *template_end_ids(tokenizer)[:1]} - {None})
    if not end_ids:
        raise UserError(
            "the target has no end-of-sequence token (generation_config, tokenizer and chat template name none): "
            "set tokenizer.eos_token and save the tokenizer in the model's folder"
        )
    return end_ids


def template_end_ids(tokenizer: Any) -> list[int]:
    """Return the ids of the end tokens that the template writes after a last answer and after an earlier one, if any.

    They need not be among the model's eos tokens (a base model given a ChatML template): generation must stop at the
    first one too. Some templates (Harmony) end an earlier answer differently.
    """
    form = answer_form(tokenizer)
    endings = [token_ids(tokenizer, ending) for ending in (form.ending, form.in_history[1]) if ending]
    special = special_ids(tokenizer)
    return [ids[-1] for ids in endings if ids[-1] in special]
