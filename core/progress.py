"""Progress of stages: tqdm's bar on a terminal, a line every half minute in a log file, nothing with `--quiet`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tqdm import tqdm

LOG_INTERVAL_S = 30.0
# Progress bars of huggingface_hub, datasets and transformers, which would only fill a log file.
LIBRARIES_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
IN_A_FILE = {**LIBRARIES_BARS, "TQDM_MININTERVAL": str(LOG_INTERVAL_S), "TQDM_MAXINTERVAL": str(LOG_INTERVAL_S)}
QUIET = {**LIBRARIES_BARS, "TQDM_DISABLE": "1"}
Progress: TypeAlias = "tqdm[Any]"
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


def progress_bar(
    total: int, what: str, unit: str, initial: int = 0, unit_scale: bool = False, shown: bool = True
) -> Progress:
    """Return a bar of `total` units, `initial` of them done before; hidden unless `shown`, or with `--quiet`."""
    from tqdm import tqdm  # reads the environment when it is imported

    interval_s = 0.1 if sys.stderr.isatty() else LOG_INTERVAL_S
    return tqdm(
        total=total,
        initial=initial,
        desc=what,
        unit=unit,
        unit_scale=unit_scale,
        mininterval=interval_s,
        maxinterval=max(10.0, interval_s),
        disable=is_quiet() or not shown,
    )


def is_quiet() -> bool:
    """Return whether the command was called with `--quiet`."""
    return _quiet.get()


@contextmanager
def configure_progress_bars(quiet: bool = False) -> Iterator[None]:
    """Draw all progress bars every half minute unless stderr is a terminal; with `quiet` never.

    Enter it before importing the libraries, which read these variables when they are imported.
    """
    values = QUIET if quiet else {} if sys.stderr.isatty() else IN_A_FILE
    before = {name: os.environ.get(name) for name in values}
    token = _quiet.set(quiet)
    os.environ |= values
    try:
        yield
    finally:
        _quiet.reset(token)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
