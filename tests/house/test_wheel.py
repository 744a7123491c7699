"""The result of `make release` has the tag's version and all files, and runs anywhere."""

import email
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from support.places import PACKAGES, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the git checkout to know the tree"),
]
# An environment independent of this checkout, its branches and its git configuration.
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "PYTHON", "SETUPTOOLS_SCM"))}
GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
OF_THE_SDIST = {
    *("CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "NOTICE", "README.md", "pyproject.toml"),
    *(".gitattributes", ".git_archival.txt", "embedded_target", "examples", "licenses", *PACKAGES),
}


def source_files() -> list[str]:
    """Return the files that git tracks or would add."""
    listing = call("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [name for name in listing.splitlines() if (ROOT / name).exists()]


def call(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(list(map(str, command)), cwd=cwd, env=CLEAN, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build sdist and wheel from a tree with one tagged commit and an untracked run folder; return their folder."""
    tree = tmp_path_factory.mktemp("release") / "tree"
    for name in source_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name, follow_symlinks=False)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"], ["tag", "v1.2.3"]):
        call(*GIT, *command, cwd=tree)
    (tree / "runs" / "mine").mkdir(parents=True)
    (tree / "runs" / "mine" / "recipe.yaml").write_text("name: mine\n")
    folder = tree.parent / "dist"
    build = shlex.join([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)])
    assert "WARNING" not in call("sh", "-c", f"{build} 2>&1", cwd=tree)
    return folder


def test_sdist_and_wheel_have_the_expected_files(built: Path) -> None:
    """The wheel, built from the sdist without git, has only the packages' files and the licences."""
    with zipfile.ZipFile(built / "draftsmith-1.2.3-py3-none-any.whl") as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read("draftsmith-1.2.3.dist-info/METADATA"))
        licences = {name.partition("/licenses/")[2]: archive.read(name) for name in names if "/licenses/" in name}
    packed = {name for name in names if ".dist-info/" not in name}
    sources = {name.removeprefix("core/") for name in source_files() if name.split("/")[0] in PACKAGES}
    assert packed == {f"draftsmith/{name}" for name in sources}
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE", "licenses/PYTHON.txt"]
    assert licences == {name: (ROOT / name).read_bytes() for name in metadata.get_all("License-File")}
    sdist = built / "draftsmith-1.2.3.tar.gz"
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in files if name in ("PKG-INFO", "setup.cfg") or name.startswith("draftsmith.egg-info/")}
    assert files - made == {name for name in source_files() if name.split("/")[0] in OF_THE_SDIST}
    assert sdist.stat().st_size < 44 * 2**20  # 40 of them are the two drafters that ship


@pytest.mark.nightly
def test_installed_wheel_runs_the_quickstart_from_any_folder(built: Path, tmp_path: Path) -> None:
    """The environment has the dependencies and no path to this checkout."""
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    venv.create(environment, with_pip=False)
    python, program = environment / "bin" / "python", environment / "bin" / "draftsmith"
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    wheel = built / "draftsmith-1.2.3-py3-none-any.whl"
    call(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=elsewhere)
    here = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=elsewhere).strip())
    # As a folder on the path its .pth files, such as those of editable installs, are ignored.
    (here / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert call(program, "--version", cwd=elsewhere) == "draftsmith 1.2.3\n"
    short = [
        *("data.conversations.limit=6", "data.distill.max_new_tokens=12", "data.distill.cut_answers=keep"),
        *("data.max_length_tokens=200", "data.tokenize_processes=1", "train.max_steps=2", "eval.runs=1"),
        *("eval.limit_per_category=1", "eval.max_new_tokens=8", "eval.warmup_questions=0"),
        "eval.methods=[{name: chain}]",
    ]
    found = json.loads(call(program, "run", "quickstart", *short, "--json", cwd=elsewhere))
    assert (found["train"]["steps"], found["eval"]["versions"]["draftsmith"]) == (2, "1.2.3")
    assert found["eval"]["figures"]["rows"]["chain@0"]["tau"] >= 1
    assert [entry.name for entry in elsewhere.iterdir()] == ["runs"]
