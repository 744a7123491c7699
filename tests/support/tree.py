"""Files of the source tree: tracked by git, or untracked and not ignored."""

import subprocess

from support.places import ROOT


def source_files() -> list[str]:
    """Return the files that git tracks or would add."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in listing.stdout.split("\n") if name and (ROOT / name).exists()]
