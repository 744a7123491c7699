"""The one error that users see: a sentence that names the file, line or key, and the way out."""

import difflib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from draftsmith.recipes.masking import masked
from draftsmith.recipes.signals import (
    INTERRUPTED,
    INTERRUPTED_EXIT_CODE,
    TERMINATED_EXIT_CODE,
    Terminated,
    interrupted_by_signals,
)

ANOTHER_PLACE = "or name another place (`runs_dir` and `name` in the recipe)"
PERMISSIONS = f"change its permissions, {ANOTHER_PLACE}"
OUT_OF_THE_WAY = f"move out of the way what is there, {ANOTHER_PLACE}"
REFUSALS = {
    errno.ENOSPC: ("no space left on the device", "free some"),
    errno.EDQUOT: ("the quota of this disk is used up", "free some space"),
    errno.EFBIG: ("a file would grow beyond the limit that is set here", "raise it (`ulimit -f`)"),
    errno.EACCES: ("permission denied", PERMISSIONS),
    errno.EPERM: ("permission denied", PERMISSIONS),
    errno.EROFS: ("the disk can only be read", f"mount it for writing, {ANOTHER_PLACE}"),
    errno.ENOTDIR: ("there is a file where a folder should be", OUT_OF_THE_WAY),
    errno.EEXIST: ("there is a file where a folder should be", OUT_OF_THE_WAY),
    errno.EISDIR: ("there is a folder where a file should be", OUT_OF_THE_WAY),
    errno.ENAMETOOLONG: ("a name is too long", "shorten it"),
    errno.ELOOP: ("links lead in a circle", "correct them"),
    errno.EIO: ("a file could not be written", "see whether the disk is full, at a limit (`ulimit -f`) or failing"),
    errno.ESTALE: ("the network disk has changed underneath", "mount it again"),
    errno.EMFILE: ("too many files are open", "raise the limit (`ulimit -n`)"),
}
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE}
TORCH_WRITERS = ("PytorchStreamWriter", "inline_container.cc")
USER_ERROR_EXIT_CODE = 2


class UserError(Exception):
    """A mistake in what the user gave us (recipe, conversations, target), told in one sentence without a traceback."""

    exit_code = USER_ERROR_EXIT_CODE

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
    """Turn `UserError`, Ctrl-C, SIGTERM and what disks and paths refuse into one line on stderr and a non-zero exit.

    Any other error is a bug of ours and keeps its traceback.
    """
    try:
        with interrupted_by_signals():
            yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as stop:
        print(INTERRUPTED, file=sys.stderr)
        code = TERMINATED_EXIT_CODE if isinstance(stop, Terminated) else INTERRUPTED_EXIT_CODE
        raise SystemExit(code) from None
    except Exception as error:
        sentence = what_the_system_refused(error)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        raise SystemExit(USER_ERROR_EXIT_CODE) from None


def what_the_system_refused(error: Exception) -> str | None:
    """A sentence about a disk or a path, if that is what the error is about; libraries wrap it in errors of theirs."""
    number, file, said = None, getattr(error, "filename", None), str(error)
    if isinstance(error, OSError) and error.errno is not None:
        number = error.errno if file or error.errno in OF_THE_DISK else None  # a network refuses with them too
    elif code := re.search(r"\(os error (\d+)\)", said):  # safetensors
        number = int(code[1])
    elif os.strerror(errno.ENOSPC) in said:
        number = errno.ENOSPC
    elif any(name in said for name in TORCH_WRITERS):  # which does not say what it was
        number = errno.EIO
    if number not in REFUSALS:
        return None
    what, way_out = REFUSALS[number]
    return f"{what}{f' for {file}' if file else ''}: {way_out}, then run the same command again to continue"
