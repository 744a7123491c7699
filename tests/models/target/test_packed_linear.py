"""A packed layer gives what the plain one gives, and steps aside where it cannot serve."""

import copy

import pytest
import torch
from support.tiny_models import VOCABULARY, tiny_drafter_of, tiny_target
from torch import Tensor, nn

from draftsmith.models.cpu_kernels import DTYPES, has_kernels
from draftsmith.models.target.packed_linear import MOST_ROWS, PackedLinear, pack_linears, packable_bytes

pytestmark = pytest.mark.skipif(not has_kernels(), reason="no C++ compiler")


def packed_of(plain: nn.Linear) -> PackedLinear:
    """A packed layer with the same weight."""
    packed = copy.deepcopy(plain)
    packed.weight = plain.weight
    pack_linears(packed)
    assert isinstance(packed, PackedLinear)
    return packed


def frozen(inputs: int, outputs: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_same_product(bias: bool, dtype: torch.dtype) -> None:
    """In bf16 within its last bit: sums are of fp32 in both."""
    plain = frozen(48, 103, dtype, bias)
    packed = packed_of(plain)
    close = 1e-5 if dtype == torch.float32 else 2**-7
    for shape in ((48,), (1, 48), (2, 7, 48), (33, 48), (0, 48)):
        x = torch.randn(shape, dtype=dtype)
        torch.testing.assert_close(packed(x), plain(x), atol=close, rtol=close)
    assert packed.weight.data_ptr() == plain.weight.data_ptr()
    assert set(packed.state_dict()) == set(plain.state_dict())


def is_plain(packed: nn.Linear, rows: Tensor) -> bool:
    """Whether the layer reads its own weight: the packed one is ruined meanwhile."""
    assert isinstance(packed, PackedLinear)
    packed(torch.zeros(1, packed.in_features, dtype=packed.weight.dtype))
    kept = packed._packed
    packed._packed = None if kept is None else torch.zeros_like(kept)
    found = packed(rows)
    packed._packed = kept
    return bool((found.detach() - packed.bias.detach()).abs().max() > 0)


def test_what_the_kernels_cannot_serve_is_the_plain_product() -> None:
    packed = packed_of(frozen(16, 40))
    assert not is_plain(packed, torch.ones(MOST_ROWS, 16))
    assert is_plain(packed, torch.ones(MOST_ROWS + 1, 16))
    assert is_plain(packed, torch.ones(3, 16, requires_grad=True))
    with torch.no_grad():
        assert not is_plain(packed, torch.ones(3, 16, requires_grad=True))
    doubled = copy.deepcopy(packed).double()
    assert doubled(torch.ones(2, 16).double()).dtype == torch.float64


def test_gradients_are_the_plain_ones() -> None:
    """Of the rows, and of a weight or a bias that is trained from some time on."""
    plain = frozen(16, 40)
    packed = packed_of(plain)
    found, wanted = (torch.ones(3, 16, requires_grad=True) for _ in range(2))
    packed(found).sum().backward()
    plain(wanted).sum().backward()
    assert found.grad is not None
    assert wanted.grad is not None
    assert torch.equal(found.grad, wanted.grad)
    for parameter in (packed.weight, packed.bias):
        parameter.requires_grad_(True)
        packed(torch.ones(3, 16)).sum().backward()
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, 3))
        parameter.requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_a_weight_that_changes_is_packed_again(dtype: torch.dtype) -> None:
    """As when an adapter is merged into the target: the copy must not be that of the weight before."""
    packed, x = packed_of(frozen(48, 64, dtype)), torch.randn(4, 48, dtype=dtype)
    before = packed(x)
    with torch.no_grad():
        packed.weight.mul_(2)
    torch.testing.assert_close(packed(x), 2 * before - packed.bias, atol=2**-6, rtol=2**-6)
    with torch.no_grad():
        packed.bias.mul_(2)
    assert torch.equal(packed(x), 2 * before)
    # Another parameter, which did not change since it was made, as the first one had not.
    packed.weight = nn.Parameter(torch.zeros_like(packed.weight), requires_grad=False)
    assert torch.equal(packed(x), packed.bias.expand(4, -1))


def test_target_and_drafters_share_the_packed_layers() -> None:
    """In place: a drafter that borrowed the head before it was packed has the packed one too."""
    target = tiny_target()
    before = target(torch.tensor([[1, 2, 3]])).logits
    drafter = tiny_drafter_of("parallel", target).freeze()
    pack_linears(target)
    assert isinstance(drafter.attached.lm_head, PackedLinear)
    linears = [module for module in target.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 2 * 7 + 1
    assert all(isinstance(module, PackedLinear) for module in linears)
    torch.testing.assert_close(target(torch.tensor([[1, 2, 3]])).logits, before, atol=1e-5, rtol=1e-5)
    assert packable_bytes(target) == 4 * sum(module.weight.numel() for module in linears)
    assert packable_bytes(tiny_target().bfloat16()) == packable_bytes(target) / 2
    medusa = tiny_drafter_of("medusa", target).freeze()
    pack_linears(medusa)
    heads = [
        module for module in medusa.modules() if isinstance(module, PackedLinear) and module.out_features == VOCABULARY
    ]
    assert len(heads) == medusa.config.num_heads


def test_what_is_trained_or_of_another_dtype_stays_plain() -> None:
    biased = frozen(8, 8)
    biased.bias.requires_grad_(True)
    for model in (tiny_target().requires_grad_(True), tiny_target().double(), tiny_target().half(), biased):
        pack_linears(model)
        assert not any(isinstance(module, PackedLinear) for module in model.modules())
