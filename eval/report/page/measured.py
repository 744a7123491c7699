"""What was measured with: each method's settings, and the hashes of what was read. No path of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.eval.report.text import place_name, without_places
from draftsmith.recipes.schema import DRAFTER_KIND


@dataclass(frozen=True)
class MethodSettings:
    """A row of strings."""

    name: str
    kind: str
    tree: str
    drafter: str
    options: str


def method_settings(recipe: dict[str, Any]) -> list[MethodSettings]:
    """In the recipe's order."""
    return [_settings(method, recipe["drafter"]["kind"]) for method in recipe["eval"]["methods"]]


def hashes(inputs: dict[str, str]) -> dict[str, str]:
    """SHA-256 of what was read, by its name instead of its path."""
    return {drafter_name(name): value for name, value in inputs.items()}


def drafter_name(folder: str) -> str:
    """Of a run's drafter the run's name, else the folder's, or the id on the Hub."""
    path = Path(folder)
    return path.parent.name if path.name == "drafter" and path.parent.name else place_name(folder)


def _settings(method: dict[str, Any], own_kind: str) -> MethodSettings:
    drafts = method["kind"] == DRAFTER_KIND
    options = [f"{key}: {value}" for key, value in method["options"].items()]
    if method["lenience"] < 1:
        options.append(f"lenience: {method['lenience']:g}")
    drafter = "" if not drafts else f"this run's, {own_kind}"
    if method["drafter"] is not None and drafts:
        drafter = drafter_name(method["drafter"])
    return MethodSettings(
        method["name"], method["kind"], _tree(method) if drafts else "-", drafter, without_places(", ".join(options))
    )


def _tree(method: dict[str, Any]) -> str:
    words = [method["tree"]]
    if method["tree"] not in ("chain", "static"):
        words += [f"{method['nodes']} nodes", f"branch {method['branch']}"]
    if method["max_depth"] is not None:
        words.append(f"depth {method['max_depth']}")
    if method["lookup"]:
        words.append("with lookup")
    return ", ".join(words)
