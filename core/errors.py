"""Errors for users: one sentence that names the file, line or key, and the way out, without secrets."""

import difflib
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

MASK = "***"
_SECRET_KEY = (
    r"(?:\w+_)?(?:password|secret|(?:hub|hf|api|access|auth)_(?:token|key))"  # names that our dependencies use
)
_PAIR = re.compile(rf"""\b({_SECRET_KEY}|api_key_env)(["']?\s*[:=]\s*["']?)([^\s"',}}]+)""")
_CREDENTIALS = re.compile(r"""(?<=://)(?:(?!://)[^\s"'])+(?=@)|[^\s"'/:=,\[]+:[^\s"'/]+(?=@)""")
USER_ERROR_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE, TERMINATED_EXIT_CODE = 130, 143  # 128 + the signal's number, as in shells
INTERRUPTED = "interrupted: run the same command again to continue where it stopped"
# Errors of disks. Those of paths occur in networks too, so they count only if the error has a file's name.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE}
PATH_ERRORS = {
    errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE,
}  # fmt: skip
LONGEST_REASON = 300
TORCH_WRITERS = ("PytorchStreamWriter", "inline_container.cc")


class UserError(Exception):
    """A mistake in the user's input (recipe, conversations, target), reported in one sentence without a traceback."""

    exit_code = USER_ERROR_EXIT_CODE

    def __str__(self) -> str:
        """Return the sentence, without secrets in a quoted URL or override."""
        return masked(super().__str__())


class Terminated(KeyboardInterrupt):
    """Exception raised at SIGTERM, from a scheduler or `docker stop`; it ends a command as Ctrl-C does."""


def did_you_mean(word: str, known: Iterable[str], otherwise: str, cutoff: float = 0.5) -> str:
    """Return "did you mean `X`?" with the known word that is most similar to `word`, or `otherwise` if none is similar.

    Args:
        cutoff: Lowest similarity that counts, from 0 to 1, by `difflib`.
    """
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean `{nearest[0]}`?" if nearest else otherwise


def reason(error: BaseException) -> str:
    """Return an error's message as one line of at most 300 characters, or the name of its type if it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + " ..."


@contextmanager
def exit_with_one_sentence() -> Iterator[None]:
    """Report `UserError`, Ctrl-C, SIGTERM and errors of disks and paths in one line on stderr, with a non-zero exit.

    Any other error is a bug in draftsmith and keeps its traceback.
    """
    try:
        with _sigterm_raises():
            yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as stop:
        print(INTERRUPTED, file=sys.stderr)
        code = TERMINATED_EXIT_CODE if isinstance(stop, Terminated) else INTERRUPTED_EXIT_CODE
        raise SystemExit(code) from None
    except Exception as error:
        sentence = os_error_message(error)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        raise SystemExit(USER_ERROR_EXIT_CODE) from None


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM, in this process only, as a pool ends its forked workers by the same signal."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    process = os.getpid()

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            os._exit(TERMINATED_EXIT_CODE)
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def os_error_message(error: Exception) -> str | None:
    """Return a one-sentence message for a disk or path error, also if a library wraps it; None for any other error."""
    number, file, text = None, getattr(error, "filename", None), str(error)
    if isinstance(error, OSError) and error.errno is not None:
        number = error.errno if error.errno in DISK_ERRORS or (file and error.errno in PATH_ERRORS) else None
    elif code := re.search(r"\(os error (\d+)\)", text):  # safetensors
        number = int(code[1])
    elif os.strerror(errno.ENOSPC) in text:
        number = errno.ENOSPC
    elif any(name in text for name in TORCH_WRITERS):  # torch's message gives no reason
        number = errno.EIO
    if number is None:
        return None
    what = os.strerror(number)
    return (
        f"{what[0].lower()}{what[1:]}{f': {file}' if file else ''}: free some space or correct the cause (`ulimit -a` "
        "shows the limits), or choose another folder (`runs_dir` and `name` in the recipe), then run the same command "
        "again to continue"
    )


def masked(value: Any) -> Any:
    """Remove secrets, such as passwords and API keys, from a text or from a tree of mappings and lists.

    A mapping loses the keys that hold a secret. In a text, a secret becomes `***`, as do user and password of a URL.
    """
    if isinstance(value, dict):
        return {key: masked(inner) for key, inner in value.items() if not _is_secret(str(key), str(inner))}
    if isinstance(value, list):
        return [masked(inner) for inner in value]
    if not isinstance(value, str):
        return value
    text = _PAIR.sub(lambda pair: pair[1] + pair[2] + (MASK if _is_secret(pair[1], pair[3]) else pair[3]), value)
    return _CREDENTIALS.sub(MASK, text)


def _is_secret(key: str, value: str) -> bool:
    """Return whether the value is a secret, which includes an API key in place of its variable's name."""
    return re.fullmatch(_SECRET_KEY, key) is not None or (key == "api_key_env" and not value.isidentifier())


def read_api_key(variable: str, option: str) -> str:
    """Return the API key that an environment variable holds; an error hides a malformed name, probably the key itself.

    Args:
        option: Option or recipe key that names the variable, for the message.

    Raises:
        UserError: The variable is not set, or its value cannot be sent in an HTTP header.
    """
    if not os.environ.get(variable):
        shown = variable if variable.isidentifier() else "of this name (not shown: it looks like the key itself)"
        raise UserError(f"{option}: there is no environment variable {shown}: give the name of one that is set")
    key = os.environ[variable].strip()
    if not (key and key.isascii() and key.isprintable()):
        raise UserError(
            f"{option}: {variable} holds line breaks or other characters that HTTP headers do not allow: set it to the "
            "key alone"
        )
    return key
