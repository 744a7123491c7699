"""A packed layer gives what the plain one gives, and steps aside where it cannot serve."""

import copy

import pytest
import torch
from support.tiny_models import VOCABULARY, tiny_drafter_of, tiny_target
from torch import nn

from draftsmith.models.target import packed_linear
from draftsmith.models.target.packed_linear import PackedLinear, pack_linears, packable_bytes

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def packing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine measures: every shape, from two rows on."""
    monkeypatch.setattr(
        packed_linear, "_rows_from_which_it_pays", lambda layers: {layer.weight.shape: 2 for layer in layers}
    )


def packed_of(plain: nn.Linear) -> PackedLinear:
    packed = copy.deepcopy(plain)
    packed.weight = plain.weight
    pack_linears(packed)
    assert isinstance(packed, PackedLinear)
    return packed


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_product(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(48, 1030, bias=bias).requires_grad_(False)
    packed = packed_of(plain)
    for shape in ((1, 48), (5, 48), (2, 7, 48), (0, 48)):
        x = torch.randn(shape)
        torch.testing.assert_close(packed(x), plain(x), atol=1e-5, rtol=1e-5)
    assert packed.weight.data_ptr() == plain.weight.data_ptr()
    assert set(packed.state_dict()) == set(plain.state_dict())


def test_few_rows_read_the_plain_weight() -> None:
    """Below the number from which packing pays bits are those of the plain layer, and nothing is packed."""
    torch.manual_seed(0)
    plain = nn.Linear(300, 257).requires_grad_(False)
    packed, x = packed_of(plain), torch.randn(1, 300)
    assert torch.equal(packed(x), plain(x))
    assert packed._packed is None
    packed(torch.randn(2, 300))
    assert packed._packed is not None


def test_gradients_and_other_dtypes_are_the_plain_ones() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(16, 40, bias=False).requires_grad_(False)
    packed = packed_of(plain)
    x, y = (torch.ones(3, 16, requires_grad=True) for _ in range(2))
    packed(x).sum().backward()
    plain(y).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    doubled = packed.double()
    assert doubled(torch.ones(2, 16).double()).dtype == torch.float64


def test_a_weight_that_changes_in_place_is_packed_again() -> None:
    """As when an adapter is merged into the target: the copy must not be that of the weight before."""
    torch.manual_seed(0)
    plain = nn.Linear(48, 64, bias=False).requires_grad_(False)
    packed, x = packed_of(plain), torch.randn(4, 48)
    before = packed(x)
    with torch.no_grad():
        plain.weight.mul_(3.0)
    torch.testing.assert_close(packed(x), 3 * before, atol=1e-5, rtol=1e-5)


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
    medusa = tiny_drafter_of("medusa", target).freeze()
    pack_linears(medusa)
    heads = [
        module for module in medusa.modules() if isinstance(module, PackedLinear) and module.out_features == VOCABULARY
    ]
    assert len(heads) == medusa.config.num_heads


def test_what_is_trained_or_of_another_dtype_stays_plain() -> None:
    for model in (tiny_target().requires_grad_(True), tiny_target().bfloat16()):
        pack_linears(model)
        assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_a_measurement_decides_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape whose packed product is slower stays plain; one that gains from six rows on is packed from there."""
    monkeypatch.undo()
    now = [0.0]
    cost_s = {(8, 4, False): 1.0, (8, 4, True): 2.0, (16, 4, False): 1.0, (16, 4, True): 0.5}

    def plain(x: torch.Tensor, weight: torch.Tensor) -> None:
        now[0] += cost_s[weight.shape[0], weight.shape[1], False]

    def packed(x: torch.Tensor, weight: torch.Tensor, bias: None) -> None:
        slow = weight.shape[0] == 16 and len(x) < 6
        now[0] += 2.0 if slow else cost_s[weight.shape[0], weight.shape[1], True]

    monkeypatch.setattr(packed_linear, "_pack", lambda weight: weight)
    monkeypatch.setattr(packed_linear, "_packed_product", packed)
    monkeypatch.setattr(packed_linear.F, "linear", plain)
    monkeypatch.setattr(packed_linear.time, "perf_counter_ns", lambda: now[0])
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 16)).requires_grad_(False)
    pack_linears(model)
    assert type(model[0]) is nn.Linear
    assert isinstance(model[1], PackedLinear)
    assert model[1].packed_from == 6
