"""Progress of stages: tqdm's bar on a terminal, a line every half minute in a log file, nothing with `--quiet`."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tqdm import tqdm

LOG_INTERVAL_S = 30.0
LOG_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}, {rate_fmt}, {remaining} left"
# Progress bars of huggingface_hub, datasets and transformers, which would only fill a log file.
LIBRARIES_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
IN_A_FILE = {**LIBRARIES_BARS, "TQDM_MININTERVAL": str(LOG_INTERVAL_S), "TQDM_MAXINTERVAL": str(LOG_INTERVAL_S)}
QUIET = {**LIBRARIES_BARS, "TQDM_DISABLE": "1"}
Progress: TypeAlias = "tqdm[Any]"
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


def progress_bar(
    total: int, what: str, unit: str, initial: int = 0, unit_scale: bool = False, shown: bool = True
) -> Progress:
    """Return a tqdm bar of `total` units, of which `initial` are done already; `shown=False` and `--quiet` hide it.

    `what` is the label; a path in it is shortened to its last part. A log file gets a line every half minute.
    """
    from tqdm import tqdm  # reads the environment when it is imported

    in_a_file: dict[str, Any] = {
        "file": _Lines(),
        "bar_format": LOG_LINE,
        "delay": LOG_INTERVAL_S,
        "mininterval": LOG_INTERVAL_S,
        "maxinterval": LOG_INTERVAL_S,
    }
    return tqdm(
        total=total,
        initial=initial,
        desc=re.sub(r"[^\s/]*/\S*?([^\s/]+)/?(?=\s|$)", r"\1", what),
        unit=unit,
        unit_scale=unit_scale,
        disable=is_quiet() or not shown,
        **({} if sys.stderr.isatty() else in_a_file),
    )


class _Lines:
    """The stderr of the moment for tqdm: whole lines, none twice, without carriage returns and moves of the cursor."""

    _last = ""

    def write(self, text: str) -> None:
        line = re.sub(r"\x1b\[[A-Z]", "", text).strip()
        if line and line != self._last:
            self._last = line
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def is_quiet() -> bool:
    """Return whether the command was called with `--quiet`."""
    return _quiet.get()


@contextmanager
def configure_progress_bars(quiet: bool = False) -> Iterator[None]:
    """Configure all progress bars: live on a terminal, otherwise a line every half minute; with `quiet` none.

    Enter this context before importing tqdm or Hugging Face libraries, which read its variables when they are imported.
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
