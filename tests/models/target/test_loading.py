"""The target is frozen, its features feed its LM head, and bad ones are refused in one sentence."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_tokenizers import tiny_tokenizer
from transformers import LlamaConfig

from draftsmith.data.sources.distilled import tokenizer_hashes
from draftsmith.errors import UserError
from draftsmith.models.target import loading as target_module
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import (
    freeze_date,
    load_generation_config,
    load_target,
    load_target_config,
    weights_hash,
    with_variables,
)
from draftsmith.recipes.schema import TargetRecipe

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


def recipe_for(folder: Path, **values: Any) -> TargetRecipe:
    return TargetRecipe(model=str(folder), device="cpu", **values)


def test_loaded_target_is_frozen_and_its_features_feed_the_lm_head(target_folder: Path) -> None:
    target, tokenizer = load_target(recipe_for(target_folder, dtype="float64"))
    assert not target.training
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert tokenizer.chat_template == TEMPLATE
    ids = torch.randint(0, 20, (2, 7))
    features = target_features(target, ids)
    assert features.dtype == torch.float64
    torch.testing.assert_close(target.get_output_embeddings()(features), target(ids).logits)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "./not-there"}, "is not a folder: give a model folder"),
        ({"model": "/nor/is/this"}, "is not a folder: give a model folder"),
        ({"model": "embedded"}, "make target"),
        ({"model": "FOLDER"}, "cannot be loaded"),
        ({"device": "quantum"}, "target.device quantum cannot be used here"),
    ],
)
def test_unusable_target_is_reported(
    values: dict[str, str], message: str, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "EMBEDDED_TARGET", tmp_path)  # no checkpoint
    values = {
        "model": str(target_folder),
        **{key: value.replace("FOLDER", str(tmp_path)) for key, value in values.items()},
    }
    with pytest.raises(UserError, match=message):
        load_target(TargetRecipe(**values))


@pytest.mark.parametrize("ends", ["x", [1, "2"], True, 1.5, -1, 10**9])
def test_end_tokens_must_be_the_targets(ends: Any, target_folder: Path) -> None:
    (target_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(UserError, match=r"generation_config\.json: `eos_token_id` is .* whole numbers from 0 to"):
        load_generation_config(recipe_for(target_folder))


@pytest.mark.parametrize("files", [("adapter_config.json",), ("config.json", "adapter_config.json"), ("config.json",)])
def test_lora_adapter_on_the_hub_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...]
) -> None:
    """With the config of its base too, as some trainers push it; a whole model's config is read."""
    snapshot, revisions = tmp_path / "snapshots" / ("1" * 40), {}
    LlamaConfig(vocab_size=20).save_pretrained(snapshot)
    (snapshot / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')

    def look_up(repo: str, file: str, revision: str | None = None, **_: Any) -> str | None:
        assert repo == "me/mine"
        revisions[file] = revision
        return str(snapshot / file) if file in files else None

    monkeypatch.setattr(target_module, "cached_file", look_up)
    monkeypatch.setattr("transformers.configuration_utils.cached_file", look_up)
    monkeypatch.setattr(target_module, "try_to_load_from_cache", look_up)
    recipe = TargetRecipe(model="me/mine", revision="v2")
    if "adapter_config.json" in files:
        with pytest.raises(UserError, match=r"^target\.model me/mine is a LoRA adapter of Qwen/Qwen3-8B .*merge_and"):
            load_target_config(recipe)
    else:
        assert load_target_config(recipe).vocab_size == 20
        assert weights_hash(recipe) == "1" * 40
    assert revisions == {"config.json": "v2", "adapter_config.json": "1" * 40 if "config.json" in files else "v2"}


def test_folder_of_a_lora_adapter_is_refused(tmp_path: Path) -> None:
    for text, base in (('{"base_model_name_or_path": "Qwen/Qwen3-8B"}', "Qwen/Qwen3-8B"), ("[", "another model")):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(UserError, match=f"^target.model .* is a LoRA adapter of {base} .*merge_and_unload"):
            load_target_config(TargetRecipe(model=str(tmp_path)))


SWITCHED = (
    "{% generation %}{% if enable_thinking is defined and not enable_thinking %}{{ tone }}:{{ rules[1]['a'] }}"
    "{% endif %}{% endgeneration %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_named_templates_all_get_the_variables_and_one_date() -> None:
    """Llama 3.2's and gpt-oss's templates write today's date; a run's prompts have that of its first answers."""
    tokenizer = tiny_tokenizer("")
    dated = "{{ strftime_now('%d %b %Y') }} {{ tone }}"
    tokenizer.chat_template = with_variables(
        {"default": dated, "tool_use": "{{ messages[0].content }}"}, {"tone": "dry"}
    )
    freeze_date(tokenizer, date(2026, 3, 1))
    assert tokenizer.chat_template["default"].endswith("{{ '01 Mar 2026' }} {{ tone }}")
    assert all("set tone = 'dry'" in template for template in tokenizer.chat_template.values())
    assert tokenizer.template_date == date(2026, 3, 1)
    of_march = tokenizer_hashes(tokenizer)
    tokenizer.chat_template = tokenizer.undated_chat_template
    freeze_date(tokenizer, date(2026, 3, 2))
    assert tokenizer_hashes(tokenizer) == of_march
    computed = "{% set f = '%-d %B' %}{{ strftime_now(f + ' %Y') }}"
    for text in (computed, "{{ strftime_now('%-d' ~ ' %B %Y') }}", "{% set f = strftime_now %}{{ f('%-d %B %Y') }}"):
        tokenizer.chat_template = "{% if strftime_now is defined %}" + text + "{% endif %}"
        freeze_date(tokenizer, date(2026, 3, 2))
        assert tokenizer.apply_chat_template([{"role": "user"}], tokenize=False) == "2 March 2026"
    tokenizer.chat_template = "{{ messages[0].content }}"
    freeze_date(tokenizer, date(2026, 3, 2))
    assert tokenizer.template_date is None


def test_chat_template_variables_reach_every_rendering(target_folder: Path) -> None:
    """They are set for every caller that renders the template, with values of every JSON type."""
    values = {"enable_thinking": False, "tone": 'a "quoted" é 😀', "rules": [None, {"a": 1.5}]}
    _, tokenizer = load_target(recipe_for(target_folder, chat_template=SWITCHED, chat_template_kwargs=values))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == 'a "quoted" é 😀:1.5hi'
    _, plain = load_target(recipe_for(target_folder, chat_template=SWITCHED))
    assert plain.apply_chat_template(messages, tokenize=False) == "hi"
    asked = plain.apply_chat_template(messages, tokenize=False, **values)
    assert asked == tokenizer.apply_chat_template(messages, tokenize=False)
    with pytest.raises(UserError, match="reads no variable enable_think: did you mean `enable_thinking`"):
        load_target(recipe_for(target_folder, chat_template=SWITCHED, chat_template_kwargs={"enable_think": False}))
