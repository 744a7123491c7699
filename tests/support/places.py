"""Where this checkout is, and real data beside it that is in no repository: tests that want it skip without it."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("data", "models", "train", "eval", "recipes")
MATERIAL = ROOT.parent / "shared" / "material"
