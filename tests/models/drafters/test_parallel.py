"""The parallel drafter: its first draft, its features, and errors of loading."""

from pathlib import Path

import pytest
import torch
from support.tiny_models import VOCABULARY, random_batch, tiny_parallel, tiny_target

from draftsmith.errors import UserError
from draftsmith.models.base.registry import load_drafter, load_drafter_class
from draftsmith.models.target.features import target_features


def test_prompt_and_first_token_in_one_draft() -> None:
    """As the decoding loop does: start(prompt), observe(token), one forward for both, also beyond the cached mask."""
    target = tiny_target()
    drafter = tiny_parallel(target)
    batch = random_batch(target, 1, 60)
    ids, features = batch["input_ids"][0], batch["features"][0]
    training = drafter.group_logits(batch["input_ids"], batch["features"])[0].detach()
    decoder = drafter.decoder(64)
    decoder.start(ids[:30], features[:30])
    decoder.observe(ids[30:31], features[29:30])
    torch.testing.assert_close(decoder.draft(), training[:, 30], atol=1e-5, rtol=1e-5)
    decoder.observe(ids[31:59], features[30:58])
    torch.testing.assert_close(decoder.draft(), training[:, 58], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="call observe"):
        decoder.draft()


def test_every_feature_layer_is_normalised_separately() -> None:
    """Scaling one residual stream by a hundred changes nothing."""
    target = tiny_target()
    drafter = tiny_parallel(target, feature_layers=[0, 1, -1])
    ids = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    features = target_features(target, ids, layers=drafter.feature_layers)
    assert features.shape[-1] == 3 * target.config.hidden_size
    louder = features.unflatten(-1, (3, -1)) * torch.tensor([100.0, 1.0, 3.0])[:, None]
    logits, same = (drafter.group_logits(ids, f) for f in (features, louder.flatten(-2)))
    torch.testing.assert_close(same, logits, atol=1e-4, rtol=0)
    swapped = features.unflatten(-1, (3, -1))[..., [1, 0, 2], :].flatten(-2)
    assert (drafter.group_logits(ids, swapped) - logits).abs().max() > 1e-2


def test_unknown_kind_lists_the_kinds() -> None:
    with pytest.raises(UserError, match=r"drafter.kind `paralel` does not exist: use one of .*parallel"):
        load_drafter_class("paralel")


def test_drafter_of_another_target_is_refused() -> None:
    drafter = tiny_parallel(tiny_target())
    with pytest.raises(UserError, match="made for a target with vocab_size 61"):
        drafter.attach(tiny_target(vocab_size=70))


def test_folder_without_a_drafter_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no trained drafter"):
        load_drafter(tmp_path, tiny_target())
