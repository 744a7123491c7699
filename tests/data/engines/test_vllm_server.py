"""The vLLM server started for a run: its arguments, and a stand-in program that is ready, refuses or dies."""

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.fake_openai_server import answer_ids
from support.openai_setup import TOKENIZER, requests

from draftsmith.data.engines import server_process, vllm_engine
from draftsmith.data.engines.engine import Completion, EngineSetting, open_engine
from draftsmith.data.engines.vllm_engine import VllmEngine, VllmOptions, command_line, server_arguments
from draftsmith.errors import UserError
from draftsmith.recipes.schema import Recipe

API_SERVER = """
import sys, threading
from support.fake_openai_server import FakeServer
words = sys.argv[1:]
if "--no-such-option" in words:
    print("usage: api_server.py\\napi_server.py: error: unrecognized arguments: --no-such-option", file=sys.stderr)
    sys.exit(2)
print("started with", *words, flush=True)
server = FakeServer(model="target", port=int(words[words.index("--port") + 1]))
threading.Event().wait()
"""


@pytest.fixture
def _stand_in_for_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    (folder / "api_server.py").write_text(API_SERVER)
    here = [str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(here))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(server_process.tempfile, "tempdir", None)
    monkeypatch.setattr(vllm_engine, "require_vllm", lambda who: None)


def setting(**options: object) -> EngineSetting:
    values = {
        "name": "x", "seed": 3, "target": {"model": "a/model", "dtype": "bfloat16", "revision": "abc"},
        "data": {"distill": {"engine": "vllm", "options": options}},
    }  # fmt: skip
    return EngineSetting(Recipe.model_validate(values), TOKENIZER, (2,))


def made(**options: Any) -> VllmEngine:
    return VllmEngine.make(VllmOptions(**options), setting())


@pytest.mark.usefixtures("_stand_in_for_vllm")
def test_server_answers_and_ends_with_the_engine(tmp_path: Path) -> None:
    engine = made(concurrency=8, data_parallel_size=2)
    try:
        assert engine.concurrency == 20
        assert engine._servers[0].client.timeout.read > 86400  # long answers, and those that wait inside vLLM
        engine.submit(requests(1)[0])
        assert engine.collect() == [("c0", Completion(answer_ids([5, 6, 0]), "stop"))]
        assert "--model a/model" in engine.server.log.read_text()
    finally:
        engine.close()
    assert engine.server._process.returncode is not None
    assert not list(tmp_path.glob("draftsmith-server-*"))


@pytest.mark.usefixtures("_stand_in_for_vllm")
def test_refused_options_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vLLM does not start with data.distill.options: error: unrecognized .*\.log"):
        made(llm={"no_such_option": True})


@pytest.mark.usefixtures("_stand_in_for_vllm")
def test_dead_server_is_reported_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "GIVE_UP_AFTER_S", 0.1)
    engine = made()
    try:
        os.kill(engine.server._process.pid, signal.SIGKILL)
        engine.server._process.wait(20)
        engine.submit(requests(1)[0])
        with pytest.raises(UserError, match=r"vLLM's server has died: its own message is in .*server\.log"):
            engine.collect()
    finally:
        engine.close()
    assert engine.server.log.is_file()


def test_arguments_of_the_server() -> None:
    options = VllmOptions(
        tensor_parallel_size=2, data_parallel_size=4, concurrency=99, max_model_len=512, llm={"dtype": "half", "x": [1]}
    )
    arguments = server_arguments(options, setting())
    assert arguments == {
        "model": "a/model", "dtype": "half", "trust_remote_code": False, "tensor_parallel_size": 2,
        "data_parallel_size": 4, "enforce_eager": False, "max_num_seqs": 99, "seed": 3, "enable_prefix_caching": True,
        "max_model_len": 512, "revision": "abc", "x": [1],
    }  # fmt: skip
    some = {key: arguments[key] for key in ("model", "enforce_eager", "enable_prefix_caching", "x")}
    assert command_line(some) == ["--model", "a/model", "--no-enforce-eager", "--enable-prefix-caching", "--x", "[1]"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_missing_vllm_names_the_extra() -> None:
    with pytest.raises(UserError, match="pip install vllm "), open_engine(setting()):
        pass
    with pytest.raises(UserError, match=r"unknown key `data.distill.options.tp`"), open_engine(setting(tp=2)):
        pass
