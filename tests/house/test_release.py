"""What `make release` builds: of the git tag's version, the package and its licences alone, and it runs anywhere."""

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
    """And of a clone without tags, of a folder without git, and of an archive as GitHub makes them."""
    assert release.sdist.name == "draftsmith-1.2.3.tar.gz"
    assert release.wheel.name == "draftsmith-1.2.3-py3-none-any.whl"
    say = [sys.executable, "-m", "setuptools_scm"]
    clone, folder, archive = tmp_path / "clone", tmp_path / "folder", tmp_path / "archive"
    call(*GIT, "clone", "-q", "--no-tags", "--depth", "1", release.tree.as_uri(), clone, cwd=tmp_path)
    assert re.fullmatch(r"0\.0\.0\.dev1\+g[0-9a-f]{7,}", call(*say, cwd=clone).strip())
    folder.mkdir()
    shutil.copyfile(ROOT / "pyproject.toml", folder / "pyproject.toml")
    assert call(*say, cwd=folder).strip() == "0.0.0.dev0"
    archive.mkdir()
    call(*GIT, "archive", "-o", tmp_path / "archive.tar", "v1.2.3", cwd=release.tree)
    call("tar", "-xf", tmp_path / "archive.tar", "-C", archive, cwd=tmp_path)
    assert call(*say, cwd=archive).strip() == "1.2.3"


def test_the_wheel_holds_exactly_the_packages(release: Release) -> None:
    """Built from the sdist, where there is no git."""
    with zipfile.ZipFile(release.wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == {f"draftsmith/{name}" for name in source_files() if name.split("/")[0] in PACKAGES}


def test_the_sdist_holds_the_package_and_what_explains_it(release: Release) -> None:
    with tarfile.open(release.sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in files if name in ("PKG-INFO", "setup.cfg") or name.startswith("draftsmith.egg-info/")}
    tops = {*PACKAGES, "examples", "licenses"}
    wanted = {name for name in source_files() if name.split("/")[0] in tops or name in BESIDE_THE_PACKAGES}
    assert files - made == wanted
    assert release.sdist.stat().st_size < 16 * 2**20


def test_the_wheel_says_its_licences_and_has_them_inside(release: Release) -> None:
    with zipfile.ZipFile(release.wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" in name]
        metadata = email.message_from_bytes(archive.read("draftsmith-1.2.3.dist-info/METADATA"))
        texts = {name: archive.read(name) for name in names if "/licenses/" in name}
    assert metadata["License-Expression"] == "Apache-2.0 AND PSF-2.0"
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE", "licenses/PYTHON.txt"]
    assert metadata["Requires-Python"] == ">=3.11"
    of_wheel = {name.partition("/licenses/")[2]: text for name, text in texts.items()}
    assert of_wheel == {name: (ROOT / name).read_bytes() for name in metadata.get_all("License-File")}
    assert b"PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in of_wheel["licenses/PYTHON.txt"]


def test_what_quotes_the_standard_library_is_in_the_notice() -> None:
    """Of the files that ship, those with its text: the questions that show code, and the target trained on it."""
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    lines = (ROOT / "data/stdlib/embedded.jsonl").read_text(encoding="utf-8").splitlines()
    asked = map(json.loads, lines)
    quoting = {question["category"] for question in asked if max(map(len, question["turns"])) > 160}
    assert quoting
    named = re.search(r"those of the categories (.*?)\s+quote", notice, re.DOTALL)
    assert named is not None
    assert quoting <= set(re.findall(r"\w+", named[1]))
    assert "models/embedded_target/" in notice


def test_the_index_would_take_both(release: Release) -> None:
    out = call(sys.executable, "-m", "twine", "check", "--strict", release.sdist, release.wheel, cwd=release.tree)
    assert out.count("PASSED") == 2


def test_installed_it_runs_the_quickstart_from_any_folder(release: Release, tmp_path: Path) -> None:
    """In an environment that has the dependencies, and nothing that leads back here."""
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    call(sys.executable, "-m", "pip", "--python", python, "install", *options, release.wheel, cwd=elsewhere)
    here = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=elsewhere).strip())
    # A folder on the path, whose own .pth files, such as those of editable installs, are not followed.
    (here / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = "import draftsmith, draftsmith.recipes.schema as s; print(*draftsmith.__path__, s.__file__, sep='\\n')"
    assert all(Path(line).is_relative_to(environment) for line in call(python, "-c", where, cwd=elsewhere).split())
    program = environment / "bin" / "draftsmith"
    assert call(program, "--version", cwd=elsewhere) == "draftsmith 1.2.3\n"
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
    # What it says to copy next is there, wherever it was installed.
    shown = call(program, "report", "quickstart", *short, cwd=elsewhere)
    (recipe,) = re.findall(r"^(\S+/llama3-8b-parallel\.yaml), set target\.model", shown, re.MULTILINE)
    assert (elsewhere / recipe).resolve().is_relative_to(environment)
    assert (elsewhere / recipe).is_file()
