"""`.ci/llamacpp_env`, which builds llama.cpp, with stand-ins for pip and the compilers: nothing is fetched or built."""

import shutil
import subprocess
import tarfile
from pathlib import Path

from support.places import ROOT

NAME = "llama_cpp_python-0.3.36"


def stand_in(program: Path, body: str) -> None:
    program.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    program.chmod(0o755)


def test_it_is_fetched_by_its_hash_and_a_failed_build_goes_on_without_fetching(tmp_path: Path) -> None:
    tools, called = tmp_path / "tools", tmp_path / "called"
    tools.mkdir()
    for name in ("bash", "mkdir", "mktemp", "rm", "mv", "tar", "gzip", "cat", "tail", "nproc"):
        (tools / name).symlink_to(str(shutil.which(name)))
    for name in ("g++", "ninja"):
        stand_in(tools / name, f'echo "{name} $@" >>{called}')
    stand_in(tools / "cmake", "echo no such compiler; exit 1")
    (tmp_path / "CMakeLists.txt").write_text("project(llama)")
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as archive:
        for name in ("vendor/llama.cpp/CMakeLists.txt", "CMakeLists.txt"):
            archive.add(tmp_path / "CMakeLists.txt", f"{NAME}/{name}")
    stand_in(  # -m pip download ... --dest FOLDER --requirement FILE
        tools / "python3",
        f'echo "python $@" >>{called}\nwhile [ "$1" != --dest ]; do shift; done\n'
        f'while read -r line; do echo "$line" >>{called}; done <"$4"\n'
        f'cat {tmp_path}/sdist.tar.gz >"$2/{NAME}.tar.gz"',
    )

    def build() -> subprocess.CompletedProcess[str]:
        command = [str(tools / "bash"), str(ROOT / ".ci" / "llamacpp_env"), str(tmp_path / "env")]
        return subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True, check=False)

    failed = build()
    assert failed.returncode == 1
    assert failed.stderr.startswith("no such compiler\nerror: llama.cpp could not be built")
    assert not (tmp_path / "env" / ".ready").exists()
    stand_in(tools / "cmake", f'echo "cmake $@" >>{called}')
    for _ in range(2):
        assert build().returncode == 0
    fetched, pinned, configured, built = called.read_text().splitlines()
    assert "--no-binary=:all: --require-hashes" in fetched
    name, digest = pinned.split(" --hash=sha256:")
    assert (name, len(digest)) == ("llama-cpp-python==0.3.36", 64)
    assert f"-S {tmp_path}/env/{NAME} -B {tmp_path}/env -G Ninja" in configured
    assert f"--build {tmp_path}/env --target llama-server llama-bench llama-quantize" in built
