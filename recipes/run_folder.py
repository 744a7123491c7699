"""The run folder `runs/<name>/`: its paths, its lock, and the settings that it was started with.

One launch at a time trains, writes features, tunes or measures in a run folder, and one distils. The lock is the
operating system's (flock), which releases it when the process ends, so that no stale lock is left. The file
`.lock.json` names its holder, for people.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import yaml
from filelock import FileLock, Timeout

from draftsmith.errors import UserError, masked
from draftsmith.files import check_writable, read_json, write_atomically, write_json
from draftsmith.provenance import Provenance
from draftsmith.recipes.removed import drop_unset
from draftsmith.recipes.schema import Recipe

PROVENANCE = "provenance.json"
SETTINGS, TEMPLATE_DATE = "distill_settings.json", "target.template_date"
LOCK_FILE, OWNER_FILE = ".lock", ".lock.json"
RANKS = ("WORLD_SIZE", "RANK", "LOCAL_RANK")  # variables of torchrun
MPI_WORLD_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
Options = ParamSpec("Options")
Result = TypeVar("Result")


class RunFolder:
    """Paths of one run's folder, `runs/<name>/`. Building the object writes nothing; `record` does."""

    def __init__(self, recipe: Recipe) -> None:
        self.root = Path(recipe.runs_dir) / recipe.name
        self.data = self.root / "data"
        self.features = self.root / "features"
        self.drafter = self.root / "drafter"
        self.eval = self.root / "eval"
        self._recipe = recipe

    def record(self, stage: str, inputs: dict[str, Path] | None = None) -> None:
        """Write the resolved recipe and add this stage to `provenance.json`, both without secrets.

        Args:
            stage: `distill`, `features`, `train` or `eval`.
            inputs: Files that the stage read, by name; their SHA-256 is stored.
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
        write_json(self.root / PROVENANCE, stages)

    def stages(self) -> dict[str, Any]:
        """Return all stages' entries of `provenance.json`; call it before long work, to notice a damaged file early.

        Raises:
            UserError: The file is damaged.
        """
        file = self.root / PROVENANCE
        return read_json(file, dict[str, Any], "delete it and run the same command again") if file.exists() else {}

    def provenance(self, stage: str) -> Provenance:
        """Read the provenance of a stage, as `record` wrote it.

        Raises:
            UserError: The provenance is missing or damaged.
        """
        return read_json(self.root / PROVENANCE, Provenance, f"delete it and run `draftsmith {stage}` again", stage)


# ---- the lock ----


def process_of_launch() -> tuple[int, int]:
    """Return (rank, world size) of this process, from the variables that torchrun sets; (0, 1) without a launcher.

    A `RANK` without a `WORLD_SIZE` above 1 is left over in the shell and does not count.

    Raises:
        UserError: One of the variables is not a number, or the rank is not below the world size.
    """
    processes = environment_number("WORLD_SIZE")
    rank = environment_number("RANK", 0, least=0) if processes > 1 else 0
    if rank >= processes:
        raise UserError(f"RANK={rank} in the environment is not below WORLD_SIZE={processes}: correct or unset both")
    return rank, processes


def environment_number(name: str, default: int = 1, least: int = 1) -> int:
    """Return a number that a launcher puts into the environment; the default if it is not set or empty.

    Raises:
        UserError: The value is not a number, or is below `least`.
    """
    value = os.environ.get(name, "").strip() or str(default)
    if not value.isdecimal() or int(value) < least:
        raise UserError(
            f"{name}={value} in the environment is not a number from {least} on: unset {name}, or start by `torchrun`"
        )
    return int(value)


def is_first_process() -> bool:
    """Return whether this process has rank 0 in its launch; that process prints messages and holds the run's lock."""
    return process_of_launch()[0] == 0


def with_run_lock(stage: str) -> Callable[[Callable[Options, Result]], Callable[Options, Result]]:
    """Decorate a stage, a function whose first argument is a recipe, to hold the run's lock while it runs.

    Args:
        stage: Name of the stage, for messages of other processes.
    """

    def decorate(function: Callable[Options, Result]) -> Callable[Options, Result]:
        @functools.wraps(function)
        def locked(*args: Options.args, **options: Options.kwargs) -> Result:
            if not is_first_process():  # the first one holds the lock for all
                return function(*args, **options)
            with run_lock(RunFolder(cast(Recipe, args[0])).root, stage):
                return function(*args, **options)

        return locked

    return decorate


@contextmanager
def run_lock(root: Path, stage: str) -> Iterator[None]:
    """Lock `runs/<name>` against other processes in this context.

    Raises:
        UserError: Another process holds the lock; the message names it.
    """
    check_writable(root)
    root.mkdir(parents=True, exist_ok=True)
    lock: Any = FileLock(root / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        owner = "another draftsmith process"  # which has just started
        with suppress(OSError, ValueError, KeyError, TypeError):
            holder = json.loads((root / OWNER_FILE).read_text(encoding="utf-8"))
            owner = f"`draftsmith {holder['stage']}` (process {holder['process']} on {holder['host']})"
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


# ---- settings ----

# Files of the drafter's folder: written before a training's first step, and after its last.
STARTED_FILE, TRAINING_FILE = "settings.json", "training.json"


def check_no_training_reads(data: Path) -> None:
    """Check that no unfinished training uses a run's token dataset: it could not resume with other examples.

    Args:
        data: The run's data folder, or a link to that of another run.

    Raises:
        UserError: An unfinished training uses the token dataset.
    """
    for root in dict.fromkeys((data.parent, data.resolve().parent)):
        drafter = root / "drafter"
        if (drafter / STARTED_FILE).is_file() and not (drafter / TRAINING_FILE).is_file():
            raise UserError(
                f"{drafter} holds an unfinished training on the token dataset of {data}, which could not resume with "
                "other examples: finish it with `draftsmith train`, delete that folder, or give this recipe another "
                "`name`"
            )


def as_distilled(recipe: Recipe) -> tuple[Recipe, str]:
    """Return the recipe with the settings that its stored data was distilled with, and a message if they differ.

    Later stages read the stored answers, so the stored settings replace those of the recipe and its overrides.
    """
    folder, differing = RunFolder(recipe).data, []
    if not (folder / SETTINGS).is_file():
        return recipe, ""
    stored = drop_unset(read_json(folder / SETTINGS, dict[str, Any], "restore it, or distil again"))
    sections = {}
    for name, section in (("distill", recipe.data.distill), ("conversations", recipe.data.conversations)):
        now = json.loads(section.model_dump_json(exclude={"options", "limit", "decontaminate"}))
        values = {key: stored[f"data.{name}.{key}"] for key in now if f"data.{name}.{key}" in stored}
        different = {key: value for key, value in values.items() if _flat(value) != _flat(now[key])}
        differing += [f"data.{name}.{key} = {value!r}" for key, value in different.items()]
        plain = {key: value for key, value in different.items() if not isinstance(value, list | dict)}
        sections[name] = section.model_copy(update=plain)
    sentence = f"the data in {folder} were distilled with {', '.join(differing)}, which replaces this recipe's settings"
    data = recipe.data.model_copy(update=sections)
    return recipe.model_copy(update={"data": data}), sentence if differing else ""


def recorded_date(data: Path) -> str | None:
    """Return the date that the chat template wrote into the prompts of a data folder; None if it wrote no date."""
    file = data / SETTINGS
    return read_json(file, dict[str, Any], "restore it, or distil again").get(TEMPLATE_DATE) if file.is_file() else None


def with_recorded_date(recipe: Recipe) -> Recipe:
    """Return the recipe with the `target.template_date` that its data folder records, unless the recipe sets one."""
    day = None if recipe.target.template_date else recorded_date(RunFolder(recipe).data)
    if day is None:
        return recipe
    target = recipe.target.model_copy(update={"template_date": day})
    return recipe.model_copy(update={"target": target})


def target_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that determine the target's weights (model, revision, dtype, ...), by recipe key."""
    chosen = recipe.target.model_dump(include={"model", "revision", "gguf_file", "dtype", "quantization"})
    return {f"target.{key}": value for key, value in chosen.items()}


def check_settings(file: Path, settings: dict[str, Any], advice: str, may_decrease: Collection[str] = ()) -> None:
    """Check the settings against those that a folder's content was made with, if these are stored.

    Args:
        file: The folder's settings in JSON.
        settings: The settings now, by recipe key or by section.
        advice: Verb phrase for the message: what to do after deleting the folder, such as `train again`.
        may_decrease: Keys of numbers that may be lower now.

    Raises:
        UserError: The file is damaged, or the settings differ; the message has the first differing key with both
            values, and the other keys.
    """
    if not file.is_file():
        return
    earlier = drop_unset(read_json(file, dict[str, Any], f"delete the folder {file.parent} to {advice}"))
    old, new = _flat(earlier), _flat(json.loads(json.dumps(settings)))
    decreased = {key for key in may_decrease if key in old and key in new and new[key] < old[key]}
    other = [key for key in {**new, **old} if old.get(key) != new.get(key) and key not in decreased]
    if other:
        first, *more = other
        too = f" ({', '.join(more)} changed too)" if more else ""
        raise UserError(
            f"{file.parent} was started with {first} = {old.get(first)!r}, now it is {new.get(first)!r}{too}: restore "
            f"the key, give the recipe another `name`, or delete that folder to {advice}"
        )


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """Flatten {"eval": {"methods": [{"paths": [[0]]}]}} to {"eval.methods.0.paths": [[0]]}."""
    has_sections = isinstance(value, list) and all(isinstance(part, dict) for part in value)
    sections = dict(enumerate(value)) if has_sections else value
    if not isinstance(sections, dict) or not sections:
        return {key: value}
    parts = (_flat(part, f"{key}.{name}".removeprefix(".")) for name, part in sections.items())
    return {name: leaf for flat in parts for name, leaf in flat.items()}
