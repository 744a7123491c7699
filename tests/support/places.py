"""Path of this checkout, and its import links."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "data", "models", "train", "eval", "serve", "cli", "recipes")
MATERIAL = ROOT.parent / "shared" / "material"


def import_links(folder: Path) -> dict[str, str]:
    """Return the links of `.typing/draftsmith` in a checkout by name, through which `draftsmith` is imported."""
    files = {file.name: f"../../core/{file.name}" for file in (folder / "core").glob("*.py")}
    return files | {name: f"../../{name}" for name in PACKAGES if name != "core"}


def make_importable(folder: Path) -> None:
    """Create the links of `.typing` in a copy of the checkout."""
    links = folder / ".typing" / "draftsmith"
    links.mkdir(parents=True)
    for name, target in import_links(folder).items():
        (links / name).symlink_to(target)
