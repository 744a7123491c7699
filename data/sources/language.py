"""Which language the user turns are in, by py3langid (a naive Bayes model of byte n-grams, 4 MB, part of the package).

Its confidence is calibrated. A conversation stays where it is low (a name, a formula, code, two words) and where a
wanted language is not out of the question (short English is easily taken for Nigerian Pidgin).
"""

import difflib
import importlib
from typing import Any

from draftsmith.data.sources.parsing import Conversation
from draftsmith.recipes.errors import UserError

SURE_FRAC = 0.5
DOUBT_FRAC = 0.1
READ_CHARS = 2000
NO_LANGUAGE = "zxx"  # code, figures


class LanguageFilter:
    """Finds conversations in other languages than those wanted.

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
                nearest = difflib.get_close_matches(language[:2], known, n=1)
                hint = f"did you mean `{nearest[0]}`?" if nearest else f"known are {', '.join(known)}"
                raise UserError(f"data.conversations.filters.languages: unknown language code `{language}`: {hint}")
        self._wanted = {*languages, NO_LANGUAGE}

    def find(self, conversation: Conversation) -> str | None:
        """`language de`, if that is not wanted and there is little doubt."""
        text = "\n".join(turn.content for turn in conversation.turns if turn.role == "user")
        ranked = self._identifier.rank(text[:READ_CHARS])  # (language, probability), the likeliest first
        language, probability = ranked[0]
        doubt = sum(other for name, other in ranked if name in self._wanted)
        return f"language {language}" if probability >= SURE_FRAC and doubt < DOUBT_FRAC else None
