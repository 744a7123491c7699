"""Hydra's prefix attention against transformers' own model.

The heads are compared with the paper's, head by head, in `formats/test_import.py`.
"""

import pytest
import torch
from support.tiny_models import random_batch, tiny_drafter_of, tiny_target

from draftsmith.models.groups.layout import Groups, active


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_prefix_attention_is_one_layer_of_the_target_over_its_features(model_type: str) -> None:
    """The reference is transformers' one-layer model with h_{-1} = 0, h_0, h_1, ... as embeddings."""
    target = tiny_target(model_type)
    drafter = tiny_drafter_of("hydra", target, num_heads=3, prefix_attention=True)
    batch = random_batch(target)
    reference = tiny_target(model_type, num_hidden_layers=1).base_model
    reference.layers[0].load_state_dict(drafter.prefix.layer.state_dict())
    reference.norm.load_state_dict(drafter.prefix.norm.state_dict())
    previous = torch.cat([torch.zeros(2, 1, 32), batch["features"][:, :-1]], dim=1)
    with torch.no_grad():
        expected = reference(inputs_embeds=previous).last_hidden_state
        labels = batch["input_ids"][:, None]
        groups = Groups.of(batch["input_ids"], labels, active(labels))
        states, _ = drafter.hidden_states(groups, batch["features"]).chunk(2, dim=-1)
    torch.testing.assert_close(states.view(expected.shape), expected, atol=1e-5, rtol=1e-5)
