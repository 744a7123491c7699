"""A packed layer gives what the plain one gives, and steps aside where it cannot serve."""

import copy

import pytest
import torch
from support.tiny_models import VOCABULARY, tiny_drafter_of, tiny_target
from torch import nn

from draftsmith.models.target import packed_linear
from draftsmith.models.target.packed_linear import (
    Layout,
    PackedLinear,
    Packing,
    layouts,
    pack_linears,
    packable_bytes,
)

pytestmark = pytest.mark.skipif(not layouts(), reason="torch with neither oneDNN nor MKL")
EVERY_LAYOUT = pytest.mark.parametrize(
    ("layout", "dtype"),
    [(layout, dtype) for dtype in packed_linear.TOLERANCE for layout in layouts(dtype)],
    ids=lambda value: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else type(value).__name__,
)


def pack_all(monkeypatch: pytest.MonkeyPatch, layout: Layout, from_rows: int = 2) -> None:
    """Whatever this machine measures: every shape."""
    packing = Packing(layout, from_rows)
    monkeypatch.setattr(
        packed_linear, "_packings", lambda layers, of: {layer.weight.shape: packing for layer in layers}
    )


@pytest.fixture(autouse=True)
def packing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_all(monkeypatch, layouts()[0])


def packed_of(plain: nn.Linear) -> PackedLinear:
    packed = copy.deepcopy(plain)
    packed.weight = plain.weight
    pack_linears(packed)
    assert isinstance(packed, PackedLinear)
    return packed


@EVERY_LAYOUT
@pytest.mark.parametrize("bias", [False, True])
def test_the_same_product(monkeypatch: pytest.MonkeyPatch, bias: bool, layout: Layout, dtype: torch.dtype) -> None:
    """In bf16 within its last bit: sums are of fp32 in both."""
    torch.manual_seed(0)
    pack_all(monkeypatch, layout)
    plain = nn.Linear(48, 1030, bias=bias, dtype=dtype).requires_grad_(False)
    packed = packed_of(plain)
    close = 1e-5 if dtype == torch.float32 else 2**-7
    for shape in ((1, 48), (5, 48), (2, 7, 48), (33, 48), (0, 48)):
        x = torch.randn(shape, dtype=dtype)
        torch.testing.assert_close(packed(x), plain(x), atol=close, rtol=close)
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


@pytest.mark.skipif(not layouts(torch.bfloat16), reason="a processor without products in bf16")
def test_in_bf16_a_row_has_the_same_bits_alone_and_in_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """What greedy decoding in bf16 needs: a token's logits from a step and from a tree's forward round alike."""
    torch.manual_seed(0)
    pack_all(monkeypatch, layouts(torch.bfloat16)[0], from_rows=1)
    for columns, rows in ((576, 1536), (1536, 576), (576, 192)):
        packed = packed_of(nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16).requires_grad_(False))
        x = torch.randn(25, columns, dtype=torch.bfloat16)
        together = packed(x)
        for count in (1, 2, 7, 13):
            assert torch.equal(packed(x[:count]), together[:count])
    target = tiny_target().bfloat16()
    pack_linears(target)
    linears = [module for module in target.modules() if isinstance(module, PackedLinear)]
    assert len(linears) == 2 * 7 + 1
    assert packable_bytes(target) == 2 * sum(module.weight.numel() for module in linears)


def test_what_is_trained_or_of_another_dtype_stays_plain() -> None:
    for model in (tiny_target().requires_grad_(True), tiny_target().double(), tiny_target().half()):
        pack_linears(model)
        assert not any(isinstance(module, PackedLinear) for module in model.modules())


class Timed:
    """A layout whose products take what the table says: by columns, from a number of rows on."""

    def __init__(self, now: list[float], cost: dict[int, dict[int, int]]) -> None:
        self.now, self.cost = now, cost

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def product(self, rows: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        table = self.cost[len(weight)]
        self.now[0] += table[max(n for n in table if n <= len(rows))]
        return rows


def test_a_measurement_decides_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster layout for trees, from where it gains a tenth on; a shape that gains by none stays plain."""
    monkeypatch.undo()
    now = [0.0]
    plain = Timed(now, {8: {1: 100}, 16: {1: 100}, 32: {1: 100}})
    one = Timed(now, {8: {1: 120}, 16: {1: 120, 6: 50}, 32: {1: 95}})
    other = Timed(now, {8: {1: 130, 12: 60}, 16: {1: 80}, 32: {1: 99}})
    monkeypatch.setattr(packed_linear, "layouts", lambda dtype: (one, other))
    monkeypatch.setattr(packed_linear, "Plain", lambda: plain)
    monkeypatch.setattr(packed_linear.time, "perf_counter_ns", lambda: now[0])
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 16), nn.Linear(4, 32)).requires_grad_(False)
    pack_linears(model)
    # 3 x 120 against 130 + 130 + 60; 120 + 50 + 50 against 3 x 80; 5 % are not worth a second copy.
    assert isinstance(model[0], PackedLinear)
    assert model[0].packing == Packing(other, 12)
    assert isinstance(model[1], PackedLinear)
    assert model[1].packing == Packing(one, 6)
    assert type(model[2]) is nn.Linear


def test_a_layout_that_depends_on_the_number_of_rows_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL is told another number of rows than it packed for: should that ever matter, it is not used."""

    def wrong(
        self: object, rows: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> object:
        return torch.nn.functional.linear(rows, weight, bias) * (1 if len(rows) <= 12 else 1.01)

    for layout in layouts():
        assert packed_linear._gives_the_plain_product(layout, torch.float32)
        monkeypatch.setattr(type(layout), "product", wrong)
        assert not packed_linear._gives_the_plain_product(layout, torch.float32)
