"""Amounts for people, and of free disk."""

import shutil
from pathlib import Path


def bytes_text(size: float) -> str:
    """`604 MiB`, `1.2 TiB`."""
    amount, unit = scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{amount:,.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def scaled(amount: float, step: int, units: tuple[str, ...]) -> tuple[float, str]:
    """The amount in the largest of these units that leaves at least 1."""
    exponent = 0
    while amount >= step and exponent < len(units) - 1:
        amount, exponent = amount / step, exponent + 1
    return amount, units[exponent]


def free_bytes_at(folder: Path) -> int:
    """Of the disk that the folder lies on, or will lie on."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free
