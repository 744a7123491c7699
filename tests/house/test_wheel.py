"""What `make release` builds, once for all tests: of the tag's version, with nothing missing, and it runs anywhere."""

import email
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.places import PACKAGES, ROOT
from support.tree import source_files

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the git checkout to know the tree"),
]
# As of somebody who has never heard of this checkout, its branches or its git configuration.
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "PYTHON", "SETUPTOOLS_SCM"))}
GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
BESIDE_THE_PACKAGES = {
    *("CHANGELOG.md", "LICENSE", "MANIFEST.in", "NOTICE", "README.md", "pyproject.toml"),
    *(".gitattributes", ".git_archival.txt"),
}


def call(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(list(map(str, command)), cwd=cwd, env=CLEAN, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    return result.stdout


@dataclass
class Release:
    """A tree with one commit and a tag, and what was built of it."""

    tree: Path
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    tree = tmp_path_factory.mktemp("release") / "tree"
    for name in source_files():
        copy = tree / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy)
    call(*GIT, "init", "-q", cwd=tree)
    call(*GIT, "add", "-A", cwd=tree)
    call(*GIT, "commit", "-q", "-m", "all", cwd=tree)
    # What lies about in a checkout that was worked in.
    (tree / "runs" / "mine").mkdir(parents=True)
    (tree / "runs" / "mine" / "recipe.yaml").write_text("name: mine\n")
    call(*GIT, "tag", "v1.2.3", cwd=tree)
    build = shlex.join([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tree.parent / "dist")])
    said = call("sh", "-c", f"{build} 2>&1", cwd=tree)
    assert "WARNING" not in said
    (sdist,), (wheel,) = ((tree.parent / "dist").glob(f"*.{kind}") for kind in ("tar.gz", "whl"))
    return Release(tree, sdist, wheel)


def test_the_version_is_the_tags(release: Release, tmp_path: Path) -> None:
    """Without tags it is a development version, and an archive as GitHub makes them has its tag's."""
    assert release.sdist.name == "draftsmith-1.2.3.tar.gz"
    assert release.wheel.name == "draftsmith-1.2.3-py3-none-any.whl"
    say = [sys.executable, "-m", "setuptools_scm"]
    clone, archive = tmp_path / "clone", tmp_path / "archive"
    call(*GIT, "clone", "-q", "--no-tags", "--depth", "1", release.tree.as_uri(), clone, cwd=tmp_path)
    assert re.fullmatch(r"0\.0\.0\.dev1\+g[0-9a-f]{7,}", call(*say, cwd=clone).strip())
    archive.mkdir()
    call(*GIT, "archive", "-o", tmp_path / "archive.tar", "v1.2.3", cwd=release.tree)
    call("tar", "-xf", tmp_path / "archive.tar", "-C", archive, cwd=tmp_path)
    assert call(*say, cwd=archive).strip() == "1.2.3"


def test_both_hold_the_package_and_what_explains_it(release: Release) -> None:
    """The wheel, built from the sdist, where there is no git, has the packages' files alone, and the licences."""
    with zipfile.ZipFile(release.wheel) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read("draftsmith-1.2.3.dist-info/METADATA"))
        licences = {name.partition("/licenses/")[2]: archive.read(name) for name in names if "/licenses/" in name}
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == {f"draftsmith/{name}" for name in source_files() if name.split("/")[0] in PACKAGES}
    assert metadata["License-Expression"] == "Apache-2.0 AND PSF-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE", "licenses/PYTHON.txt"]
    assert licences == {name: (ROOT / name).read_bytes() for name in metadata.get_all("License-File")}
    with tarfile.open(release.sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in files if name in ("PKG-INFO", "setup.cfg") or name.startswith("draftsmith.egg-info/")}
    tops = {*PACKAGES, "embedded_target", "examples", "licenses"}
    wanted = {name for name in source_files() if name.split("/")[0] in tops or name in BESIDE_THE_PACKAGES}
    assert files - made == wanted
    assert release.sdist.stat().st_size < 16 * 2**20


def test_the_index_would_take_both(release: Release) -> None:
    out = call(sys.executable, "-m", "twine", "check", "--strict", release.sdist, release.wheel, cwd=release.tree)
    assert out.count("PASSED") == 2


@pytest.fixture(scope="module")
def program(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`draftsmith`, installed in an environment that has the dependencies, and nothing that leads back here."""
    folder = tmp_path_factory.mktemp("installed")
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    call(sys.executable, "-m", "pip", "--python", python, "install", *options, release.wheel, cwd=folder)
    here = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # A folder on the path, whose own .pth files, such as those of editable installs, are not followed.
    (here / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = "import draftsmith, draftsmith.recipes.schema as s; print(*draftsmith.__path__, s.__file__, sep='\\n')"
    assert all(Path(line).is_relative_to(environment) for line in call(python, "-c", where, cwd=folder).split())
    return environment / "bin" / "draftsmith"


def test_installed_it_says_its_version(program: Path, tmp_path: Path) -> None:
    assert call(program, "--version", cwd=tmp_path) == "draftsmith 1.2.3\n"


@pytest.mark.nightly
def test_installed_it_runs_the_quickstart_from_any_folder(program: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path
    short = [
        *("data.conversations.limit=6", "data.distill.max_new_tokens=12", "data.distill.cut_answers=keep"),
        *("data.max_length_tokens=200", "data.tokenize_processes=1", "train.max_steps=2", "eval.runs=1"),
        *("eval.limit_per_category=1", "eval.max_new_tokens=8", "eval.untimed_questions=0", "eval.warmup_questions=0"),
        "eval.methods=[{name: chain}]",
    ]
    found = json.loads(call(program, "run", "quickstart", *short, "--json", cwd=elsewhere))
    assert found["train"]["steps"] == 2
    assert found["eval"]["versions"]["draftsmith"] == "1.2.3"
    assert found["eval"]["commit"] is None
    assert found["eval"]["figures"]["rows"]["chain@0"]["tau"] >= 1
    assert (elsewhere / "runs" / "quickstart" / "report.html").is_file()
    assert [entry.name for entry in elsewhere.iterdir()] == ["runs"]
