"""The bytes that a step reads, counted by hand, and the timing of their read."""

from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

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


def test_experts_have_no_bandwidth() -> None:
    reading = WeightReading(MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2)))
    assert (reading.bytes, reading.seconds()) == (None, None)
