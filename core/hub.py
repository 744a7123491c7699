"""The Hub: which names are ids there, and what it refuses, each in one sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants, errors

from draftsmith.errors import UserError, os_error_message, reason

_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^@\s]+))?")
# What hf_xet, which is written in Rust, says in errors without a type of their own.
_XET_STATUS, _XET_NETWORK = re.compile(r"HTTP status \w+ error \((\d{3})\b"), "error sending request"
AGAIN = "run the same command again to go on"
# With `{repo}`, `{hub}` for its address and `{tokens}` for the page of tokens.
BY_TYPE = (
    (
        errors.LocalTokenNotFoundError,
        "there is no token: run `hf auth login`, or put one ({tokens}) into the environment as HF_TOKEN",
    ),
    (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE keeps this machine off the Hub: unset it"),
    (errors.GatedRepoError, "{repo} is gated: ask for access on its page, and be logged in (`hf auth login`)"),
    (errors.RevisionNotFoundError, "{repo} has no such revision: see its branches, tags and commits on its page"),
    (
        errors.RepositoryNotFoundError,
        "the Hub shows no repository {repo} to this token: check its name, or log in (`hf auth login`)",
    ),
)
BY_STATUS = {
    401: "the Hub refuses the token (HTTP 401): make a new one ({tokens}), then `hf auth login` or HF_TOKEN",
    403: "the token may not do that in {repo} (HTTP 403): give it write permission ({tokens}), or use --repo",
    409: f"{{repo}} is being changed by somebody else at this moment (HTTP 409): {AGAIN}",
    429: f"the Hub asks for a pause (HTTP 429): {AGAIN} in a few minutes",
    500: f"the Hub fails (HTTP {{status}}): {AGAIN} when it is back",
}
NO_CONNECTION = f"the connection to {{hub}} failed or broke off ({{type}}): {AGAIN}; no file is sent twice"


def hub_id(name: str) -> tuple[str, str | None] | None:
    """`user/repo` or `user/repo@revision` as (repository, revision); None if the name cannot be one."""
    match = _HUB_ID.fullmatch(name)
    return None if match is None else (match["repo"], match["revision"])


@contextmanager
def hub_errors(action: str, repo: str) -> Iterator[None]:
    """Around calls of huggingface_hub, and nothing else.

    Args:
        action: How the sentence begins: what was tried.
        repo: The repository that it is about.

    Raises:
        UserError: Says what the Hub refused, or that it cannot be reached, and the way out.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any kind: hf_xet raises its own
        chain: list[BaseException] = [error]  # and what it was raised from
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
            chain.append(cause)
        if any(os_error_message(cause) for cause in chain if isinstance(cause, Exception)):
            raise
        sentence = next(filter(None, (_sentence(cause, repo) for cause in chain)), None)
        raise UserError(f"{action}: {sentence or reason(error)}") from None


def _sentence(error: BaseException, repo: str) -> str | None:
    """Say what this one error means to a user; None if it says nothing by itself."""
    sentence, status = next((text for kind, text in BY_TYPE if isinstance(error, kind)), None), None
    if sentence is None:
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
        elif match := _XET_STATUS.search(str(error)):
            status = int(match[1])
        elif isinstance(error, httpx2.TransportError) or _XET_NETWORK in str(error):
            sentence = NO_CONNECTION
        if status is not None and (sentence := BY_STATUS.get(min(status, 500))) is None:
            return f"the Hub refuses (HTTP {status}: {reason(error)})"
    hub, kind = constants.ENDPOINT, type(error).__name__
    return sentence and sentence.format(repo=repo, hub=hub, tokens=f"{hub}/settings/tokens", status=status, type=kind)
