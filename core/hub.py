"""The Hugging Face Hub: parsing of ids, and its errors in one sentence each."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from draftsmith.errors import UserError, os_error_message, reason

_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^@\s]+))?")


def hub_id(name: str) -> tuple[str, str | None] | None:
    """Split `user/repo` or `user/repo@revision` into (repository, revision); None if the name is no Hub id."""
    match = _HUB_ID.fullmatch(name)
    return None if match is None else (match["repo"], match["revision"])


@contextmanager
def hub_errors(action: str, repo: str) -> Iterator[None]:
    """Turn errors of huggingface_hub in this context, which must contain only its calls, into a `UserError`.

    Args:
        action: Start of the sentence, such as "nothing was pushed".
        repo: Name of the repository.

    Raises:
        UserError: The Hub refused a request or cannot be reached.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any type: hf_xet has its own
        chain: list[BaseException] = [error]  # and its causes
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
            chain.append(cause)
        if any(os_error_message(cause) for cause in chain if isinstance(cause, Exception)):
            raise
        raise UserError(
            f"{action}: {type(error).__name__} for {repo}: {reason(error)}; if the Hub refused, check the name and log "
            "in (`hf auth login`) with a token that may do this, otherwise run the same command again to continue"
        ) from None
