"""Every shipped recipe builds: its drafter on a small target of its architecture, training arguments, trees."""

import re
from pathlib import Path

import pytest
import torch
from support.places import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from draftsmith.cli.stages import _check_comparable, joint_recipe
from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.tokens.rows import tokenize_rows
from draftsmith.eval.methods.drafter import tree_builder
from draftsmith.models.base.registry import drafter_kinds, load_drafter_class
from draftsmith.models.decoding.decoders import StepwiseDecoder
from draftsmith.models.target.loading import EMBEDDED_TARGET
from draftsmith.recipes.loading import load_compared, load_recipe
from draftsmith.train.drafter.training_arguments import training_arguments

RECIPES = sorted(file.stem for file in (ROOT / "recipes").glob("*.yaml") if file.stem != "target")
SMOLLM2 = "smollm2-135m"
KINDS = [kind for kind in drafter_kinds() if kind != "parallel"]
# Layers and vocabulary of the real target if a recipe depends on them; these are enough for the others.
SIZES, FEW = {SMOLLM2: (30, 49_152), "qwen2.5-coder": (28, 151_936)}, (8, 40)


def small_target(model_type: str, num_layers: int, vocabulary: int, mlp_width: int) -> PreTrainedModel:
    config = AutoConfig.for_model(
        model_type,
        vocab_size=vocabulary, hidden_size=32, intermediate_size=mlp_width, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize(("name", "kind"), [*((name, None) for name in RECIPES), *((SMOLLM2, k) for k in KINDS)])
def test_recipe_builds(name: str, kind: str | None, tmp_path: Path) -> None:
    """A kind as an override takes its own options, and is in the names of the run and of its methods."""
    recipe = load_recipe(name, [] if kind is None else [f"drafter.kind={kind}"])
    assert recipe.name == (name if kind is None else f"{name}-{kind}")
    assert kind is None or all(method.name.startswith(f"{kind}-") for method in recipe.eval.methods)
    arguments = training_arguments(recipe.train, tmp_path, recipe.seed, use_cpu=True)
    assert arguments.learning_rate == recipe.train["learning_rate"]
    layers, vocabulary = next((sizes for start, sizes in SIZES.items() if name.startswith(start)), FEW)
    vocabulary = max(vocabulary, recipe.drafter.options.get("draft_vocab_size") or 0)
    mlp_width = recipe.drafter.options.get("intermediate_size") or 48
    target = small_target("qwen3" if name.startswith("qwen3") else "llama", layers, vocabulary, mlp_width)
    drafter = load_drafter_class(recipe.drafter.kind).from_target(target, recipe.drafter.options)
    decoder = drafter.decoder(16)
    features = torch.zeros(3, 32 * len(drafter.feature_layers))
    decoder.start(torch.tensor([1, 2, 3]), features)
    decoder.observe(torch.tensor([4]), features[-1:])
    stepwise = isinstance(decoder, StepwiseDecoder)
    drafted = decoder.begin() if stepwise else decoder.draft()
    columns = recipe.drafter.options.get("draft_vocab_size") or vocabulary
    assert drafted.shape == (1 if stepwise else drafter.config.num_depths, columns)
    trees = [tree_builder(method) for method in recipe.eval.methods]
    assert len(trees) == len(recipe.eval.methods) >= 1


def test_smollm2_table_covers_every_kind_and_shares_one_dataset() -> None:
    """`compare` distils once for recipes with equal target, data and seed, and measures them together."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^(KINDS :=.* {kind}\b|\w+ := drafter\.kind={kind} )", makefile, re.M) for kind in KINDS)
    recipes, _ = load_compared([SMOLLM2, f"{SMOLLM2}-two_stage", *(f"{SMOLLM2} drafter.kind={kind}" for kind in KINDS)])
    assert len({recipe.model_dump_json(include={"seed", "target", "data"}) for recipe in recipes}) == 1
    joint = joint_recipe(recipes, "table")
    _check_comparable(recipes, "table")
    assert len({method.name for method in joint.eval.methods}) == len(joint.eval.methods)
    assert not any("/" in method.name for method in joint.eval.methods)  # no name is used twice


def test_vicuna_template_equals_fastchat_and_masks_answers() -> None:
    if not (EMBEDDED_TARGET / "tokenizer.json").exists():
        pytest.skip("needs the embedded tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    tokenizer.chat_template = load_recipe("vicuna-7b-parallel").target.chat_template
    turns = (Turn("user", "One?"), Turn("assistant", "Two."), Turn("user", "Three?"), Turn("assistant", "Four."))
    ((tokenized,), _) = tokenize_rows(tokenizer, Conversation("vicuna", turns), 4096)
    end = tokenizer.eos_token
    text = tokenizer.decode(tokenized.input_ids)
    assert text.endswith(
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        f"detailed, and polite answers to the user's questions. USER: One? ASSISTANT: Two.{end}USER: Three? "
        f"ASSISTANT: Four.{end}"
    )
    assert [tokenizer.decode(ids) for ids in tokenized.answers()] == [f" Two.{end}", f" Four.{end}"]
