"""`.ci/llamacpp_env`, which builds llama.cpp, with stand-ins for pip and the compilers: nothing is fetched or built."""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from support.places import ROOT

SCRIPT = ROOT / ".ci" / "llamacpp_env"
NAME = "llama_cpp_python-0.3.36"
TOOLS = ("bash", "mkdir", "mktemp", "rm", "mv", "tar", "gzip", "cat", "tail", "nproc")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH of its own: what the script needs, and programs that write down how they were called."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    for name in ("g++", "cmake", "ninja"):
        stand_in(folder / name, f'echo "{name} $@" >>{tmp_path}/called')
    sdist = tmp_path / "sdist.tar.gz"
    (tmp_path / "CMakeLists.txt").write_text("project(llama)")
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tmp_path / "CMakeLists.txt", f"{NAME}/vendor/llama.cpp/CMakeLists.txt")
        archive.add(tmp_path / "CMakeLists.txt", f"{NAME}/CMakeLists.txt")
    # `-m pip download ... --dest FOLDER --requirement FILE`
    stand_in(
        folder / "python3",
        f'echo "python $@" >>{tmp_path}/called\n'
        'while [ "$1" != --dest ]; do shift; done\n'
        f'while read -r line; do echo "$line" >>{tmp_path}/called; done <"$4"\n'
        f'cat {sdist} >"$2/{NAME}.tar.gz"',
    )
    return folder


def stand_in(program: Path, body: str) -> None:
    program.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    program.chmod(0o755)


def build(folder: Path, tools: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(tools / "bash"), str(SCRIPT), str(folder)],
        env={"PATH": str(tools)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def called(tools: Path) -> list[str]:
    return (tools.parent / "called").read_text().splitlines()


def test_it_is_fetched_by_its_hash_and_built_once(tmp_path: Path, tools: Path) -> None:
    folder = tmp_path / "env"
    result = build(folder, tools)
    assert result.returncode == 0, result.stderr
    fetched, pinned, configured, built = called(tools)
    assert "--no-binary=:all: --require-hashes" in fetched
    name, digest = pinned.split(" --hash=sha256:")
    assert (name, len(digest)) == ("llama-cpp-python==0.3.36", 64)
    assert f"-S {folder}/{NAME} -B {folder} -G Ninja" in configured
    assert "-DGGML_NATIVE=ON" in configured
    assert f"--build {folder} --target llama-server llama-bench llama-quantize" in built
    assert (folder / NAME / "CMakeLists.txt").read_text() == "project(llama)"
    assert {entry.name for entry in folder.iterdir()} == {NAME, ".ready", "build.log"}
    assert build(folder, tools).returncode == 0
    assert len(called(tools)) == 4


def test_a_build_that_failed_goes_on_without_fetching(tmp_path: Path, tools: Path) -> None:
    folder = tmp_path / "env"
    stand_in(tools / "cmake", "echo no such compiler; exit 1")
    failed = build(folder, tools)
    assert failed.returncode == 1
    assert failed.stderr.startswith("no such compiler\nerror: llama.cpp could not be built")
    assert not (folder / ".ready").exists()
    stand_in(tools / "cmake", f'echo "cmake $@" >>{tmp_path}/called')
    assert build(folder, tools).returncode == 0
    assert [line.split()[0] for line in called(tools)] == ["python", "llama-cpp-python==0.3.36", "cmake", "cmake"]


def test_missing_tools_are_named(tmp_path: Path, tools: Path) -> None:
    for name in ("g++", "ninja"):
        (tools / name).unlink()
    result = build(tmp_path / "env", tools)
    assert result.returncode == 1
    assert "of which there is no g++ ninja: install what is missing" in result.stderr
    assert not (tmp_path / "env").exists()


def test_a_failed_fetch_leaves_nothing(tmp_path: Path, tools: Path) -> None:
    stand_in(tools / "python3", "exit 1")
    result = build(tmp_path / "env", tools)
    assert result.returncode == 1
    assert "name a llama-server of your own with --llama-server" in result.stderr
    assert list((tmp_path / "env").iterdir()) == []
