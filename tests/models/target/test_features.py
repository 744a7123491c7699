"""Features of any layers are the target's hidden states, and unneeded layers do not run."""

import copy

import pytest
import torch
from support.tiny_models import VOCABULARY, tiny_target
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.models.kernels.cpu_kernels import pack_linears
from draftsmith.models.kernels.cpu_library import has_kernels
from draftsmith.models.target.features import FINAL_FEATURES, FeatureTap, decoder_layers, target_features

LAYERS = 3


def tiny_model(model_type: str) -> PreTrainedModel:
    return tiny_target(model_type, num_hidden_layers=LAYERS, num_key_value_heads=4)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "qwen3"])
def test_features_are_the_hidden_states(model_type: str) -> None:
    target = tiny_model(model_type)
    ids = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(0))
    states = target(ids, output_hidden_states=True).hidden_states
    # transformers' last hidden state is after the norm; the residual stream before it is not in its list.
    asked = (2, 0, FINAL_FEATURES, 1)
    expected = torch.cat([states[2], states[0], states[LAYERS], states[1]], dim=-1)
    assert torch.equal(target_features(target, ids, layers=asked), expected)
    assert torch.equal(target_features(target, ids), states[LAYERS])


def test_features_of_the_last_layer_before_the_norm() -> None:
    target = tiny_model("llama")
    ids = torch.arange(5)[None]
    before_norm = target_features(target, ids, layers=(LAYERS,))
    assert torch.equal(target.base_model.norm(before_norm), target_features(target, ids))


def test_only_needed_layers_run_and_no_hook_stays() -> None:
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


def test_layer_that_does_not_exist_is_reported() -> None:
    target = tiny_model("llama")
    with pytest.raises(UserError, match="layers 0 to 3"):
        FeatureTap(target, (FINAL_FEATURES, 4))
    assert not target.base_model._forward_hooks


DOCUMENTS = (7, 12, 1, 5)


ONE_CALL = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
KERNELS = pytest.mark.skipif(not has_kernels(), reason="no C++ compiler")


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layers", [(1,), (0, 2, FINAL_FEATURES)], ids=str)
def test_packed_target_reads_each_document_by_the_kernels(layers: tuple[int, ...], dtype: torch.dtype) -> None:
    """They are as exact as the model's, and the same to the bit alone, in a padded batch and in packed documents."""
    target = tiny_target(num_hidden_layers=LAYERS, max_position_embeddings=512, **ONE_CALL).to(dtype)
    lengths = (*DOCUMENTS, 300)  # the last one in two calls
    parts = [torch.randint(3, VOCABULARY, (length,)) for length in lengths]
    plain, exact = (
        torch.cat([target_features(model, part[None], layers=layers)[0] for part in parts])
        for model in (target, copy.deepcopy(target).double())
    )
    pack_linears(target)
    forwards = list[int]()
    target.base_model.register_forward_pre_hook(lambda *_: forwards.append(1))
    alone = torch.cat([target_features(target, part[None], layers=layers)[0] for part in parts])
    ids_bs, mask_bs = pad_sequence(parts, batch_first=True), pad_sequence([torch.ones_like(p) for p in parts], True)
    padded = target_features(target, ids_bs, mask_bs, None, layers)
    positions = torch.cat([torch.arange(length) for length in lengths])
    in_one_row = target_features(target, torch.cat(parts)[None], None, positions[None], layers)[0]
    nothing = target_features(target, ids_bs[:1], torch.zeros_like(ids_bs[:1]), None, layers)
    assert not forwards
    assert alone.dtype == dtype
    assert (alone - exact).norm() <= 1.2 * (plain - exact).norm()  # it rounds as the model does, elsewhere
    assert torch.equal(padded[mask_bs.bool()], alone)
    assert torch.equal(in_one_row, alone)
    assert not padded[mask_bs == 0].any()
    assert nothing.shape == (1, 300, plain.shape[1])
    assert not nothing.any()
    with torch.autocast("cpu", torch.bfloat16):  # which the kernels do not know
        target_features(target, ids_bs[:1], None, None, layers)
    assert forwards == [1]


@KERNELS
def test_packed_target_with_a_window_runs_its_own_forward() -> None:
    target = tiny_target("mistral", sliding_window=6, **ONE_CALL)
    ids = torch.randint(3, VOCABULARY, (1, 9))
    plain = target_features(target, ids)
    pack_linears(target)
    assert torch.equal(target_features(target, ids), plain)
