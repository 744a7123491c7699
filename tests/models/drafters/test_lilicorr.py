"""The lattice's scores: those of the published code, and their substitutes after a token that is no candidate."""

from types import SimpleNamespace

import pytest
import torch
from support.tiny_models import random_batch, tiny_drafter_of, tiny_target

from draftsmith.models.drafters import lilicorr
from draftsmith.models.drafters.lilicorr import Lattice, LiLiCorrDrafter


def test_scores_equal_the_published_ones() -> None:
    """NVIDIA/TensorRT-LLM's golden scores of Model-Optimizer's head, for weights that are sines of their indices."""
    config = SimpleNamespace(
        lattice_hidden_size=8, lattice_heads=2, lattice_factor_dim=8, lattice_layers=2, lattice_mlp_ratio=2.0,
        lattice_top_k=3, lattice_logit_scale=8.0, lattice_vector_eps=1e-4, num_depths=3, block_size=4,
    )  # fmt: skip
    lattice = Lattice(32, 1e-5, config)
    for name, parameter in lattice.named_parameters():
        place = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
        parameter.data = torch.sin(place * 0.17 + sum(name.encode()) * 0.013) * 0.2
    embedding = torch.linspace(-1.2, 1.3, 512).view(16, 32)
    candidates = torch.tensor([[[2, 5, 9], [6, 3, 1], [4, 7, 8]]])
    log_q = torch.tensor([[[-0.4, -1.5, -3.0], [-0.6, -1.7, -2.7], [-0.2, -2.1, -3.4]]])
    normed, context = torch.linspace(-0.7, 0.9, 96).view(1, 3, 32), torch.linspace(-0.5, 0.4, 32).view(1, 32)
    with torch.no_grad():
        scores = lattice(embedding[candidates], log_q, normed, context)[0]
    first = torch.tensor([-2.00565147, -2.00631571, -2.01010752])
    others = torch.tensor(
        [
            [
                [1.16437435, 1.16812551, 1.15701485],
                [1.16656375, 1.17030466, 1.15921211],
                [1.17068172, 1.17445230, 1.16334319],
            ],
            [
                [1.14806044, 1.14459574, 1.12698877],
                [1.14481199, 1.14134955, 1.12373281],
                [1.14475155, 1.14125943, 1.12357390],
            ],
        ]
    )
    torch.testing.assert_close(scores, torch.cat([first.expand(1, 3, 3), others]), atol=2e-5, rtol=2e-5)


def lattice_drafter() -> LiLiCorrDrafter:
    drafter = tiny_drafter_of("lilicorr", tiny_target(), lattice_hidden_size=32, lattice_heads=4, lattice_top_k=5)
    assert isinstance(drafter, LiLiCorrDrafter)
    return drafter


def test_log_q_replaces_scores_after_a_non_candidate() -> None:
    """After a candidate its scores are used; the first row is equal after every token."""
    drafter = lattice_drafter()
    with torch.no_grad():
        normed = torch.randn(5, 32)
        logits = drafter.vocab.logits(normed)
        columns, *rest = drafter.score_inputs(normed, torch.randn(32))
        rows = [columns, *rest]
        for depth in (0, 3):
            row = [each[depth][None] for each in rows]
            before = columns[depth - 1] if depth else torch.tensor([8, 9, 10, 11, 12])
            for place, token in enumerate(before):
                torch.testing.assert_close(drafter.scores_after(row, token[None])[0], rest[1][depth, place])
        absent = torch.tensor([token for token in range(61) if token not in columns[2]])[:1]
        log_q = logits[3].log_softmax(-1)[columns[3]]
        torch.testing.assert_close(drafter.scores_after([each[3][None] for each in rows], absent)[0], log_q)


def test_chunks_of_blocks_equal_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients are equal."""
    drafter = lattice_drafter().double()
    batch = random_batch(tiny_target().double(), drafter=drafter)
    found = []
    for elements in (1 << 27, 5 * 5 * 32 * 3):
        monkeypatch.setattr(lilicorr, "ELEMENTS_AT_ONCE", elements)
        drafter.zero_grad()
        loss = drafter(**batch).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in drafter.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
