"""`make docs`: the site builds without warnings, with generated pages, and fetches nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from generate import reference
from support.places import ROOT

from draftsmith.recipes.schema import Recipe

MADE = ("recipes", "options", "commands", "formats", "targets")
FETCHED = re.compile(r"""<(?:script|img|iframe|link(?! rel="canonical"))[^>]*?(?:src|href)=["'](?:https?:)?//[^"']*""")


@pytest.mark.slow
def test_site_builds(tmp_path: Path) -> None:
    """With `--strict` broken links and anchors, and pages outside the navigation, are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = {
        page.relative_to(tmp_path).as_posix(): page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")
    }
    assert pages.keys() >= {"index.html", "contributing.html", "changelog.html"}
    assert [found for text in pages.values() for found in FETCHED.findall(text)] == []
    for name in MADE:
        assert len(re.findall("<(?:tr|h2|h3)", pages[f"reference/{name}.html"])) > 10, name
    # From the disk the search reads its index out of a script, in a frame instead of a worker.
    assert (tmp_path / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = ")
    assert '<script src="../styles/iframe-worker.js"' in pages["guides/train.html"]
    source = tmp_path / "source" / "eval" / "trees" / "verify.py.txt"
    assert source.read_bytes() == (ROOT / "eval" / "trees" / "verify.py").read_bytes()


def test_recipe_reference_has_every_key() -> None:
    """The keys are those of a recipe as written into a run folder."""
    page = "\n".join(reference.recipes())
    recipe = Recipe(name="mine", data={"conversations": {"mixture": [{"source": "a.json"}]}})

    def keys(section: object) -> set[str]:
        if isinstance(section, list):
            return set().union(*map(keys, section))
        return set(section).union(*map(keys, section.values())) if isinstance(section, dict) else set()

    assert {key for key in keys(recipe.model_dump()) if f"| `{key}` |" not in page} == set()
