"""Figures in a document that name where they were measured: `[1.52x](docs/results/name.json#figures.rows.tree@0.tau)`.

The file is named as from the document's own folder: `results/name.json` in a page of docs/. The path goes down through
the file's mappings and lists, key by key; a key may hold dots itself.
"""

import json
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]\[]+)\]\(((?:[\w.-]+/)*results/(?:[\w.-]+/)*[\w.-]+\.json)#([^)\s]+)\)")


def disagreements(page: str, folder: Path) -> list[str]:
    """One sentence for each quoted figure that its file does not say, rounded as the text has it.

    Args:
        page: The document.
        folder: It lies in.
    """
    wrong: list[str] = []
    read: dict[str, Any] = {}
    for text, name, path in LINK.findall(page):
        read[name] = read.get(name) or json.loads((folder / name).read_text(encoding="utf-8"))
        found = value_at(read[name], path)
        if not isinstance(found, int | float) or not rounds_to(float(found), text):
            wrong.append(f"{text} is quoted from {name}, where {path} is {found!r}")
    return wrong


def value_at(tree: Any, path: str) -> Any:
    """What stands there; None if nothing does."""
    if not path:
        return tree
    keys = range(len(tree)) if isinstance(tree, list) else tree if isinstance(tree, dict) else ()
    for key in keys:
        if path == str(key) or path.startswith(f"{key}."):
            found = value_at(tree[key], path[len(str(key)) + 1 :])
            if found is not None:
                return found
    return None


def rounds_to(value: float, text: str) -> bool:
    """Whether the first number of the text is this value with as many digits; `%` means hundredths."""
    number = re.search(r"-?\d[\d,]*(\.\d+)?", text)
    if number is None:
        return False
    decimals = len(number[1]) - 1 if number[1] else 0
    in_units = value * 100 if re.match(r"\s*%", text[number.end() :]) else value
    return abs(in_units - float(number[0].replace(",", ""))) <= 0.5 * 10**-decimals + 1e-9
