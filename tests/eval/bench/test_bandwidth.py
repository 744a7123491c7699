"""What a step reads, counted by hand, and how its read is timed."""

from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from draftsmith.eval.bench import bandwidth
from draftsmith.eval.bench.bandwidth import WeightReading

LAYER = 4 * 8 * 8 + 3 * 8 * 12 + 2 * 8  # projections, the MLP's matrices, norms
SHAPE: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


def llama(tied: bool = False) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).requires_grad_(False)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_counts_only_if_it_is_the_head(tied: bool) -> None:
    target = llama(tied)
    counted = 2 * LAYER + 8 + 20 * 8
    assert sum(weight.numel() for weight in target.parameters()) == counted + (0 if tied else 20 * 8)
    assert WeightReading(target).bytes == 4 * counted
    assert WeightReading(target.bfloat16()).bytes == 2 * counted


def test_no_bandwidth_for_experts() -> None:
    reading = WeightReading(MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2)))
    assert (reading.bytes, reading.seconds()) == (None, None)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_read_takes_time(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels and not bandwidth.has_kernels():
        pytest.skip("needs a C++ compiler")
    monkeypatch.setattr(bandwidth, "has_kernels", lambda: kernels)
    seconds = WeightReading(llama()).seconds()
    assert seconds is not None
    assert 0 < seconds < 1


def test_read_time_is_the_median_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of 9, 1 and 2 seconds."""
    monkeypatch.setattr(bandwidth.time, "perf_counter", iter([0.0, 9.0, 9.0, 10.0, 10.0, 12.0]).__next__)
    assert WeightReading(llama()).seconds() == 2.0
