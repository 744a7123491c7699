"""Attention without repeated keys and values: the same bits as transformers' own, and only where it is faster."""

import pytest
import torch
from support.tiny_models import tiny_target

from draftsmith.models.target import grouped_sdpa
from draftsmith.models.target.grouped_sdpa import NAME, use_grouped_sdpa

IDS = torch.tensor([[5, 9, 33, 7], [3, 4, 8, 2]])
# The second row sees neither its first token nor, in the last place, its third.
HIDDEN = torch.tensor([[[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]] * 2, dtype=torch.bool)
HIDDEN[1, 1:, 0] = True
HIDDEN[1, 3, 2] = True
MASK = torch.zeros(2, 1, 4, 4).masked_fill(HIDDEN[:, None], torch.finfo(torch.float32).min)


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


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("llama", {"num_key_value_heads": 4}), ("gpt2", {"num_key_value_heads": 4}), ("llama", {"eager": True})],
)
def test_others_keep_theirs(model_type: str, changes: dict[str, object]) -> None:
    eager = changes.pop("eager", False)
    target = tiny_target(model_type, **changes)
    if eager:
        target.set_attn_implementation("eager")
    before = target.config._attn_implementation
    use_grouped_sdpa(target)
    assert target.config._attn_implementation == before
