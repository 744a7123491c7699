"""The bytes that a step reads, counted by hand, and the timing of their read."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from draftsmith.eval.bench import bandwidth
from draftsmith.eval.bench.bandwidth import WeightReading
from draftsmith.models.kernels.cpu_kernels import PackedLinear, pack_linears

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


@pytest.mark.skipif(not bandwidth.has_kernels(), reason="needs a C++ compiler")
def test_packed_copies_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a step: packed weights of seven linear layers per decoder layer and of the head, plain weights of norms."""
    target, read = llama(), []
    pack_linears(target)
    target(input_ids=torch.tensor([[1]]))
    packed = [module.packed for module in target.modules() if isinstance(module, PackedLinear)]
    monkeypatch.setattr(torch.ops.draftsmith, "read", read.append)
    WeightReading(target).seconds()
    addresses = [weight.data_ptr() for weight in read[: len(read) // bandwidth.READS]]
    assert (len(packed), len(addresses)) == (2 * 7 + 1, 2 * 9 + 2)
    assert set(addresses) >= {copy.data_ptr() for copy in packed if copy is not None}


@pytest.mark.parametrize("kernels", [False, bandwidth.has_kernels()])
def test_read_time_is_the_median_of_three(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reads take 9, 1 and 2 seconds."""
    monkeypatch.setattr(bandwidth, "has_kernels", lambda: kernels)
    monkeypatch.setattr(bandwidth.time, "perf_counter", iter([0.0, 9.0, 9.0, 10.0, 10.0, 12.0]).__next__)
    assert WeightReading(llama()).seconds() == 2.0
