"""Views of a target's config, text models extracted from wrappers, and attention with all its terms."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import VOCABULARY, tiny_target
from support.tiny_runs import save_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3Config,
    GenerationConfig,
    Mistral3Config,
    PreTrainedConfig,
    PreTrainedModel,
)

from draftsmith.errors import UserError
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.models.base.registry import check_drafter, load_drafter_class
from draftsmith.models.drafters.parallel import ParallelDrafter
from draftsmith.models.groups.layers import build_rotary, layers_config, of_kind
from draftsmith.models.target import text_model
from draftsmith.models.target.features import decoder_layers, target_features
from draftsmith.models.target.loading import load_target, load_target_config, target_without_weights
from draftsmith.models.target.text_model import attention_sentence, running_sentence
from draftsmith.models.target.view import target_values
from draftsmith.recipes.schema import TargetRecipe

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 20, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}


def wrappers() -> dict[str, PreTrainedConfig]:
    text = {**TEXT, "query_pre_attn_scalar": 8}
    pixtral = {**VISION, "model_type": "pixtral", "image_size": 28, "head_dim": 8}
    return {
        "gemma3": Gemma3Config(text_config=text, vision_config={**VISION, "image_size": 28}, mm_tokens_per_image=4),
        "mistral3": Mistral3Config(text_config={**TEXT, "model_type": "mistral"}, vision_config=pixtral),
    }


def save_model(folder: Path, model: PreTrainedModel) -> TargetRecipe:
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    save_tokenizer(folder, 20)
    return TargetRecipe(model=str(folder), device="cpu", dtype="float32")


@pytest.mark.parametrize("name", wrappers())
def test_text_model_of_a_wrapper(name: str, tmp_path: Path) -> None:
    """It has the wrapper's logits and everything that a target needs, without the vision part."""
    torch.manual_seed(0)
    wrapper = AutoModelForImageTextToText.from_config(wrappers()[name]).eval()
    recipe = save_model(tmp_path, wrapper)
    target, _ = load_target(recipe)
    ids = torch.randint(3, 20, (1, 9))
    torch.testing.assert_close(target(input_ids=ids).logits, wrapper(input_ids=ids).logits)
    assert target.config.get_text_config() is target.config
    assert (target.config.name_or_path, target.generation_config.eos_token_id) == (str(tmp_path), 2)
    assert not any("vision" in key for key, _ in target.named_parameters())
    assert len(decoder_layers(target)) == 2
    with torch.device("meta"):
        planned = target_without_weights(recipe)
    shapes = [{key: value.shape for key, value in model.named_parameters()} for model in (target, planned)]
    assert shapes[0] == shapes[1]
    options = {"feature_layers": [0, 1]}
    check_drafter("eagle3", load_target_config(recipe), options)
    drafter = load_drafter_class("eagle3").from_target(target, options)
    assert drafter.config.target_config["model_type"] in ("gemma3_text", "mistral")
    assert drafter.config.target_config["architectures"]
    TargetSession(target, 32).close()


def test_text_model_that_differs_from_the_wrapper_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForImageTextToText.from_config(wrappers()["gemma3"])
    monkeypatch.setattr(text_model, "TOLERANCE_FRAC", -1.0)
    with pytest.raises(UserError, match="gives other logits alone than in its Gemma3ForConditionalGeneration"):
        load_target(save_model(tmp_path, model))


@pytest.mark.parametrize(
    ("model_type", "values", "theta"),
    [
        ("gemma3_text", {"query_pre_attn_scalar": 8, "num_hidden_layers": 6}, 1_000_000),
        ("olmo3", {"num_hidden_layers": 4}, 500_000),
        ("modernbert-decoder", {}, 160_000),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_rope_of_full_attention_layers_is_used(
    model_type: str, values: dict[str, Any], theta: float, kind: str
) -> None:
    """The flattened RoPE of full attention gives cos and sin of the target's own layers."""
    config = AutoConfig.for_model(model_type, **{**TEXT, **values})
    layers = layers_config(of_kind(kind, target_values(config)), 1)
    assert layers.rope_parameters["rope_theta"] == theta
    assert not any(isinstance(value, dict) for value in layers.rope_parameters.values())
    if model_type != "modernbert-decoder":
        target = tiny_target(model_type, **values)
        hidden, positions = torch.zeros(1, 9, 32), torch.arange(9)[None]
        layers = layers_config(of_kind(kind, target_values(target.config)), 1)
        ours = build_rotary(kind, target, layers)(hidden, positions)
        theirs = target.base_model.rotary_emb(hidden, positions, "full_attention")
        torch.testing.assert_close(ours, theirs)


def test_soft_caps_and_sinks_use_eager_attention(tmp_path: Path) -> None:
    """The loaded target has the logits of transformers' eager attention with the cap; scores are far beyond it."""
    torch.manual_seed(0)
    target = tiny_target("gemma2", vocab_size=20, query_pre_attn_scalar=8, attn_logit_softcapping=1.0)
    for layer in target.base_model.layers:
        layer.self_attn.q_proj.weight.mul_(20)
    recipe, ids = save_model(tmp_path, target), torch.randint(3, 20, (1, 9))
    target.set_attn_implementation("eager")
    expected = target(input_ids=ids).logits
    target.set_attn_implementation("sdpa")
    assert (target(input_ids=ids).logits - expected).abs().max() > 1e-3
    loaded, _ = load_target(recipe)
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
    assert attention_sentence(loaded) == "eager, as sdpa would drop a soft cap of its attention's scores"
    with torch.device("meta"):
        assert "eager" in running_sentence(target_without_weights(recipe))


def test_attention_of_other_targets(tmp_path: Path) -> None:
    """It is eager where the class has no sdpa, or on request."""
    target = tiny_target("gpt_oss", vocab_size=20, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    loaded, _ = load_target(save_model(tmp_path / "gpt_oss", target))
    assert running_sentence(loaded) == (
        "attention by eager, as sdpa would drop attention sinks; some layers see a window of 16 tokens"
    )
    recipe = save_model(tmp_path / "llama", tiny_target("llama", vocab_size=20))
    assert running_sentence(load_target(recipe)[0]) == "attention by sdpa; all layers see the whole text"
    eager = recipe.model_copy(update={"attn_implementation": "eager"})
    assert attention_sentence(load_target(eager)[0]) == "eager"


def test_features_of_a_decoder_inside_the_base_model() -> None:
    """OPT's LM head reads its decoder, called without the base model's forward."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = AutoConfig.for_model("opt", vocab_size=VOCABULARY, pad_token_id=0, ffn_dim=48, **sizes)
    target = text_model.AutoModelForCausalLM.from_config(config).double().eval()
    ids = torch.randint(3, VOCABULARY, (1, 9))
    with torch.no_grad():
        torch.testing.assert_close(target.lm_head(target_features(target, ids)), target(input_ids=ids).logits)
    TargetSession(target, 32).close()
    assert ParallelDrafter.from_target(target, {"num_masks": 2}).attached.target is target


def test_alibi_by_cache_columns_is_refused() -> None:
    """MPT's ALiBi counts columns of the cache, but a tree has several nodes at one position."""
    config = AutoConfig.for_model("mpt", vocab_size=VOCABULARY, d_model=32, n_layers=4, n_heads=4, max_seq_len=128)
    target = text_model.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UserError, match=r"ignores 4-D attention masks or position ids.* without ALiBi"):
        TargetSession(target, 32)
