"""Where what is fetched or converted once lies, for every run of this user."""

import os
from pathlib import Path

CACHE_VARIABLE = "DRAFTSMITH_CACHE"


def cache_root() -> Path:
    """`$DRAFTSMITH_CACHE`, or `draftsmith` in the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "draftsmith"
