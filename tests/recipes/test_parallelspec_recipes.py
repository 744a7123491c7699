"""Recipes of ParallelSpec's paper (arXiv 2410.05589) have its parameters and trees, and table 2's overrides.

They follow section 5.1, table 2 and figure 6.
"""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.train.features.write import models_without_weights

MEDUSA, EAGLE = "vicuna-7b-medusa_parallel", "vicuna-7b-eagle_parallel"
# Hidden size, intermediate size and layers of Llama 7B and 13B, whose head size is 128.
SIZES = {"7B": (4096, 11008, 32), "13B": (5120, 13824, 40)}


def count_parameters(recipe: Recipe) -> int:
    """Count the trained parameters, which needs only the target's config."""
    _, drafter = models_without_weights(recipe)
    return sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)


def recipe_of_size(name: str, size: str, tmp_path: Path) -> Recipe:
    hidden, inner, layers = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128, vocab_size=32_000, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    return load_recipe(name, [f"target.model={tmp_path}"])


@pytest.mark.parametrize(("size", "millions"), [("7B", 202), ("13B", 317)])
def test_medusa_flavour_has_the_papers_parameters(size: str, millions: int, tmp_path: Path) -> None:
    """Section 5.1: 202M for 7B models, 317M for 13B. A layer with two norms, a final norm and four masks."""
    hidden, inner, _ = SIZES[size]
    found = count_parameters(recipe_of_size(MEDUSA, size, tmp_path))
    assert found == 4 * hidden**2 + 3 * hidden * inner + (2 + 1 + 4) * hidden
    assert found // 10**6 == millions


def test_eagle_flavour_has_one_more_projection(tmp_path: Path) -> None:
    """EAGLE's layer has one norm and no final norm; a mask is an embedding and a feature."""
    hidden, inner, _ = SIZES["7B"]
    found = count_parameters(recipe_of_size(EAGLE, "7B", tmp_path))
    assert found == 4 * hidden**2 + 3 * hidden * inner + 2 * hidden**2 + hidden + 4 * 2 * hidden
    assert round(found / 1e6, 1) == 236.0


def test_trees_are_those_of_the_baselines() -> None:
    """Each level has the nodes of EAGLE's and Medusa's code; both flavours are equal."""
    trees = {method.name: method.paths or [] for method in load_recipe(MEDUSA).eval.methods}
    levels = {name: [sum(len(path) == depth for path in tree) for depth in range(1, 6)] for name, tree in trees.items()}
    assert levels == {
        "tree_of_25": [4, 8, 8, 3, 2],
        "tree_of_63": [10, 28, 23, 2, 0],
    }
    assert load_recipe(EAGLE).eval == load_recipe(MEDUSA).eval
