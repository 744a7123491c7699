"""A trained draft model is an ordinary language model, and its drafts are that model's tokens."""

import pytest
import torch
from support.tiny_models import random_batch, tiny_drafter_of, tiny_target

from draftsmith.models.drafters.draft_model import DraftModel, as_causal_lm


@pytest.mark.parametrize(
    ("model_type", "window"), [("llama", None), ("qwen3", None), ("mistral", 6), ("mistral", None)]
)
def test_logits_equal_those_of_the_language_model(model_type: str, window: int | None) -> None:
    """With a window, by transformers' own mask for it; the target's window is not the drafter's."""
    target = tiny_target(model_type, num_hidden_layers=4)
    target.config.sliding_window = 3
    drafter = tiny_drafter_of("draft_model", target, num_layers=2, sliding_window=window)
    assert isinstance(drafter, DraftModel)
    model = as_causal_lm(drafter, target, tied=False)
    if window is not None:
        model.config.sliding_window = window
    ids = random_batch(target)["input_ids"]
    with torch.no_grad():
        ours = drafter.group_logits(ids, torch.zeros(*ids.shape, target.config.hidden_size))[:, 0]
        torch.testing.assert_close(model(ids).logits, ours, atol=1e-5, rtol=1e-5)


def test_draft_model_starts_from_layers_of_the_target() -> None:
    """Two of four layers: the first and the last; one: the first."""
    target = tiny_target(num_hidden_layers=4)
    for num_layers, chosen in ((2, [0, 3]), (3, [0, 2, 3]), (1, [0])):
        drafter = DraftModel.from_target(target, {"num_layers": num_layers})
        for layer, index in zip(drafter.layers, chosen, strict=True):
            source = target.model.layers[index].mlp.up_proj.weight
            assert torch.equal(layer.mlp.up_proj.weight, source)
