"""The parallel drafter: what its rows see in every backend, its loss by the formula, its features; what is refused."""

from pathlib import Path

import pytest
import torch
from support.tiny_models import MASKS, VOCABULARY, random_batch, tiny_parallel, tiny_target

from draftsmith.models.base.registry import load_drafter, load_drafter_class
from draftsmith.models.groups.attention import BACKENDS
from draftsmith.models.groups.rows import depth_labels
from draftsmith.models.target.features import target_features
from draftsmith.recipes.errors import UserError

CPU_BACKENDS = tuple(backend for backend in BACKENDS if backend != "flex")


def test_prompt_and_first_token_in_one_draft() -> None:
    """The loop's way: start(prompt), observe(first token), one forward for both; prompts longer than the ready mask."""
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
    with pytest.raises(ValueError, match="call start"):
        decoder.draft()


def test_the_decoder_says_when_it_is_full() -> None:
    target = tiny_target()
    batch = random_batch(target, 1)
    decoder = tiny_parallel(target).decoder(8)
    decoder.start(batch["input_ids"][0, :9], batch["features"][0, :9])
    with pytest.raises(ValueError, match="max_length_tokens=8"):
        decoder.draft()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_no_leak(backend: str) -> None:
    """Another token u (and its feature) changes no group before u; the feature at u none before u+1."""
    target = tiny_target()
    drafter = tiny_parallel(target, attention=backend, num_layers=2)
    batch = random_batch(target)
    ids, features, u = batch["input_ids"], batch["features"], 6
    changed_ids, changed_features = ids.clone(), features.clone()
    changed_ids[:, u] = (changed_ids[:, u] + 1) % VOCABULARY
    changed_features[:, u] += 1.0
    with torch.no_grad():
        before = drafter.group_hidden(ids, features)
        token_changed = drafter.group_hidden(changed_ids, features)
        feature_changed = drafter.group_hidden(ids, changed_features)
    assert torch.equal(before[:, :, :u], token_changed[:, :, :u])
    assert torch.equal(before[:, :, : u + 1], feature_changed[:, :, : u + 1])
    assert (before[:, :, u:] != token_changed[:, :, u:]).any(-1).all()
    assert (before[:, :, u + 1 :] != feature_changed[:, :, u + 1 :]).any(-1).all()


def test_a_later_mask_changes_no_earlier_one() -> None:
    target = tiny_target()
    drafter = tiny_parallel(target)
    batch = random_batch(target)
    with torch.no_grad():
        before = drafter.group_hidden(batch["input_ids"], batch["features"])
        drafter.masks[1] += 1.0
        after = drafter.group_hidden(batch["input_ids"], batch["features"])
    assert torch.equal(before[:, :2], after[:, :2])
    assert (before[:, 2:] != after[:, 2:]).any(-1).all()


@pytest.mark.parametrize("inputs", ["both", "embedding"])
def test_backends_agree_on_the_loss_and_its_gradients(inputs: str) -> None:
    target = tiny_target().double()
    drafter = tiny_parallel(target, inputs=inputs)
    batch = random_batch(target)
    results = []
    for backend in CPU_BACKENDS:
        drafter.config.attention = backend
        drafter.zero_grad()
        output = drafter(**batch)
        output.loss.backward()
        results.append([output.loss.detach(), *(parameter.grad for parameter in drafter.parameters())])
    torch.testing.assert_close(results[0], results[1], atol=1e-9, rtol=1e-9)


def test_the_loss_is_the_weighted_mean_cross_entropy() -> None:
    """The chunked loss with its hand-made gradient = plain cross entropy over all logits."""
    target = tiny_target()
    drafter = tiny_parallel(target, depth_weights=[1.0, 2.0, 0.5, 0.25])
    batch = random_batch(target)
    output = drafter(**batch)
    output.loss.backward()
    gradients = [parameter.grad.clone() for parameter in drafter.parameters() if parameter.grad is not None]
    drafter.zero_grad()
    logits = drafter.group_logits(batch["input_ids"], batch["features"])
    labels = depth_labels(batch["input_ids"], batch["loss_mask"], MASKS + 1)
    expected = torch.zeros(())
    for j, weight in enumerate([1.0, 2.0, 0.5, 0.25]):
        loss = torch.nn.functional.cross_entropy(logits[:, j].flatten(0, 1), labels[:, j].flatten())
        expected = expected + weight / 3.75 * loss
        valid = labels[:, j] != -100
        assert output.depth_count[j] == valid.sum()
        assert output.depth_correct[j] == (logits[:, j].argmax(-1) == labels[:, j])[valid].sum()
        torch.testing.assert_close(output.depth_loss_sum[j] / valid.sum(), loss.detach())
    torch.testing.assert_close(output.loss, expected)
    expected.backward()
    torch.testing.assert_close(gradients, [p.grad for p in drafter.parameters() if p.grad is not None])


def test_every_feature_layer_is_normalised_by_itself() -> None:
    """A residual stream that is a hundred times larger than the others says neither more nor less."""
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


def test_wrong_kind_lists_the_kinds() -> None:
    with pytest.raises(UserError, match=r"drafter.kind `paralel` does not exist: use one of .*parallel"):
        load_drafter_class("paralel")


def test_another_target_is_refused() -> None:
    drafter = tiny_parallel(tiny_target())
    with pytest.raises(UserError, match="made for a target with vocab_size 61"):
        drafter.attach(tiny_target(vocab_size=70))


def test_no_drafter_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no trained drafter"):
        load_drafter(tmp_path, tiny_target())
