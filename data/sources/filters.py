"""Valid conversations that the recipe does not want: too short, too long, or in another language."""

from typing import Any

from draftsmith.data.sources.language import LanguageFilter
from draftsmith.data.sources.parsing import Conversation
from draftsmith.recipes.schema import FiltersRecipe


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
