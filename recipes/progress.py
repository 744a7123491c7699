"""How far a stage is: a bar on a terminal, a line every so often in a log file, nothing when it is to be quiet."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, Self

LOG_INTERVAL_S = 30.0
LINE = "{desc}: {n_fmt}/{total_fmt} ({percentage:.0f} %), {elapsed} gone, {remaining} to go, {rate_fmt}{postfix}"
# What libraries' own bars ask, each of another variable: hours of them would be one line of a log file.
LIBRARIES_BARS = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


class Progress(Protocol):
    """What stages do with it; also what tqdm's bars do."""

    def update(self, n: float = 1) -> Any: ...

    def set_postfix(self, ordered_dict: Mapping[str, Any], refresh: bool = True) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> Any: ...


def progress_bar(
    total: int, what: str, unit: str, initial: int = 0, unit_scale: bool = False, shown: bool = True
) -> Progress:
    """Of `total` units, `initial` of them done before.

    Args:
        shown: False, as with `--quiet`: nothing is written anywhere.
    """
    from tqdm import tqdm

    if is_quiet() or not shown:
        return tqdm(disable=True)
    if sys.stderr.isatty():
        return tqdm(total=total, initial=initial, desc=what, unit=unit, unit_scale=unit_scale, disable=False)
    return ProgressLines(total, what, unit, initial, unit_scale)


class ProgressLines:
    """The same for a file: a whole line every `LOG_INTERVAL_S`, and one at the end."""

    def __init__(
        self,
        total: int,
        what: str,
        unit: str,
        initial: int = 0,
        unit_scale: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.what, self.unit, self.initial, self.unit_scale = total, what, unit, initial, unit_scale
        self.n: float = initial
        self._clock = clock
        self._began_s = self._said_s = clock()
        self._said_n: float | None = None
        self._postfix = ""

    def update(self, n: float = 1) -> None:
        self.n += n
        if self._clock() - self._said_s >= LOG_INTERVAL_S:
            self._say()

    def set_postfix(self, ordered_dict: Mapping[str, Any], refresh: bool = True) -> None:
        self._postfix = ", ".join(f"{key} {value}" for key, value in ordered_dict.items())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.n != self._said_n:
            self._say()

    def _say(self) -> None:
        from tqdm import tqdm

        self._said_s, self._said_n = self._clock(), self.n
        line = tqdm.format_meter(
            self.n,
            self.total,
            self._said_s - self._began_s,
            prefix=self.what,
            unit=self.unit,
            unit_scale=self.unit_scale,
            postfix=self._postfix,
            initial=self.initial,
            bar_format=LINE,
        )
        print(" ".join(line.split()), file=sys.stderr, flush=True)  # rates come padded


def is_quiet() -> bool:
    """Whether `--quiet` was said."""
    return _quiet.get()


@contextmanager
def bars_where_they_can_be(quiet: bool = False) -> Iterator[None]:
    """In here libraries draw no bars of their own unless stderr is a terminal; with `quiet` nobody does.

    To be entered before the libraries are imported, which is when they ask.
    """
    before = {name: os.environ.get(name) for name in LIBRARIES_BARS}
    token = _quiet.set(quiet)
    if quiet or not sys.stderr.isatty():
        os.environ |= LIBRARIES_BARS
    try:
        yield
    finally:
        _quiet.reset(token)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
