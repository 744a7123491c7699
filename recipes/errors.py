"""The one error that users see: a sentence that names the file, line or key, and the way out."""

import difflib
import errno
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from draftsmith.recipes.masking import masked
from draftsmith.recipes.signals import INTERRUPTED, INTERRUPTED_EXIT_CODE, interrupted_by_signals

USER_ERROR_EXIT_CODE = 2


class UserError(Exception):
    """A mistake in what the user gave us (recipe, conversations, target), told in one sentence without a traceback."""

    def __str__(self) -> str:
        """Without the secrets of a URL or an override that it quotes."""
        return masked(super().__str__())


def did_you_mean(word: str, known: Iterable[str], otherwise: str, cutoff: float = 0.5) -> str:
    """The end of a sentence about an unknown word: the nearest known one, or `otherwise` if none is near.

    cutoff: the least likeness, from 0 to 1, by `difflib`.
    """
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean `{nearest[0]}`?" if nearest else otherwise


@contextmanager
def exit_with_one_sentence() -> Iterator[None]:
    """Turn `UserError`, Ctrl-C, SIGTERM and a full disk into one line on stderr and a non-zero exit.

    Any other error is a bug of ours and keeps its traceback.
    """
    try:
        with interrupted_by_signals():
            yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(USER_ERROR_EXIT_CODE) from None
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        raise SystemExit(INTERRUPTED_EXIT_CODE) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(
            f"error: no space left on the device{f' for {error.filename}' if error.filename else ''}: "
            "free some, then run the same command again to continue",
            file=sys.stderr,
        )
        raise SystemExit(USER_ERROR_EXIT_CODE) from None
