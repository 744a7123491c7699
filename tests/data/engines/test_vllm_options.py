"""What the vllm engine starts vLLM's server with, and what it says without vLLM."""

import importlib.util

import pytest

from draftsmith.data.engines.engine import EngineSetting, open_engine
from draftsmith.data.engines.vllm_engine import VllmOptions, command_line, server_arguments
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe


def setting(**options: object) -> EngineSetting:
    values = {
        "name": "x", "seed": 3, "target": {"model": "m", "dtype": "bfloat16", "revision": "abc"},
        "data": {"distill": {"engine": "vllm", "options": options}},
    }  # fmt: skip
    return EngineSetting(Recipe.model_validate(values), None, "a/folder", (2,))


def test_the_server_s_arguments() -> None:
    options = VllmOptions(
        tensor_parallel_size=2, data_parallel_size=4, concurrency=99, max_model_len=512, llm={"dtype": "half", "x": [1]}
    )
    arguments = server_arguments(options, setting())
    assert arguments == {
        "model": "a/folder", "dtype": "half", "trust_remote_code": False, "tensor_parallel_size": 2,
        "data_parallel_size": 4, "enforce_eager": False, "max_num_seqs": 99, "seed": 3, "enable_prefix_caching": True,
        "max_model_len": 512, "revision": "abc", "x": [1],
    }  # fmt: skip
    assert " ".join(command_line(arguments)) == (
        "--model a/folder --dtype half --no-trust-remote-code --tensor-parallel-size 2 --data-parallel-size 4 "
        "--no-enforce-eager --max-num-seqs 99 --seed 3 --enable-prefix-caching --max-model-len 512 --revision abc "
        "--x [1]"
    )


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_extra_is_named() -> None:
    with pytest.raises(UserError, match=r"pip install draftsmith\[vllm\]"), open_engine(setting()):
        pass
    with pytest.raises(UserError, match=r"unknown key `data.distill.options.tp`"), open_engine(setting(tp=2)):
        pass
