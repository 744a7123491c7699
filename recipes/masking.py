"""Secrets in recipes, command lines and sentences: nothing that is written down or shown has them."""

import re
from typing import Any

MASK = "***"
_SECRET_KEY = r"(?:\w+_)?(?:password|secret|(?:hub|hf|api|access|auth)_(?:token|key))"  # as our libraries call them
_PAIR = re.compile(rf"""\b({_SECRET_KEY}|api_key_env)(["']?\s*[:=]\s*["']?)([^\s"',}}]+)""")
_CREDENTIALS = re.compile(r"""(?<=://)(?:(?!://)[^\s"'])+(?=@)|[^\s"'/:=,\[]+:[^\s"'/]+(?=@)""")
ENVIRONMENT_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


def masked(value: Any) -> Any:
    """A text, or a tree of mappings and lists, without its secrets.

    In a mapping they are left out, since such keys are read from the environment too. In a text they become `***`, and
    so does what stands before the @ of a URL, unless the environment holds the password (`http://me:$PASSWORD@host`).
    """
    if isinstance(value, dict):
        return {key: masked(inner) for key, inner in value.items() if not _is_secret(str(key), str(inner))}
    if isinstance(value, list):
        return [masked(inner) for inner in value]
    if not isinstance(value, str):
        return value
    text = _PAIR.sub(lambda pair: pair[1] + pair[2] + (MASK if _is_secret(pair[1], pair[3]) else pair[3]), value)
    return _CREDENTIALS.sub(_masked_credentials, text)


def _is_secret(key: str, value: str) -> bool:
    """Who gives the key itself where the name of a variable is asked for has given it away too."""
    return re.fullmatch(_SECRET_KEY, key) is not None or (key == "api_key_env" and not value.isidentifier())


def _masked_credentials(credentials: re.Match[str]) -> str:
    password = credentials[0].rpartition(":")[2]
    return credentials[0] if ENVIRONMENT_VARIABLE.fullmatch(password) else MASK
