"""PaSS against transformers' forward of the target over embeddings with the look-ahead ones last."""

import pytest
import torch
from support.tiny_models import LENGTH, VOCABULARY, random_batch, tiny_drafter_of, tiny_target
from torch import Tensor
from transformers import PreTrainedModel

LOOK_AHEAD = 3


def run_over_embeddings(target: PreTrainedModel, ids: Tensor, masks: Tensor) -> Tensor:
    """Return logits [T+1, V] of the paper's figure: the target reads all tokens, then the look-ahead embeddings."""
    inputs = torch.cat([target.get_input_embeddings()(ids), masks.to(target.dtype)])
    return target(inputs_embeds=inputs.unsqueeze(0)).logits[0, len(ids) - 1 :]


@pytest.mark.parametrize("model_type", ["llama", "gemma", "phi3"])
def test_draft_equals_the_targets_forward(model_type: str) -> None:
    """Depth 1 is the target's next-token logits, others its logits at the embeddings, in training and decoding."""
    target = tiny_target(model_type, num_hidden_layers=3).double()
    drafter = tiny_drafter_of("pass_embeddings", target, num_masks=LOOK_AHEAD)
    batch = random_batch(target, 1, drafter=drafter)
    ids, features = batch["input_ids"][0], batch["features"][0]
    with torch.no_grad():
        own_logits = target(batch["input_ids"]).logits[0]
        training = drafter.group_logits(batch["input_ids"], batch["features"])[0]
    decoder, end = drafter.decoder(LENGTH), 3
    decoder.start(ids[:end], features[:end])
    for size in (1, 1, 3, 2):
        decoder.observe(ids[end : end + size], features[end - 1 : end + size - 1])
        end += size
        draft = decoder.draft()
        with torch.no_grad():
            expected = run_over_embeddings(target, ids[:end], drafter.masks)
        assert draft.shape == (LOOK_AHEAD + 1, VOCABULARY)
        torch.testing.assert_close(draft[0], own_logits[end - 1].float(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(draft, expected.float(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(training[:, end - 1], expected, atol=1e-6, rtol=1e-6)


def test_layers_are_shared_with_the_target() -> None:
    """No weight is copied, so later changes of the target apply to both."""
    target = tiny_target()
    drafter = tiny_drafter_of("pass_embeddings", target, num_masks=LOOK_AHEAD)
    theirs = dict(target.base_model.layers.named_parameters())
    ours = dict(drafter.layers.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in theirs)
    drafter.train()
    assert not drafter.layers.training
    target.double()
    assert next(drafter.layers.parameters()).dtype == torch.float64
