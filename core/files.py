"""Files of a run: atomic writes, validated reads, hashes, free disk space, and the cache folder."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from draftsmith.errors import UserError

CACHE_VARIABLE = "DRAFTSMITH_CACHE"
FormT = TypeVar("FormT")


def read_json(file: Path, form: type[FormT], way_out: str, key: str | None = None) -> FormT:
    """Read and validate a JSON file of a run's folder.

    Args:
        form: Type to validate by pydantic, a dataclass or `dict[str, Any]`; unknown keys are dropped.
        way_out: Advice for the error message, such as "delete it and run the same command again".
        key: Read only the value of this key.

    Raises:
        UserError: The file cannot be read, is not JSON, or does not have this form.
    """
    try:
        values = from_json(file.read_bytes())
        if key is not None:
            values = TypeAdapter(dict[str, Any]).validate_python(values)[key]
        return TypeAdapter(form).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
    except KeyError:
        reason = f"it has no `{key}`"
    except ValueError as error:
        reason = f"no JSON: {error}"
    except OSError as error:
        reason = error.strerror or "it cannot be read"
    raise UserError(f"{file} is damaged or of another version: {way_out} ({reason})")


def write_atomically(file: Path, text: str) -> None:
    """Write the file completely or not at all: after a full disk or Ctrl-C the old file is still there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{secrets.token_hex(4)}.partial")  # process ids repeat, in containers
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_json(file: Path, values: Any) -> None:
    """Write values that JSON can hold, indented for readers, as `write_atomically` does."""
    write_atomically(file, json.dumps(values, indent=2) + "\n")


def append_whole(file: Path, lines: bytes) -> None:
    """Append lines to a file (created if missing) and wait until they are on disk; after an error it has none of them.

    Raises:
        OSError: The disk is full; the error names the file.
    """
    rest = memoryview(lines)
    with file.open("ab", buffering=0) as stream:
        begin = stream.tell()
        try:
            while rest:
                rest = rest[stream.write(rest) :]
            os.fsync(stream.fileno())
        except BaseException as error:
            os.ftruncate(stream.fileno(), begin)
            if isinstance(error, OSError):
                error.filename = str(file)
            raise


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write to, which replaces `folder` at the end of the context; on an error `folder` stays.

    The new folder is inside a temporary one next to `folder`, locked while this process writes. The next call deletes
    what a killed process left there, and restores `folder` if the process was killed while it replaced it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*.partial"):
        with suppress(OSError), _locked(left):  # not of a process that works there now
            if any(left.iterdir()):  # else it was made just now, and is not locked yet
                _end_write(left, folder)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    with _locked(beside, is_new=True):
        try:
            new, old = beside / "new", beside / "old"
            new.mkdir()
            yield new
            share_as_usual(new)
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        finally:
            _end_write(beside, folder)


@contextmanager
def _locked(folder: Path, is_new: bool = False) -> Iterator[None]:
    """Lock a folder against other processes in this context; a new one only where the file system has locks.

    Raises:
        OSError: Another process has locked it, or the file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError) if is_new else nullcontext():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _end_write(beside: Path, folder: Path) -> None:
    """Put the old folder back if a write stopped between its two renames, and delete the rest."""
    if (beside / "old").exists() and not folder.exists():
        (beside / "old").rename(folder)
    shutil.rmtree(beside, ignore_errors=True)


def expand_home(path: str | Path) -> Path:
    """Expand a leading `~`. For an unknown user the path stays as it is, where `Path.expanduser` raises an error."""
    return Path(os.path.expanduser(path))


def check_writable(folder: Path) -> None:
    """Check that the folder can be created and written to, before work whose results go there.

    Raises:
        OSError: The folder cannot be created or written to.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        is_read_only = bool(os.statvfs(existing).f_flag & os.ST_RDONLY)
        number = errno.EROFS if is_read_only else errno.EACCES
        raise OSError(number, os.strerror(number), str(existing))


def share_as_usual(folder: Path) -> None:
    """Set a folder's safetensors files, readable only by their owner, to the permissions of its `config.json`."""
    config = folder / "config.json"
    if config.is_file():  # missing in a sharded save
        for file in folder.glob("*.safetensors"):
            file.chmod(stat.S_IMODE(config.stat().st_mode))


def is_own(file: Path) -> bool:
    """Return whether only this user, or root, can write to a file; always True on Windows."""
    if os.name != "posix":
        return True
    status = file.stat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def bytes_text(size: float) -> str:
    """Format a number of bytes as `604 MiB` or `1.2 TiB`."""
    amount, unit = scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{amount:,.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def scaled(amount: float, step: int, units: tuple[str, ...]) -> tuple[float, str]:
    """Return the amount in the largest unit in which it is at least 1, and that unit; a unit is `step` of the last."""
    exponent = 0
    while amount >= step and exponent < len(units) - 1:
        amount, exponent = amount / step, exponent + 1
    return amount, units[exponent]


def free_bytes_at(folder: Path) -> int:
    """Return the free bytes of the disk that the folder is on, or will be on."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def cache_root() -> Path:
    """Return the cache folder: `$DRAFTSMITH_CACHE`, or `draftsmith` in the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return expand_home(named)
    return expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "draftsmith"
