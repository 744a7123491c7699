"""CPU products and attention: against fp64, bitwise independent of a token's place, in models."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import tiny_drafter_of, tiny_target
from torch import Tensor, nn

from draftsmith.models.decoding import kv_cache
from draftsmith.models.decoding.kv_cache import KVCache
from draftsmith.models.kernels import attention, cpu_kernels
from draftsmith.models.kernels.attention import OWN_SDPA, own_sdpa, use_own_attention
from draftsmith.models.kernels.cpu_kernels import (
    DTYPES,
    MOST_ROWS,
    PackedLinear,
    pack_linears,
    packable_bytes,
)
from draftsmith.models.kernels.cpu_library import has_kernels

KERNELS = pytest.mark.skipif(not has_kernels(), reason="no C++ compiler")
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
# Sums are in fp32; bf16 rounds them once, to within half of its last bit.
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-8, "atol": 1e-5}}
KERNEL = torch.ops.draftsmith


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@KERNELS
@EVERY_DTYPE
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 71), (1, 1), (64, 96)])
def test_products(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Every number of rows that fits into registers, and several times as many."""
    weight, bias = random_tensor(outputs, inputs, dtype=dtype), random_tensor(outputs, seed=1)
    packed = KERNEL.pack(weight)
    rows = random_tensor(70, inputs, dtype=dtype, seed=2)
    exact = rows.double() @ weight.double().T
    for count in (*range(14), 25, 70):
        for added in (None, bias):
            wanted = exact[:count] + (0 if added is None else bias.double())
            found = KERNEL.linear(rows[:count], packed, outputs, added)
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), wanted, **CLOSE[dtype])


@KERNELS
def test_sums_are_rounded_to_the_nearest_bf16() -> None:
    """Ties go to even: bf16 has 7 fraction bits, 2**-8 is half of the last."""
    inf, nan, largest = float("inf"), float("nan"), torch.finfo(torch.bfloat16).max
    cases = [
        (1, 2**-8, 1), (1 + 2**-7, 2**-8, 1 + 2**-6), (1, 2**-8 + 2**-15, 1 + 2**-7), (-1, -(2**-8), -1),
        (largest, 2.0**118, largest), (largest, 2.0**119, inf), (-largest, -largest, -inf),
        (inf, 1, inf), (-inf, 1, -inf), (inf, -inf, nan), (nan, 1, nan),
    ]  # fmt: skip
    rows = torch.tensor([case[:2] for case in cases], dtype=torch.bfloat16)
    sums = KERNEL.linear(rows, KERNEL.pack(torch.ones(1, 2, dtype=torch.bfloat16)), 1, None)
    torch.testing.assert_close(
        sums[:, 0].double(), torch.tensor([case[2] for case in cases]).double(), equal_nan=True, rtol=0, atol=0
    )


def random_attention_inputs(
    heads: int, kv_heads: int, head_size: int, rows: int, columns: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Build inputs as in a step: heads side by side in the query, a longer cache, a mask with holes."""
    query = random_tensor(1, rows, heads, head_size, dtype=dtype).transpose(1, 2)
    caches = random_tensor(2, 3, 1, kv_heads, columns + 9, head_size, dtype=dtype, seed=1)
    hidden = random_tensor(1, 1, rows, columns + 5, seed=2) > 0.3
    hidden[..., columns // 2] = False
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    return query, caches[0, 1, :, :, :columns], caches[1, 1, :, :, :columns], mask[..., :columns]


def assert_attends(
    found: Tensor, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> None:
    """Compare with attention in double precision. In bf16 shares, of which the largest is 1, are rounded too.

    A share so near the middle of two bf16 numbers that fp32 decides may become either.
    """
    dtype, shared = query.dtype, query.shape[1] // keys.shape[1]
    keys, values = (of.double().repeat_interleave(shared, 1) for of in (keys, values))
    scores = query.double() @ keys.transpose(2, 3) * scale
    if mask is not None:
        scores = scores.masked_fill(mask != 0, float("-inf"))
    exact = (scores - scores.amax(-1, keepdim=True)).exp()
    shares, total = exact.to(dtype).double(), exact.to(dtype).double().sum(-1, keepdim=True)
    either = ((exact * (1 + 1e-5)).to(dtype) != (exact * (1 - 1e-5)).to(dtype)) & (dtype == torch.bfloat16)
    wanted = (shares @ values / total).transpose(1, 2)
    slack = ((either * exact * 2**-7) @ (values.abs() + wanted.abs().amax()) / total).transpose(1, 2)
    close = CLOSE[dtype]
    assert ((found.double() - wanted).abs() <= close["atol"] + close["rtol"] * wanted.abs() + slack).all()


@KERNELS
@EVERY_DTYPE
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(9, 3, 64), (8, 2, 32), (4, 4, 128)])
def test_attention(heads: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
    for rows, columns in ((1, 1), (5, 37), (MOST_ROWS, 130)):
        query, keys, values, mask = random_attention_inputs(heads, kv_heads, head_size, rows, columns, dtype)
        for scale in (head_size**-0.5, 1.0):
            found = KERNEL.attention(query, keys, values, mask, scale)
            assert found.is_contiguous()
            assert_attends(found, query, keys, values, mask, scale)
    alone = query[:, :, :1]
    found = KERNEL.attention(alone, keys, values, None, 0.2)
    assert_attends(found, alone, keys, values, None, 0.2)
    assert torch.equal(found, KERNEL.attention(alone, keys, values, torch.zeros_like(mask[:, :, :1]), 0.2))


@KERNELS
@EVERY_DTYPE
def test_attention_is_bitwise_independent_of_places(dtype: torch.dtype) -> None:
    """Masked tokens between the visible ones are not read; the call computes other rows too."""
    query, keys, values, _ = random_attention_inputs(9, 3, 32, 7, 21, dtype)
    wanted = KERNEL.attention(query[:, :, 3:4], keys, values, None, 0.2)
    generator = torch.Generator().manual_seed(3)
    for columns in (22, 40, 77, 200):
        places = torch.randperm(columns, generator=generator)[:21].sort().values
        mask = torch.full((1, 1, 7, columns), torch.finfo(dtype).min, dtype=dtype)
        mask[..., places] = 0
        moved = [torch.full((1, 3, columns, 32), float("nan"), dtype=dtype) for _ in range(2)]
        for to, of in zip(moved, (keys, values), strict=True):
            to[:, :, places] = of
        assert torch.equal(KERNEL.attention(query, *moved, mask, 0.2)[:, 3:4], wanted)


def wrong_calls() -> list[tuple[Callable[[], Any], str]]:
    """Return calls of operations with inputs that they do not read, and parts of the messages."""
    query, keys, values, mask = random_attention_inputs(4, 2, 64, 3, 10, torch.float32)
    closed = mask.index_fill(2, torch.tensor([1]), -1)
    rows, packed, bias = torch.zeros(3, 8), KERNEL.pack(torch.zeros(5, 8)), torch.zeros(5)
    half = packed.view(1, 4, packed.shape[2], 2)
    return [
        (lambda: KERNEL.attention(query, keys, values, closed, 1.0), "a row sees nothing"),
        (lambda: KERNEL.attention(query, keys, values, mask[..., :9], 1.0), "mask must be"),
        (lambda: KERNEL.attention(query, keys, values.bfloat16(), None, 1.0), "differ in dtype"),
        (lambda: KERNEL.attention(query, keys, values[..., :32], None, 1.0), "differ in size"),
        (lambda: KERNEL.attention(query.expand(2, -1, -1, -1), keys, values, None, 1.0), "one sequence"),
        (lambda: KERNEL.attention(query, keys[:, :0], values[:, :0], None, 1.0), "with keys"),
        (lambda: KERNEL.attention(query.half(), keys.half(), values.half(), None, 1.0), "only fp32 and bf16"),
        (lambda: KERNEL.pack(torch.zeros(5, 8).half()), "only fp32 and bf16"),
        (lambda: KERNEL.linear(rows.half(), packed.half(), 5, None), "only fp32 and bf16"),
        (lambda: KERNEL.linear(rows, half, 5, None), "a packed weight has another size"),
        (lambda: KERNEL.linear(rows[:, :7], packed, 5, None), "a packed weight has another size"),
        (lambda: KERNEL.linear(rows.bfloat16(), packed, 5, None), "a packed weight has another|differ in dtype"),
        (lambda: KERNEL.linear(rows, packed, 5, bias.double()), "a bias must be"),
        (lambda: KERNEL.linear(rows, packed, 5, bias[:4]), "a bias must be"),
        (lambda: KERNEL.norm(rows.double(), torch.ones(8).double(), 1e-6, False), "only fp32 and bf16"),
        (lambda: KERNEL.norm(rows, torch.ones(16)[::2], 1e-6, False), "rows and norm differ"),
        (lambda: KERNEL.largest(rows.double()), "only fp32 and bf16"),
        (
            lambda: KERNEL.fuse(bias.long(), None, rows, [rows[0]] * 2, 1e-6, packed, None, rows[:2], True),
            "features have another size",
        ),
        (lambda: KERNEL.best_first(torch.zeros(0, 9), 2, 3), "not as many rows"),
        (lambda: KERNEL.most_likely(rows, 9), "not as many rows or columns"),
        (lambda: KERNEL.keep_rows(torch.zeros(2, 4, 8), 2**63 - 1, [0]), "no such row"),
        (lambda: KERNEL.keep_rows(torch.zeros(2, 4, 8), 1, [2**63 - 1]), "no such row"),
    ]


@KERNELS
def test_wrong_inputs_are_refused() -> None:
    for call, sentence in wrong_calls():
        with pytest.raises(RuntimeError, match=sentence):
            call()


@KERNELS
def test_strided_bias_is_read_as_it_is() -> None:
    bias = torch.arange(10.0)[::2]
    assert torch.equal(KERNEL.linear(torch.zeros(1, 8), KERNEL.pack(torch.zeros(5, 8)), 5, bias)[0], bias)


# ---- attention in a model ----

IDS = torch.tensor([[5, 9, 33, 7], [3, 4, 8, 2]])
# The second row sees neither its first token nor its third in the last place.
HIDDEN = torch.tensor([[[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]] * 2, dtype=torch.bool)
HIDDEN[1, 1:, 0] = True
HIDDEN[1, 3, 2] = True
MASK = torch.zeros(2, 1, 4, 4).masked_fill(HIDDEN[:, None], torch.finfo(torch.float32).min)


@KERNELS
@EVERY_DTYPE
@pytest.mark.parametrize(
    ("case", "by_kernels"),
    [
        ("same layout", True),
        ("a boolean mask", False),
        ("narrow values", False),
        ("odd heads", False),
        ("strided", False),
        ("four sequences", False),
    ],
)
def test_forward_of_one_sequence_uses_the_kernels(
    case: str, by_kernels: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine heads on three, if mask, keys and values match the query, and heads fill whole vectors."""
    torch.manual_seed(0)
    size = 62 if case == "odd heads" else 64
    batch, rows = (4, 1) if case == "four sequences" else (1, 5)
    query = torch.randn(batch, rows, 9, size, dtype=dtype).transpose(1, 2)
    key, value = torch.randn(2, batch, 3, 20, size, dtype=dtype)[..., :11, :]
    hidden = torch.arange(11) % 3 == torch.arange(batch * rows).view(batch, 1, rows, 1) % 3
    mask = torch.zeros(batch, 1, rows, 11, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    if case == "a boolean mask":
        mask = mask == 0
    elif case == "narrow values":
        value = value[..., :32].contiguous()
    elif case == "strided":
        key = key.transpose(2, 3).contiguous().transpose(2, 3)
    torch_own, used = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **o: (used.append(1), torch_own(*a, **o))[1])
    with torch.inference_mode():
        out, _ = own_sdpa(torch.nn.Module(), query, key, value, mask, scaling=0.3)
        wanted = torch_own(query, key, value, mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    close = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out, wanted, atol=close, rtol=close)
    assert out.is_contiguous()
    assert (not used) == by_kernels


def test_forward_is_bitwise_equal_to_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    with torch.inference_mode():
        expected = target(input_ids=IDS, attention_mask=MASK).logits
        use_own_attention(target)
        assert target.config._attn_implementation == OWN_SDPA
        called = []
        plain = attention.sdpa_attention_forward
        monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *a, **o: (called.append(1), plain(*a, **o))[1])
        assert torch.equal(target(input_ids=IDS, attention_mask=MASK).logits, expected)
        assert not called
        causal = target(input_ids=IDS).logits
    assert len(called) == target.config.num_hidden_layers
    with torch.inference_mode():
        target.set_attn_implementation("sdpa")
        assert torch.equal(target(input_ids=IDS).logits, causal)


def test_gradients_use_transformers_attention() -> None:
    target = tiny_target().requires_grad_(True)
    use_own_attention(target)
    target(input_ids=IDS, attention_mask=MASK).logits.sum().backward()
    ours = target.base_model.layers[0].self_attn.k_proj.weight.grad.clone()
    target.zero_grad()
    target.set_attn_implementation("sdpa")
    target(input_ids=IDS, attention_mask=MASK).logits.sum().backward()
    assert torch.equal(target.base_model.layers[0].self_attn.k_proj.weight.grad, ours)


# ---- linear layers in a model ----


def pack_layer(plain: nn.Linear) -> PackedLinear:
    """Return a packed layer with the same weight."""
    packed = copy.deepcopy(plain)
    packed.weight = plain.weight
    pack_linears(packed)
    assert isinstance(packed, PackedLinear)
    return packed


def frozen(inputs: int, outputs: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


@KERNELS
def test_gradients_equal_those_of_plain_layers() -> None:
    """Gradients of rows, and of a weight or a bias that becomes trainable later."""
    plain = frozen(16, 40)
    packed = pack_layer(plain)
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


@KERNELS
@EVERY_DTYPE
def test_changed_weight_is_packed_again(dtype: torch.dtype) -> None:
    """Merging an adapter into the target changes a weight: the packed copy must follow."""
    packed, x = pack_layer(frozen(48, 64, dtype)), torch.randn(4, 48, dtype=dtype)
    before = packed(x)
    with torch.no_grad():
        packed.weight.mul_(2)
    torch.testing.assert_close(packed(x), 2 * before - packed.bias, atol=2**-6, rtol=2**-6)
    with torch.no_grad():
        packed.bias.mul_(2)
    assert torch.equal(packed(x), 2 * before)
    # A new parameter that is unmodified, as the first one was.
    packed.weight = nn.Parameter(torch.zeros_like(packed.weight), requires_grad=False)
    assert torch.equal(packed(x), packed.bias.expand(4, -1))


@KERNELS
def test_target_and_drafters_share_the_packed_layers() -> None:
    """Packing is in place: a drafter that borrowed the head before has the packed one too."""
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


@KERNELS
@pytest.mark.parametrize(("depths", "branch", "nodes"), [(1, 1, 1), (5, 4, 6), (3, 2, 40), (6, 8, 64)])
def test_most_likely_paths_equal_those_of_the_heap_in_python(
    depths: int, branch: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with equally likely tokens too, and tokens without any probability."""
    logits = random_tensor(depths, 90).round(decimals=1)
    logits[-1, 3:] = float("-inf")
    ours = cpu_kernels.best_first(logits, branch, nodes)
    reads_here = iter([False, True])  # the paths in Python, of the same candidates
    monkeypatch.setattr(cpu_kernels, "_is_read_here", lambda _: next(reads_here))
    assert ours == cpu_kernels.best_first(logits, branch, nodes)


@KERNELS
@EVERY_DTYPE
@pytest.mark.parametrize("by_kernel", [True, False])
def test_kept_rows_move_to_the_front(by_kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "has_kernels", lambda: by_kernel)
    cache = KVCache(40)
    cache.allocate(3, *random_tensor(2, 1, 2, 1, 16, dtype=dtype))
    for part, seed in ((cache.keys, 1), (cache.values, 2)):
        part.copy_(random_tensor(*part.shape, dtype=dtype, seed=seed))
    before = [part.clone() for part in (cache.keys, cache.values)]
    cache.length = 7
    cache.keep([0, 2, 3, 6])
    assert cache.length == 11
    for part, old in zip((cache.keys, cache.values), before, strict=True):
        assert torch.equal(part[:, :, :, :11], old[:, :, :, [*range(8), 9, 10, 13]])
        assert torch.equal(part[:, :, :, 14:], old[:, :, :, 14:])
    with pytest.raises(RuntimeError, match="no such row"):
        KERNEL.keep_rows(cache.keys, 7, [1, 0])
