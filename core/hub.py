"""The Hugging Face Hub: parsing of ids, and its errors in one sentence each."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, errors

from draftsmith.errors import UserError, os_error_message, reason

_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^@\s]+))?")
# Messages of hf_xet, which is written in Rust and raises errors without specific types.
_XET_STATUS, _XET_NETWORK = re.compile(r"HTTP status \w+ error \((\d{3})\b"), "error sending request"
# By name, as huggingface_hub 1 uses httpx and later versions httpx2.
_TRANSPORT_ERRORS = {"httpx.TransportError", "httpx2.TransportError"}
AGAIN = "run the same command again to continue"
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
    """Split `user/repo` or `user/repo@revision` into (repository, revision); None if the name is no Hub id."""
    match = _HUB_ID.fullmatch(name)
    return None if match is None else (match["repo"], match["revision"])


@contextmanager
def hub_errors(action: str, repo: str) -> Iterator[None]:
    """Translate errors of huggingface_hub in this context, which must contain only its calls.

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
        sentence = next(filter(None, (_sentence(cause, repo) for cause in chain)), None)
        raise UserError(f"{action}: {sentence or reason(error)}") from None


def _sentence(error: BaseException, repo: str) -> str | None:
    """Return a sentence about this error for the user; None for an error of an unknown type."""
    sentence, status = next((text for kind, text in BY_TYPE if isinstance(error, kind)), None), None
    if sentence is None:
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
        elif match := _XET_STATUS.search(str(error)):
            status = int(match[1])
        elif _XET_NETWORK in str(error) or not _TRANSPORT_ERRORS.isdisjoint(map(_full_name, type(error).__mro__)):
            sentence = NO_CONNECTION
        if status is not None and (sentence := BY_STATUS.get(min(status, 500))) is None:
            return f"the Hub refuses (HTTP {status}: {reason(error)})"
    hub, kind = constants.ENDPOINT, type(error).__name__
    return sentence and sentence.format(repo=repo, hub=hub, tokens=f"{hub}/settings/tokens", status=status, type=kind)


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"
