"""One process at a time trains, writes features, tunes or measures in a run's folder; distillation may be shared.

The lock is the operating system's (flock): it goes with its process, however that ends, and there is no stale one to
remove. What stands in the file beside it is for people: who holds it.
"""

import functools
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from filelock import FileLock, Timeout

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder, check_writable
from draftsmith.recipes.schema import Recipe

LOCK_FILE, OWNER_FILE = ".lock", ".lock.json"
Options = ParamSpec("Options")
Result = TypeVar("Result")


def alone_in_its_run(
    stage: str,
) -> Callable[[Callable[Concatenate[Recipe, Options], Result]], Callable[Concatenate[Recipe, Options], Result]]:
    """Decorates a stage, a function of a recipe: it holds the run's lock while it works. `stage`: for the sentence."""

    def decorate(
        function: Callable[Concatenate[Recipe, Options], Result],
    ) -> Callable[Concatenate[Recipe, Options], Result]:
        @functools.wraps(function)
        def locked(recipe: Recipe, *args: Options.args, **options: Options.kwargs) -> Result:
            if int(os.environ.get("RANK", "0")) > 0:  # of several processes of one training the first holds it
                return function(recipe, *args, **options)
            with run_lock(RunFolder(recipe).root, stage):
                return function(recipe, *args, **options)

        return locked

    return decorate


@contextmanager
def run_lock(root: Path, stage: str) -> Iterator[None]:
    """Be the only one at work in `runs/<name>`.

    Raises:
        UserError: Another process is; says which.
    """
    check_writable(root)
    root.mkdir(parents=True, exist_ok=True)
    lock: Any = FileLock(root / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{root} is in use by {_owner(root)}: wait for it, stop it, or give this recipe another `name`"
        ) from None
    except NotImplementedError:  # a file system without locks
        yield
        return
    owner = {"stage": stage, "process": os.getpid(), "host": socket.gethostname()}
    try:
        (root / OWNER_FILE).write_text(json.dumps(owner) + "\n", encoding="utf-8")
        yield
    finally:
        (root / OWNER_FILE).unlink(missing_ok=True)
        lock.release()


def _owner(root: Path) -> str:
    try:
        owner = json.loads((root / OWNER_FILE).read_text(encoding="utf-8"))
        return f"`draftsmith {owner['stage']}` (process {owner['process']} on {owner['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another draftsmith process"  # that has just begun
