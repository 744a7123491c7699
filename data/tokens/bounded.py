"""Limits of time, memory and output for chat templates, which are untrusted programs.

transformers' sandbox keeps templates from files and the network, but they may loop for ever, or double a string until
memory is full. While a template runs, the process's address space is limited, so that `'a' * 3000000000` and
`'%3000000000d' % 1` fail, and a second thread raises an error in the template's thread if it takes too long. It cannot
interrupt one operation of C: those that take much time but little memory have limited operands (`BoundedEnvironment`).
"""

from __future__ import annotations

import ctypes
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from jinja2.filters import do_round, do_sum
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from draftsmith.errors import UserError

WITHIN_S = 20.0  # CPU time of its thread; the longest conversation takes a tenth of a second
MOST_GROWTH_BYTES = 2 << 30  # growth of this process while the template runs
MOST_BITS = 1 << 16  # of a number
MOST_CHARACTERS = 32 << 20  # length of the template's output: four of the longest conversations
LOOKS_EVERY_S = 0.05
RAISE_AGAIN_AFTER_S = 1.0  # if something in between caught the exception
STATUS = Path("/proc/self/statm")  # Linux only; on other systems the size of this process is not limited
ADDRESS_SPACE = resource.getrlimit(resource.RLIMIT_AS)

Written = TypeVar("Written", bound=Sized)
_in_thread = threading.local()


class EndlessTemplate(UserError):
    """Error for a chat template that ran too long, used too much memory or wrote too much text."""

    def __init__(self) -> None:
        super().__init__(
            f"the target's chat template does not end within {WITHIN_S:g} s, {MOST_GROWTH_BYTES >> 30} GiB of memory "
            f"and {MOST_CHARACTERS >> 20} million characters: correct it, or set target.chat_template to another one"
        )


def bounded(write: Callable[[], Written]) -> Written:
    """Call `write`, which renders a chat template, within limits of time, memory and length; return its text or tokens.

    A call inside another one shares the outer limits, so that one thread watches all renderings of a conversation.

    Raises:
        EndlessTemplate: The template exceeds a limit of time, memory or length.
    """
    if getattr(_in_thread, "is_bounded", False):
        try:
            return _of_bounded_length(write())
        except MemoryError:
            raise EndlessTemplate from None
    _in_thread.is_bounded = True
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(threading.get_ident(), ended), name="template", daemon=True)
    watch.start()
    try:
        try:
            with _limited_memory():
                written = write()
        except MemoryError:
            raise EndlessTemplate from None
        finally:
            _in_thread.is_bounded = False
            ended.set()
            watch.join()
            for _ in range(2):  # an exception that the other thread has just raised surfaces here, not later
                pass
    except EndlessTemplate:
        _in_thread.is_bounded = False  # again, if the exception interrupted the first call
        ended.set()
        raise
    return _of_bounded_length(written)


def _of_bounded_length(written: Written) -> Written:
    if len(written) > MOST_CHARACTERS:
        raise EndlessTemplate
    return written


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja sandbox for chat templates in which no arithmetic takes long: numbers have at most `MOST_BITS` bits."""

    intercepted_binops = frozenset(["**", "*", "//", "%"])

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.filters |= {"round": _bounded_round, "sum": _bounded_sum}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` for a template.

        Raises:
            EndlessTemplate: An operand or the result has more than `MOST_BITS` bits.
        """
        if isinstance(left, int) and isinstance(right, int):
            result_bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if max(left.bit_length(), right.bit_length(), result_bits) > MOST_BITS:
                raise EndlessTemplate
        return super().call_binop(context, operator, left, right)


# transformers builds the environment of every template by this name.
chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment


def _bounded_round(value: float, precision: int = 0, method: Any = "common") -> float:
    """Round as Jinja's filter, which computes 10 to the power of the precision."""
    if abs(precision) > MOST_BITS // 4:
        raise EndlessTemplate
    return do_round(value, precision, method)


def _bounded_sum(environment: Any, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Sum numbers as Jinja's filter; lists, which it would copy once for each item, are refused."""
    if not isinstance(start, int | float):
        raise EndlessTemplate
    return do_sum(environment, values, attribute, start)


_bounded_sum.jinja_pass_arg = do_sum.jinja_pass_arg  # type: ignore[attr-defined]


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Limit the address space of this process to its present size and `MOST_GROWTH_BYTES` in this context."""
    soft, hard = ADDRESS_SPACE
    pages = int(STATUS.read_text().split()[0]) if STATUS.exists() else 0
    most = pages * resource.getpagesize() + MOST_GROWTH_BYTES
    if not pages or 0 <= soft <= most:  # unknown, or limited already
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, ADDRESS_SPACE)


def _watch(thread: int, ended: threading.Event) -> None:
    """Check a thread's template until it has ended; raise `EndlessTemplate` in the thread if it takes too long."""
    began_s = _spent_s(thread)
    while not ended.wait(LOOKS_EVERY_S):
        if _spent_s(thread) - began_s > WITHIN_S:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(EndlessTemplate))
            ended.wait(RAISE_AGAIN_AFTER_S)


def _spent_s(thread: int) -> float:
    """Return a thread's seconds on the processor, without those of a sleeping machine; else the clock's."""
    with suppress(AttributeError, OSError):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()
