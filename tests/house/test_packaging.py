"""The wheel holds what the tree holds, all under one namespace: no package called `data` or `eval` lands anywhere."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.places import PACKAGES, ROOT
from support.tree import source_files


@pytest.mark.slow
def test_the_wheel_holds_exactly_the_tree(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs the git checkout to know the tree")
    names = source_files()
    # A copy: setuptools leaves a build folder, whose stale files would end up in the next wheel.
    for name in names:
        copy = tmp_path / "tree" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy)
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(tmp_path / "tree")]
    result = subprocess.run(build, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == {f"draftsmith/{name}" for name in names if name.split("/")[0] in PACKAGES}


def test_no_file_is_named_like_a_standard_library_module() -> None:
    """A launched script puts its own folder first on sys.path: a `tokenize.py` there would break `import torch`."""
    names = {file.stem for package in PACKAGES for file in (ROOT / package).rglob("*.py")} - {"__init__"}
    dependencies = {
        "torch",
        "transformers",
        "datasets",
        "tokenizers",
        "accelerate",
        "safetensors",
        "yaml",
        "jinja2",
        "rich",
    }
    assert names.isdisjoint(sys.stdlib_module_names | dependencies)
