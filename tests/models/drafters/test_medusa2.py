"""Medusa-2: the LoRA starts without effect, trains by the formulas, is saved with the drafter, and is reported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import random_batch, tiny_drafter_of, tiny_target
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from draftsmith.models.base.registry import load_drafter
from draftsmith.models.drafters.medusa2 import Medusa2Drafter, remove, switched_off
from draftsmith.models.groups.layout import depth_labels

Q_AND_DOWN = ["q_proj", "down_proj"]


def tiny_medusa2(target: PreTrainedModel, **options: Any) -> Any:
    return tiny_drafter_of("medusa2", target, **{"num_heads": 3, "lora_rank": 4, "lora_alpha": 6, **options})


def weights_by_hand(original: PreTrainedModel, lora: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the changed target's weights W + scale * B A (transposed in GPT-2's layers) from a drafter's tensors."""
    weights = dict(original.named_parameters())
    for name in [key.removesuffix(".lora_A.weight") for key in lora if key.endswith(".lora_A.weight")]:
        change = scale * lora[f"{name}.lora_B.weight"] @ lora[f"{name}.lora_A.weight"]
        name = name.removeprefix("lora.") + ".weight"
        weights[name] = weights[name] + (change.T if original.config.model_type == "gpt2" else change)
    return weights


def run_target(target: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return target(ids).logits


# ---- the change of the target ----


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_new_lora_has_no_effect_and_a_trained_one_that_of_its_factors(model_type: str) -> None:
    original, target = tiny_target(model_type), tiny_target(model_type)
    ids = random_batch(target)["input_ids"]
    drafter = Medusa2Drafter.from_target(target, {"lora_rank": 4, "lora_alpha": 6})
    assert torch.equal(run_target(target, ids), run_target(original, ids))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    weights = weights_by_hand(original, dict(drafter.named_parameters()), scale=6 / 4)
    with torch.no_grad():
        expected = functional_call(original, weights, (ids,)).logits
    assert (expected - run_target(original, ids)).abs().max() > 0.1
    torch.testing.assert_close(run_target(target, ids), expected, atol=1e-5, rtol=1e-5)
    with switched_off(target):
        assert torch.equal(run_target(target, ids), run_target(original, ids))
    torch.testing.assert_close(run_target(target, ids), expected, atol=1e-5, rtol=1e-5)
    assert all(parameter.requires_grad for parameter in drafter.parameters())


# ---- the loss ----


@pytest.mark.parametrize("lm_loss", ["kl", "ce"])
def test_loss_and_gradients_equal_a_plain_reference(lm_loss: str) -> None:
    """The reference is L_LM + 0.7 L_heads on a second target with merged weights: no chunks, no hooks."""
    original, target = tiny_target().double(), tiny_target().double()
    drafter = tiny_medusa2(target, lm_loss=lm_loss, heads_weight=0.7, depth_weights=0.5)
    drafter.double()
    batch = random_batch(target, drafter=drafter)
    assert batch["features"].requires_grad
    assert ("teacher_features" in batch) == (lm_loss == "kl")
    output = drafter(**batch)
    output.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    assert all(parameter.grad is None for parameter in target.parameters())
    drafter.zero_grad()

    parameters = dict(drafter.named_parameters())
    weights = weights_by_hand(original, parameters, scale=6 / 4)
    ids = batch["input_ids"]
    changed = functional_call(original, weights, (ids,), {"output_hidden_states": True})
    features, log_q = changed.hidden_states[-1], changed.logits.log_softmax(-1)
    log_p = original(ids).logits.log_softmax(-1)
    labels = depth_labels(ids, batch["loss_mask"], 3)
    predicted = labels[:, 0] != -100
    if lm_loss == "kl":
        expected = (log_p.exp() * (log_p - log_q)).sum(-1)[predicted].mean()
    else:
        expected = -log_q.gather(-1, labels[:, :1].movedim(1, 2).clamp_min(0)).squeeze(-1)[predicted].mean()
    for j, weight in enumerate((4 / 7, 2 / 7, 1 / 7)):
        inner = features @ parameters[f"blocks.{j}.layers.0.weight"].T + parameters[f"blocks.{j}.layers.0.bias"]
        logits = (features + torch.nn.functional.silu(inner)) @ parameters[f"lm_heads.{j}.weight"].T
        cross_entropy = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, j, 1:].flatten())
        expected = expected + 0.7 * weight * cross_entropy
    torch.testing.assert_close(output.loss, expected, atol=1e-6, rtol=1e-6)  # row weights are fp32
    expected.backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-6, msg=name)
        assert parameter.grad.abs().max() > 1e-5, name


def test_only_the_heads_are_trained_in_the_warm_up() -> None:
    target = tiny_target()
    drafter = tiny_medusa2(target, warmup_steps=5)
    drafter.training_step = 4
    assert (drafter.trains_target, drafter.needs_teacher) == (False, False)
    batch = random_batch(target, drafter=drafter)
    assert set(batch) == {"input_ids", "features", "loss_mask"}
    assert not batch["features"].requires_grad
    output = drafter(**batch)
    output.loss.backward()
    for name, parameter in drafter.named_parameters():
        assert (parameter.grad is None) == name.startswith("lora."), name
    drafter.training_step = 5
    assert (drafter.trains_target, drafter.needs_teacher) == (True, True)
    batch = random_batch(target, drafter=drafter)
    assert batch["features"].requires_grad
    with torch.no_grad():  # in evaluation
        assert not random_batch(target, drafter=drafter)["features"].requires_grad
    behind = drafter(**batch)
    assert behind.loss > output.loss  # by the KL, since the heads' part is the same
    torch.testing.assert_close(behind.depth_loss_sum, output.depth_loss_sum)


# ---- loading ----


def test_repeated_loading_merges_the_lora_once(tmp_path: Path) -> None:
    original, target = tiny_target(), tiny_target()
    ids = random_batch(target)["input_ids"]
    for name, options in (("first", {"lora_targets": Q_AND_DOWN}), ("second", {"lora_rank": 2})):
        tiny_medusa2(tiny_target(), **options).save_pretrained(tmp_path / name)
    expected = {}
    for name, scale in (("first", 6 / 4), ("second", 6 / 2)):
        weights = weights_by_hand(original, load_file(tmp_path / name / "model.safetensors"), scale)
        with torch.no_grad():
            expected[name] = functional_call(original, weights, (ids,)).logits
    for name in ("first", "first", "second", "first"):
        drafter = load_drafter(tmp_path / name, target)
        torch.testing.assert_close(run_target(target, ids), expected[name], atol=1e-5, rtol=1e-5)
        assert not any(layer._forward_hooks for layer in target.modules())  # decoding costs nothing more
        assert not any(parameter.requires_grad for parameter in [*drafter.parameters(), *target.parameters()])
    name = "model.layers.0.self_attn.q_proj.weight"
    merged = weights_by_hand(original, load_file(tmp_path / "first" / "model.safetensors"), 6 / 4)[name]
    torch.testing.assert_close(target.get_parameter(name), merged)
    remove(target)
    assert [name for name, _ in target.named_parameters()] == [name for name, _ in original.named_parameters()]
    torch.testing.assert_close(run_target(target, ids), run_target(original, ids), atol=1e-5, rtol=1e-5)
