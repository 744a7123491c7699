"""Import and run the scripts of `benchmarks/`, which is not a package."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.places import ROOT


def benchmark(name: str) -> ModuleType:
    file = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses resolve annotations
    spec.loader.exec_module(module)
    return module


def figures_of(module: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Run the module's `main` with `--json`, and return the written figures."""
    file = folder / "figures.json"
    monkeypatch.setattr("sys.argv", [str(module.__file__), *arguments, "--json", str(file)])
    module.main()
    return json.loads(file.read_text(encoding="utf-8"))["figures"]
