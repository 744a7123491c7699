"""Greedy choices, and draws."""

import pytest
import torch

from draftsmith.eval.trees.verify import Sampling, drawn, largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_of_equal_logits_the_first_is_the_largest(dtype: torch.dtype) -> None:
    """bf16 has many ties: greedy decoding is the same wherever the first is taken."""
    logits = torch.randn(7, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[3, [4, 900, 4999]] = 9.0
    assert torch.equal(largest(logits), logits.argmax(-1))
    assert largest(logits)[3] == 4
    assert int(largest(logits[3])) == 4


def test_tokens_are_drawn_with_their_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places from 0 to just below 1, a thousand of each row: exactly the rows' shares, and nothing without one."""
    p = torch.tensor(
        [[0.0, 0.25, 0.0, 0.5, 0.25, 0.0], [0.125, 0.0, 0.0, 0.0, 0.0, 0.875], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]]
    )
    places = (torch.arange(1000, dtype=torch.float64)[:, None, None] + 0.5).expand(1000, 3, 1) / 1000
    monkeypatch.setattr(torch, "rand", lambda *_, **__: places)
    tokens = drawn(p.expand(1000, 3, 6), None)
    counts = torch.stack([(tokens == token).sum(0) for token in range(6)], dim=1)
    assert torch.equal(counts, (p * 1000).long())


@pytest.mark.parametrize(("place", "token"), [(0.0, 1), (1.0 - 2**-53, 3), (1.0, 3)])
def test_no_place_finds_a_token_without_probability(place: float, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, place, dtype=torch.float64))
    assert drawn(torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0]), None).item() == token


def test_rare_tokens_keep_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^20 tokens of 2^-24 behind one of 1 - 2^-4: a sum in fp32 would lose each of them."""
    rare = torch.full((1 + 2**20,), 2.0**-24)
    rare[0] = 1 - 2.0**-4
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, 1 - 2.0**-5, dtype=torch.float64))
    assert drawn(rare, None).item() == 1 + 2**19


def test_temperature_top_k_and_top_p_by_hand() -> None:
    """Logits log 16, log 8, log 4, log 1: at T = 2 the odds are 4 : 2.83 : 2 : 1, at T = 1 16 : 8 : 4 : 1 of 29."""
    logits = torch.tensor([16.0, 8.0, 4.0, 1.0], dtype=torch.float64).log()
    odds = torch.tensor([4.0, 8**0.5, 2.0, 1.0], dtype=torch.float64)
    assert torch.allclose(Sampling(2.0).probabilities(logits), odds / odds.sum(), atol=1e-12)
    two, three = (torch.tensor([16.0, 8.0, third, 0.0], dtype=torch.float64) for third in (0.0, 4.0))
    assert torch.allclose(Sampling(1.0, top_k=2).probabilities(logits), two / 24, atol=1e-12)
    # The token that reaches top_p stays: 16 / 29 = 0.55 alone is too little for 0.6, and 24 / 29 = 0.83 for 0.9.
    assert torch.allclose(Sampling(1.0, top_p=0.6).probabilities(logits), two / 24, atol=1e-12)
    assert torch.allclose(Sampling(1.0, top_p=0.9).probabilities(logits), three / 28, atol=1e-12)
