"""Features of any layers of the target are its own hidden states, and no layer runs that nobody needs."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.models.target.features import FINAL_FEATURES, FeatureTap, decoder_layers, target_features

LAYERS = 3


def tiny_model(model_type: str) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2} if model_type != "gpt_neox" else {}
    if model_type == "gpt2":
        sizes = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4}
    config = AutoConfig.for_model(model_type, vocab_size=61, pad_token_id=0, **sizes)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "qwen3"])
def test_features_are_the_hidden_states(model_type: str) -> None:
    target = tiny_model(model_type)
    ids = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(0))
    states = target(ids, output_hidden_states=True).hidden_states
    # transformers' last hidden state is the normed one; the residual stream before it is not in its list.
    asked = (2, 0, FINAL_FEATURES, 1)
    expected = torch.cat([states[2], states[0], states[LAYERS], states[1]], dim=-1)
    assert torch.equal(target_features(target, ids, layers=asked), expected)
    assert torch.equal(target_features(target, ids), states[LAYERS])


def test_the_last_layer_before_the_norm() -> None:
    target = tiny_model("llama")
    ids = torch.arange(5)[None]
    before_norm = target_features(target, ids, layers=(LAYERS,))
    assert torch.equal(target.base_model.norm(before_norm), target_features(target, ids))


def test_no_layer_too_many_and_no_hook_left() -> None:
    target = tiny_model("llama")
    ran: list[int] = []
    hooks = [
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, layer in enumerate(decoder_layers(target))
    ]
    target_features(target, torch.arange(5)[None], layers=(1, 2))
    assert ran == [0, 1]
    for hook in hooks:
        hook.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.modules())


def test_a_layer_that_does_not_exist() -> None:
    target = tiny_model("llama")
    with pytest.raises(UserError, match="layers 0 to 3"):
        FeatureTap(target, (FINAL_FEATURES, 4))
    assert not target.base_model._forward_hooks
