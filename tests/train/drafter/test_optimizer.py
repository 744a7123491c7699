"""Muon for the matrices of linear layers, AdamW for everything else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import InterruptAt, make_recipe, same_weights, save_small_target, train_until
from torch import nn

from draftsmith.recipes.errors import UserError
from draftsmith.train.drafter.optimizer import MuonWithAdamW
from draftsmith.train.drafter.stage import train_drafter


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_target(tmp_path_factory.mktemp("muon") / "target")


def orthogonalized(momentum_mn: torch.Tensor) -> torch.Tensor:
    """U V^T of the singular value decomposition, which Newton-Schulz approximates."""
    u, _, v = torch.linalg.svd(momentum_mn, full_matrices=False)
    return u @ v


def test_first_step_is_the_orthogonalized_gradient_and_adamws() -> None:
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
    assert nn.functional.cosine_similarity(update.flatten(), orthogonalized(matrix.grad).flatten(), dim=0) > 0.98
    assert torch.allclose(vector.detach(), before_n - 0.01 * vector.grad.sign(), atol=1e-5)
