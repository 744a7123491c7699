"""What the vllm engine hands to vLLM, and what it says without it."""

import importlib.util

import pytest

from draftsmith.data.engines.engine import EngineSetting, open_engine
from draftsmith.data.engines.vllm_engine import VllmOptions, device_environments, llm_arguments
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe


def setting(**options: object) -> EngineSetting:
    values = {
        "name": "x", "seed": 3, "target": {"model": "m", "dtype": "bfloat16", "revision": "abc"},
        "data": {"distill": {"engine": "vllm", "options": options}},
    }  # fmt: skip
    return EngineSetting(Recipe.model_validate(values), None, "where/it/lies", (2,))


def test_arguments_of_llm() -> None:
    options = VllmOptions(tensor_parallel_size=2, concurrency=99, max_model_len=512, llm={"dtype": "half", "swap": 1})
    assert llm_arguments(options, setting()) == {
        "model": "where/it/lies", "dtype": "half", "trust_remote_code": False, "tensor_parallel_size": 2,
        "enforce_eager": False, "max_num_seqs": 99, "seed": 3, "enable_prefix_caching": True, "max_model_len": 512,
        "revision": "abc", "swap": 1,
    }  # fmt: skip


def test_devices_of_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_environments(2, 2) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,GPU-8f,1")
    assert device_environments(3, 1) == [{"CUDA_VISIBLE_DEVICES": name} for name in ("3", "5", "GPU-8f")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_environments(2, 2) == [{}, {}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(UserError, match="2 copies of 2 devices need 4, CUDA_VISIBLE_DEVICES names 3"):
        device_environments(2, 2)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_extra_is_named() -> None:
    with pytest.raises(UserError, match=r"pip install draftsmith\[vllm\]"), open_engine(setting()):
        pass
    with pytest.raises(UserError, match=r"unknown key `data.distill.options.tp`"), open_engine(setting(tp=2)):
        pass
