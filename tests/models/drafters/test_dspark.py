"""DSpark's additions to a block: logits that depend on the previous token, and a confidence head for alpha."""

from typing import Any

import pytest
import torch
from support.tiny_models import tiny_drafter_of, tiny_target

from draftsmith.models.drafters.dflash import DFlashDrafter

TARGET = tiny_target(num_hidden_layers=4)


def tiny_dspark(**options: Any) -> DFlashDrafter:
    drafter = tiny_drafter_of("dspark", TARGET, **{"block_size": 3, "markov_rank": 5, **options})
    assert isinstance(drafter, DFlashDrafter)
    return drafter


@pytest.mark.parametrize("until_first_error", [False, True])
def test_labels_outside_the_draft_vocabulary_have_no_loss(until_first_error: bool) -> None:
    """Without a teacher, neither head reads their rows: tokens 40 to 59 are labels, tokens 0 to 39 are drafted."""
    drafter = tiny_dspark(loss="ce", draft_vocab_size=40, until_first_error=until_first_error)
    ids = torch.arange(40, 60).view(1, 20)
    features, teacher = drafter.training_features(TARGET, ids)
    assert drafter(ids, features, torch.ones_like(ids), teacher_features=teacher).loss == 0.0
