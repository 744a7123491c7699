"""Muon for the matrices of linear layers, AdamW for everything else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_target
from support.tiny_runs import InterruptAt, have_equal_weights, make_recipe, save_small_target, train_until
from torch import nn

from draftsmith.models.base.registry import load_drafter_class
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.optimizer import Fp32Muon, MuonWithAdamW, muon_parameters
from draftsmith.train.drafter.stage import train_drafter


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_target(tmp_path_factory.mktemp("muon") / "target")


def orthogonalize(momentum_mn: torch.Tensor) -> torch.Tensor:
    """Return U V^T of the singular value decomposition, which Newton-Schulz approximates."""
    u, _, v = torch.linalg.svd(momentum_mn, full_matrices=False)
    return u @ v


def test_first_step_of_muon_and_adamw_by_hand() -> None:
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))
    before_mn, before_n = matrix.detach().clone(), vector.detach().clone()
    optimizer = MuonWithAdamW(
        [{"params": [vector], "lr": 0.01, "weight_decay": 0.0}], [{"params": [matrix], "lr": 0.1, "weight_decay": 0.0}]
    )
    matrix.grad, vector.grad = torch.randn(6, 4), torch.randn(4)
    optimizer.step()
    # 0.2 sqrt(6): the size of AdamW's updates (2502.16982). Newton-Schulz in bf16 gives singular values of 0.7 to 1.2.
    update = (before_mn - matrix.detach()) / (0.1 * 0.2 * 6**0.5)
    assert torch.linalg.svdvals(update).tolist() == pytest.approx([1.0] * 4, abs=0.35)
    assert nn.functional.cosine_similarity(update.flatten(), orthogonalize(matrix.grad).flatten(), dim=0) > 0.98
    assert torch.allclose(vector.detach(), before_n - 0.01 * vector.grad.sign(), atol=1e-5)


@pytest.mark.parametrize("shape", [(24, 10), (10, 24)])
def test_fp32_muon_steps_as_torchs_does_but_for_rounding(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start_mn = torch.randn(shape)
    gradients = [torch.randn(shape) for _ in range(3)]
    moved = []
    for kind in (torch.optim.Muon, Fp32Muon):
        matrix = nn.Parameter(start_mn.clone())
        optimizer = kind([matrix], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for gradient in gradients:
            matrix.grad = gradient
            optimizer.step()
        moved.append((matrix.detach() - start_mn, optimizer.state[matrix]["momentum_buffer"]))
    (theirs_mn, their_momentum_mn), (ours_mn, momentum_mn) = moved
    assert (ours_mn - theirs_mn).norm() < 0.03 * theirs_mn.norm()  # bf16 keeps 8 bits
    assert torch.equal(momentum_mn, their_momentum_mn)


def test_heads_masks_and_norms_stay_with_adamw() -> None:
    target = tiny_target()
    options: dict[str, dict[str, Any]] = {
        "parallel": {"num_masks": 2, "markov_rank": 3}, "medusa": {"num_heads": 2},
        "eagle3": {"feature_layers": [0, 1], "draft_vocab_size": 48},  # as wide as the MLP
    }  # fmt: skip
    names = {
        kind: set(muon_parameters(load_drafter_class(kind).from_target(target, values)))
        for kind, values in options.items()
    }
    layer = {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
    layer |= {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert names["parallel"] == {*layer, "fuse.weight"}
    assert names["medusa"] == {"blocks.0.layers.0.weight", "blocks.1.layers.0.weight"}
    assert names["eagle3"] == {*layer, "fc.weight"}


def muon_recipe(target: Path, name: str, **train: Any) -> Recipe:
    values = {"optimizer": "muon", "muon_learning_rate": 0.02, "learning_rate": 0.01, "max_steps": 6}
    return make_recipe(target, name, **values, **train)


def test_resumed_training_is_bitwise_equal(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = muon_recipe(target, "whole"), muon_recipe(target, "broken")
    train_drafter(whole)
    train_until(InterruptAt(5), broken, monkeypatch)
    assert train_drafter(broken).steps == 6
    assert have_equal_weights(whole, broken)
