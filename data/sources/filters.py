"""Valid conversations that the recipe does not want: too short, too long, or in another language."""

import importlib
from typing import Any

from draftsmith.data.sources.conversation import Conversation
from draftsmith.recipes.errors import UserError, did_you_mean
from draftsmith.recipes.schema import FiltersRecipe

SURE_FRAC = 0.5
DOUBT_FRAC = 0.1
READ_CHARS = 2000
NO_LANGUAGE = "zxx"  # code, figures


class Filters:
    """The recipe's `data.conversations.filters`.

    Args:
        recipe: What is wanted.
        tokenizer: The target's; without it `max_tokens` is not applied.

    Raises:
        UserError: `languages` needs a package that is not installed, or names a language that it does not know.
    """

    def __init__(self, recipe: FiltersRecipe, tokenizer: Any) -> None:
        self._recipe, self._tokenizer = recipe, tokenizer
        self._languages = LanguageFilter(recipe.languages) if recipe.languages else None

    def find(self, conversation: Conversation) -> str | None:
        """The first reason to leave the conversation out, if any."""
        recipe = self._recipe
        user_turns = sum(turn.role == "user" for turn in conversation.turns)
        # An answer that the target is yet to write has no length.
        chars = [len(turn.content) for turn in conversation.turns if turn.role != "system" and turn.content]
        if user_turns < recipe.min_turns:
            return f"fewer than {recipe.min_turns} user turns"
        if recipe.max_turns is not None and user_turns > recipe.max_turns:
            return f"more than {recipe.max_turns} user turns"
        if min(chars) < recipe.min_turn_chars:
            return f"a turn of fewer than {recipe.min_turn_chars} characters"
        if recipe.max_turn_chars is not None and max(chars) > recipe.max_turn_chars:
            return f"a turn of more than {recipe.max_turn_chars} characters"
        if recipe.max_tokens is not None and self._tokens(conversation) > recipe.max_tokens:
            return f"more than {recipe.max_tokens} tokens"
        return None if self._languages is None else self._languages.find(conversation)

    def _tokens(self, conversation: Conversation) -> int:
        if self._tokenizer is None:
            return 0
        texts = [turn.content for turn in conversation.turns]
        return sum(map(len, self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]))


class LanguageFilter:
    """Finds conversations whose user turns are in other languages than those wanted.

    By py3langid (a naive Bayes model of byte n-grams, 4 MB, part of the package), whose confidence is calibrated. A
    conversation stays where it is low (a name, a formula, code, two words) and where a wanted language is not out of
    the question (short English is easily taken for Nigerian Pidgin).

    Args:
        languages: ISO 639-1 codes.

    Raises:
        UserError: py3langid is not installed, or does not know a code.
    """

    def __init__(self, languages: list[str]) -> None:
        try:
            langid: Any = importlib.import_module("py3langid.langid")
        except ImportError:
            raise UserError(
                "data.conversations.filters.languages needs the package py3langid: pip install 'draftsmith[language]'"
            ) from None
        self._identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
        known = [label for label in self._identifier.labels if label != NO_LANGUAGE]
        for language in languages:
            if language not in known:
                hint = did_you_mean(language[:2], known, f"known are {', '.join(known)}", cutoff=0.6)
                raise UserError(f"data.conversations.filters.languages: unknown language code `{language}`: {hint}")
        self._wanted = {*languages, NO_LANGUAGE}

    def find(self, conversation: Conversation) -> str | None:
        """`language de`, if that is not wanted and there is little doubt."""
        text = "\n".join(turn.content for turn in conversation.turns if turn.role == "user")
        ranked = self._identifier.rank(text[:READ_CHARS])  # (language, probability), the likeliest first
        language, probability = ranked[0]
        doubt = sum(other for name, other in ranked if name in self._wanted)
        return f"language {language}" if probability >= SURE_FRAC and doubt < DOUBT_FRAC else None
