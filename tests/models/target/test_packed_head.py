"""The packed LM head gives what the plain one gives, and steps aside where it cannot serve."""

import pytest
import torch
from support.tiny_models import VOCABULARY, tiny_drafter_of, tiny_target
from torch import nn

from draftsmith.models.target.packed_head import PackedLinear, pack_heads

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_product(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(48, 1030, bias=bias).requires_grad_(False)
    packed = PackedLinear(plain)
    for shape in ((1, 48), (5, 48), (2, 7, 48)):
        x = torch.randn(shape)
        torch.testing.assert_close(packed(x), plain(x), atol=1e-5, rtol=1e-5)
    assert packed.weight.data_ptr() == plain.weight.data_ptr()
    assert set(packed.state_dict()) == set(plain.state_dict())


def test_gradients_and_other_dtypes_are_the_plain_ones() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(16, 40, bias=False).requires_grad_(False)
    packed = PackedLinear(plain)
    x, y = (torch.ones(3, 16, requires_grad=True) for _ in range(2))
    packed(x).sum().backward()
    plain(y).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    doubled = PackedLinear(plain).double()
    assert doubled(torch.ones(1, 16).double()).dtype == torch.float64


def test_only_heads_are_packed() -> None:
    target = tiny_target()
    before = target(torch.tensor([[1, 2, 3]])).logits
    pack_heads(target, VOCABULARY)
    packed = [name for name, module in target.named_modules() if isinstance(module, PackedLinear)]
    assert packed == ["lm_head"]
    torch.testing.assert_close(target(torch.tensor([[1, 2, 3]])).logits, before, atol=1e-5, rtol=1e-5)
    medusa = tiny_drafter_of("medusa", target).freeze()
    pack_heads(medusa, VOCABULARY)
    heads = [name for name, module in medusa.named_modules() if isinstance(module, PackedLinear)]
    assert len(heads) == medusa.config.num_heads


def test_what_is_trained_or_of_another_dtype_stays_plain() -> None:
    for model in (tiny_target().requires_grad_(True), tiny_target().bfloat16()):
        pack_heads(model, VOCABULARY)
        assert not any(isinstance(module, PackedLinear) for module in model.modules())
