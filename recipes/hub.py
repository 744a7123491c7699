"""The Hub: which names are ids there, and what it refuses, each in one sentence.

Whatever huggingface_hub does, its failures come out here: no token or a refused one, no such repository, a connection
that breaks in the middle.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from draftsmith.recipes.errors import UserError, what_the_system_refused

_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^@\s]+))?")
# What hf_xet, which is written in Rust, says in errors without a type of their own.
_XET_STATUS, _XET_NETWORK = re.compile(r"HTTP status \w+ error \((\d{3})\b"), "error sending request"
LONGEST_REASON = 300
AGAIN = "run the same command again to go on"


def hub_id(name: str) -> tuple[str, str | None] | None:
    """`user/repo` or `user/repo@revision` as (repository, revision); None if the name cannot be one."""
    found = _HUB_ID.fullmatch(name)
    return None if found is None else (found["repo"], found["revision"])


@contextmanager
def told_in_one_sentence(doing: str, repo: str) -> Iterator[None]:
    """Around calls of huggingface_hub, and nothing else.

    Args:
        doing: How the sentence begins: what was tried.
        repo: The repository that it is about.

    Raises:
        UserError: Says what the Hub refused, or that it cannot be reached, and the way out.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any kind: hf_xet raises its own
        chain = _causes(error)
        if any(what_the_system_refused(cause) for cause in chain if isinstance(cause, Exception)):
            raise
        said = next(filter(None, (_sentence(cause, repo) for cause in chain)), None)
        raise UserError(f"{doing}: {said or _reason(error)}") from None


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, outermost first."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


def _sentence(error: BaseException, repo: str) -> str | None:
    """What this one error says to a user; None if it says nothing by itself."""
    tokens = f"{constants.ENDPOINT}/settings/tokens"
    if isinstance(error, LocalTokenNotFoundError):
        return f"there is no token: run `hf auth login`, or put one ({tokens}) into the environment as HF_TOKEN"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE keeps this machine off the Hub: unset it"
    if isinstance(error, GatedRepoError):
        return f"{repo} is gated: ask for access on its page, and be logged in (`hf auth login`)"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no such revision: see its branches, tags and commits on its page"
    if isinstance(error, RepositoryNotFoundError):
        return f"the Hub shows no repository {repo} to this token: check its name, or log in (`hf auth login`)"
    if isinstance(error, HfHubHTTPError):
        return _status_sentence(error.response.status_code, _reason(error), repo, tokens)
    if status := _XET_STATUS.search(str(error)):
        return _status_sentence(int(status[1]), _reason(error), repo, tokens)
    if isinstance(error, httpx2.TransportError) or _XET_NETWORK in str(error):
        what = type(error).__name__
        return f"the connection to {constants.ENDPOINT} failed or broke off ({what}): {AGAIN}; no file is sent twice"
    return None


def _status_sentence(status: int, reason: str, repo: str, tokens: str) -> str:
    if status == 401:
        return f"the Hub refuses the token (HTTP 401): make a new one ({tokens}), then `hf auth login` or HF_TOKEN"
    if status == 403:
        return f"the token may not do that in {repo} (HTTP 403): give it write permission ({tokens}), or use --repo"
    if status == 409:
        return f"{repo} is being changed by somebody else at this moment (HTTP 409): {AGAIN}"
    if status == 429:
        return f"the Hub asks for a pause (HTTP 429): {AGAIN} in a few minutes"
    if status >= 500:
        return f"the Hub fails (HTTP {status}): {AGAIN} when it is back"
    return f"the Hub refuses (HTTP {status}: {reason})"


def _reason(error: BaseException) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= LONGEST_REASON else said[:LONGEST_REASON] + " ..."
