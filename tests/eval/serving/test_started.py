"""What a vLLM server that is measured is started with."""

from typing import Any

import pytest
from transformers import LlamaConfig

from draftsmith.data.engines.engine import EngineSetting
from draftsmith.eval.commands import in_engine
from draftsmith.eval.commands.in_engine import cpu_cache_bytes, measured_arguments, read_engine_options
from draftsmith.recipes.schema import Recipe

CONFIG = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)


def arguments(**options: Any) -> dict[str, Any]:
    recipe = Recipe.model_validate({"name": "x", "target": {"dtype": "float32"}})
    setting = EngineSetting(recipe, None, "TARGET", (2,))
    return measured_arguments(read_engine_options(options), setting, CONFIG, 300, 16)


def test_sized_for_the_questions_and_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_engine.torch.cuda, "is_available", lambda: False)
    found = arguments()
    assert (found["model"], found["dtype"]) == ("TARGET", "float32")
    assert (found["max_model_len"], found["max_num_seqs"], found["enforce_eager"]) == (300, 16, True)
    # Keys and values of 3 layers, 2 heads of 16, in fp32: 768 bytes a token, and as much for a drafter; four blocks.
    assert found["kv_cache_memory_bytes"] == 16 * 2 * 768 * 4 * 128


def test_what_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_engine.torch.cuda, "is_available", lambda: False)
    found = arguments(max_model_len=512, concurrency=4, enforce_eager=False, kv_cache_memory_bytes=5, llm={"a": 1})
    assert (found["max_model_len"], found["max_num_seqs"], found["enforce_eager"]) == (512, 4, False)
    assert (found["kv_cache_memory_bytes"], found["a"]) == (5, 1)


def test_on_a_gpu_vllm_sizes_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_engine.torch.cuda, "is_available", lambda: True)
    found = arguments()
    assert found["enforce_eager"] is False
    assert "kv_cache_memory_bytes" not in found


def test_a_large_cache_is_bounded_and_one_conversation_fits() -> None:
    of_one = cpu_cache_bytes(CONFIG, 300, 1)
    assert cpu_cache_bytes(CONFIG, 300, 10**6) == 4 << 30
    large = LlamaConfig(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=64)
    assert cpu_cache_bytes(large, 4096, 64) > 4 << 30
    assert of_one == 2 * 768 * 4 * 128
