"""Measured figures in a common form, with the machine, the date, the commit and the command.

    {"machine": {...}, "date": "...", "commit": "...", "versions": {...}, "command": "...", "figures": {...}}

A run writes it to `eval/result.json`, a benchmark to `--json`; results that documents quote are in `docs/results`.
"""

import json
import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.errors import masked
from draftsmith.files import write_atomically
from draftsmith.provenance import Provenance

RESULT_KEYS = ("machine", "date", "commit", "versions", "command", "figures")
FOLD_DEPTH, FOLD_CHARACTERS = 3, 100  # of a result's lines: see `folded_json`
# From the root, after a space, a quote, a bracket or a sign; not the path of a URL.
_ABSOLUTE_PATH = re.compile(r"""(?<![\w./:~-])/(?:[^\s/'",:{}\[\]]+/)+(?=[^\s/'",{}\[\]])""")


def write_result(
    file: Path, figures: dict[str, Any], command: str | None = None, provenance: Provenance | None = None
) -> None:
    """Write measured figures to a JSON file, with machine, date, commit, versions and command.

    Args:
        figures: Values that JSON can hold.
        command: Command that measures them again; by default the command line of this process.
        provenance: Provenance of figures that another process measured; default: this process, now.
    """
    source = provenance or Provenance.now()
    result = {
        "machine": asdict(source.machine),
        "date": source.time_utc,
        "commit": source.commit,
        "versions": source.versions,
        "command": command or _get_command_line(),
        "figures": figures,
    }
    write_atomically(file, folded_json(masked(portable(result))) + "\n")


def folded_json(value: Any, depth: int = 0) -> str:
    """Format a value as readable JSON; values of up to `FOLD_CHARACTERS`, or at level `FOLD_DEPTH`, are on one line."""
    line = json.dumps(value)
    if depth == FOLD_DEPTH or len(line) <= FOLD_CHARACTERS or not isinstance(value, dict | list):
        return line
    names = [f"{json.dumps(str(key))}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    inner = list(value.values()) if isinstance(value, dict) else value
    opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
    indent = " " * (depth + 1)
    lines = [f"{indent}{name}{folded_json(each, depth + 1)}" for name, each in zip(names, inner, strict=True)]
    return opening + "\n" + ",\n".join(lines) + f"\n{' ' * depth}" + closing


def portable(value: Any) -> Any:
    """Shorten absolute paths of this machine to `.../name`, in a text or in a tree of mappings and lists."""
    if isinstance(value, dict):
        return {portable(key): portable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [portable(inner) for inner in value]
    return _ABSOLUTE_PATH.sub(".../", value) if isinstance(value, str) else value


def _get_command_line() -> str:
    program, *arguments = sys.argv
    script = Path(program)
    if script.suffix != ".py":
        return shlex.join([script.name, *arguments])
    whole, here = script.resolve(), Path.cwd()
    shown = whole.relative_to(here) if whole.is_relative_to(here) else Path(script.parent.name, script.name)
    return shlex.join(["python", shown.as_posix(), *arguments])
