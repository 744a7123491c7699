"""Attention without repeated keys and values: what transformers' own gives, and only where it is faster."""

import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import tiny_target

from draftsmith.models.cpu_kernels import DTYPES, has_kernels
from draftsmith.models.target import grouped_sdpa
from draftsmith.models.target.grouped_sdpa import NAME, use_grouped_sdpa

IDS = torch.tensor([[5, 9, 33, 7], [3, 4, 8, 2]])
# The second row sees neither its first token nor, in the last place, its third.
HIDDEN = torch.tensor([[[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]] * 2, dtype=torch.bool)
HIDDEN[1, 1:, 0] = True
HIDDEN[1, 3, 2] = True
MASK = torch.zeros(2, 1, 4, 4).masked_fill(HIDDEN[:, None], torch.finfo(torch.float32).min)


@pytest.mark.skipif(not has_kernels(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("case", "by_kernels"),
    [("alike", True), ("a boolean mask", False), ("narrow values", False), ("odd heads", False), ("strided", False)],
)
def test_one_sequence_goes_through_the_kernels(
    case: str, by_kernels: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine heads on three, if mask, keys and values are of the query's form, and heads fill vectors."""
    torch.manual_seed(0)
    size = 62 if case == "odd heads" else 64
    query = torch.randn(1, 5, 9, size, dtype=dtype).transpose(1, 2)
    key, value = torch.randn(2, 1, 3, 20, size, dtype=dtype)[..., :11, :]
    hidden = torch.arange(11) % 3 == torch.arange(5)[:, None] % 3
    mask = torch.zeros(1, 1, 5, 11, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    if case == "a boolean mask":
        mask = mask == 0
    elif case == "narrow values":
        value = value[..., :32].contiguous()
    elif case == "strided":
        key = key.transpose(2, 3).contiguous().transpose(2, 3)
    torch_own, used = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **o: (used.append(1), torch_own(*a, **o))[1])
    with torch.inference_mode():
        out, _ = grouped_sdpa.grouped_sdpa(torch.nn.Module(), query, key, value, mask, scaling=0.3)
        wanted = torch_own(query, key, value, mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    close = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out, wanted, atol=close, rtol=close)
    assert out.is_contiguous()
    assert (not used) == by_kernels


def test_the_same_bits_as_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    with torch.inference_mode():
        expected = target(input_ids=IDS, attention_mask=MASK).logits
        use_grouped_sdpa(target)
        assert target.config._attn_implementation == NAME
        called = []
        plain = grouped_sdpa.sdpa_attention_forward
        monkeypatch.setattr(
            grouped_sdpa, "sdpa_attention_forward", lambda *a, **o: (called.append(1), plain(*a, **o))[1]
        )
        assert torch.equal(target(input_ids=IDS, attention_mask=MASK).logits, expected)
        assert not called
        causal = target(input_ids=IDS).logits
    assert len(called) == target.config.num_hidden_layers
    with torch.inference_mode():
        target.set_attn_implementation("sdpa")
        assert torch.equal(target(input_ids=IDS).logits, causal)


def test_a_padding_mask_is_understood() -> None:
    """transformers makes the same mask for it as for sdpa."""
    target, padding = tiny_target(), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    with torch.inference_mode():
        expected = target(input_ids=IDS, attention_mask=padding).logits
        use_grouped_sdpa(target)
        assert torch.equal(target(input_ids=IDS, attention_mask=padding).logits, expected)


def test_with_gradients_transformers_own_is_used() -> None:
    target = tiny_target().requires_grad_(True)
    use_grouped_sdpa(target)
    target(input_ids=IDS, attention_mask=MASK).logits.sum().backward()
    ours = target.base_model.layers[0].self_attn.k_proj.weight.grad.clone()
    target.zero_grad()
    target.set_attn_implementation("sdpa")
    target(input_ids=IDS, attention_mask=MASK).logits.sum().backward()
    assert torch.equal(target.base_model.layers[0].self_attn.k_proj.weight.grad, ours)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_without_shared_heads_too(model_type: str) -> None:
    target = tiny_target(model_type, num_key_value_heads=4)
    with torch.inference_mode():
        expected = target(input_ids=IDS, attention_mask=MASK).logits
        use_grouped_sdpa(target)
        assert target.config._attn_implementation == NAME
        torch.testing.assert_close(target(input_ids=IDS, attention_mask=MASK).logits, expected)


def test_others_keep_theirs() -> None:
    target = tiny_target()
    target.set_attn_implementation("eager")
    use_grouped_sdpa(target)
    assert target.config._attn_implementation == "eager"
