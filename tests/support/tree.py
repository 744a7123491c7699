"""What belongs to the tree: the files that are in git, or would be."""

import subprocess

from support.places import ROOT


def source_files() -> list[str]:
    """Return the files that are in git, or would be."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in listing.stdout.split("\n") if name and (ROOT / name).exists()]
