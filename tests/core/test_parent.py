"""Child processes end with the process that started them, also when it is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ONE = """
import multiprocessing, os, time
from draftsmith.parent import end_with_parent

def child():
    end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(100)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=child).start()
    time.sleep(100)
"""
PROGRAM = """
import subprocess, time
from draftsmith.parent import end_program_with_parent

print(subprocess.Popen(["sleep", "100"], preexec_fn=end_program_with_parent).pid, flush=True)
time.sleep(100)
"""
TOKENISING = """
import multiprocessing, sys, time
from pathlib import Path
from support import tiny_tokenizers as templates
from draftsmith.data.distill.token_dataset import CHUNK_CONVERSATIONS, CHUNKS_PER_PROCESS, Work, write_token_rows
from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.progress import progress_bar

def conversations():
    turns = (Turn("user", "hi"), Turn("assistant", "ho"))
    for number in range(2 * CHUNKS_PER_PROCESS * CHUNK_CONVERSATIONS + CHUNK_CONVERSATIONS):
        yield Conversation(str(number), turns)
    while len(multiprocessing.active_children()) < 2:
        time.sleep(0.01)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(100)

if __name__ == "__main__":
    work = Work(templates.tiny_tokenizer(templates.CHATML), 64)
    with progress_bar(1, "tokenise", "conv", shown=False) as bar:
        write_token_rows(conversations(), work, Path(sys.argv[1]) / "rows.arrow", 2, bar)
"""


@pytest.mark.parametrize(
    "script",
    [
        ONE,
        pytest.param(PROGRAM, marks=pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part")),
        pytest.param(TOKENISING, marks=pytest.mark.slow),
    ],
    ids=["one", "a program", "tokenising"],
)
def test_killed_process_leaves_no_children(tmp_path: Path, script: str) -> None:
    file = tmp_path / "parent.py"
    file.write_text(script)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(file), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(number)) for number in parent.stdout.readline().split()]
        assert children
        time.sleep(0.2)
        parent.kill()
    left = psutil.wait_procs(children, timeout=10)[1]
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]  # where init does not reap orphans
