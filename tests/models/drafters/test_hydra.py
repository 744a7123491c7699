"""Hydra's prefix attention against transformers' own model, and its trees against their paths.

The heads are compared with the paper's, head by head, in `formats/test_import.py`.
"""

from typing import Any

import pytest
import torch
from support.tiny_models import LENGTH, random_batch, tiny_drafter_of, tiny_target
from transformers import PreTrainedModel

from draftsmith.models.drafters.hydra import HydraDrafter
from draftsmith.models.groups.layout import Groups, active

HEADS, HIDDEN = 3, 32


def hydra(target: PreTrainedModel, **options: Any) -> HydraDrafter:
    drafter = tiny_drafter_of("hydra", target, **{"num_heads": HEADS, **options})
    assert isinstance(drafter, HydraDrafter)
    return drafter


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_prefix_attention_is_one_layer_of_the_target_over_its_features(model_type: str) -> None:
    """The reference is transformers' one-layer model with h_{-1} = 0, h_0, h_1, ... as embeddings."""
    target = tiny_target(model_type)
    drafter = hydra(target, prefix_attention=True)
    assert drafter.prefix is not None
    batch = random_batch(target)
    reference = tiny_target(model_type, num_hidden_layers=1).base_model
    reference.layers[0].load_state_dict(drafter.prefix.layer.state_dict())
    reference.norm.load_state_dict(drafter.prefix.norm.state_dict())
    previous = torch.cat([torch.zeros(2, 1, HIDDEN), batch["features"][:, :-1]], dim=1)
    with torch.no_grad():
        expected = reference(inputs_embeds=previous).last_hidden_state
        labels = batch["input_ids"][:, None]
        groups = Groups.of(batch["input_ids"], labels, active(labels))
        states, _ = drafter.hidden_states(groups, batch["features"]).chunk(2, dim=-1)
    torch.testing.assert_close(states.view(expected.shape), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix_attention", [False, True])
def test_tree_equals_its_paths(prefix_attention: bool) -> None:
    """Every node's logits are those of its path alone, independent of calls and order of nodes."""
    target = tiny_target()
    drafter = hydra(target, prefix_attention=prefix_attention)
    batch = random_batch(target, 1)
    ids, features = batch["input_ids"][0], batch["features"][0]
    decoder = drafter.decoder(LENGTH)
    decoder.start(ids[:5], features[:5])
    decoder.observe(ids[5:6], features[4:5])
    decoder.begin()
    # Nodes 1, 2, 3 below the root; 4 below 2; then in one call 5 below 1 and 6 below the root.
    grown = [*decoder.expand([7, 8, 9], [0, 0, 0]), *decoder.expand([10], [2]), *decoder.expand([11, 12], [1, 0])]
    paths = [[7], [8], [9], [8, 10], [7, 11], [12]]
    for logits, path in zip(grown, paths, strict=True):
        # Training on the path as a text gives the same.
        text = torch.cat([ids[:6], torch.tensor(path)]).unsqueeze(0)
        padded = torch.cat([features[:6], torch.zeros(len(path), HIDDEN)]).unsqueeze(0)
        with torch.no_grad():
            expected = drafter.group_logits(text, padded)[0, len(path), 5]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(grown[3], grown[4], atol=1e-2)
