"""What each of several processes holds: sums by hand on a tiny target, and the table of docs/guides/scaling.md."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT
from support.tiny_runs import recipe_in
from transformers import LlamaConfig, Qwen3Config

from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.training_arguments import training_arguments
from draftsmith.train.plan.plan import PlanOptions, make_plan
from draftsmith.train.plan.set_ups import SetUp
from draftsmith.train.plan.step_cost import FakeTraining
from draftsmith.train.plan.table import set_up_cell

PAGE = ROOT / "docs" / "guides" / "scaling.md"
# Public shapes: Llama 3 8B and 70B, Qwen3 32B.
SHAPES: dict[str, Any] = {
    "8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, dtype="bfloat16",
    ),
    "32B": Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, dtype="bfloat16", tie_word_embeddings=False,
    ),
    "70B": LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192, dtype="bfloat16",
    ),
}  # fmt: skip


def planned(recipe: Recipe, processes: int, **options: Any) -> dict[tuple[str, str], SetUp]:
    plan = make_plan(recipe, PlanOptions(peak_tflops=1.0, processes=processes, **options))
    return {(each.launch, each.target): each for each in plan.set_ups}


def tiny(tmp_path: Path, kind: str = "parallel", **train: Any) -> Recipe:
    LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0,
    ).save_pretrained(tmp_path / "target")  # fmt: skip
    train = {"per_device_train_batch_size": 2, "max_steps": 2, **train}
    return recipe_in(tmp_path, drafter={"kind": kind, "options": {}}, train=train, data={"max_length_tokens": 32})


def test_by_hand(tmp_path: Path) -> None:
    recipe = tiny(tmp_path)
    found = planned(recipe, 4)
    args = training_arguments(recipe.train, tmp_path, seed=0, use_cpu=True)
    training = FakeTraining(recipe, args)
    alone = make_plan(recipe, PlanOptions(peak_tflops=1.0)).peak_bytes
    trained = 4 * sum(p.numel() for p in training.trained)
    layer = 4 * sum(p.numel() for p in training.target.base_model.layers[0].parameters())
    size = {key: each.bytes or 0 for key, each in found.items()}
    assert size["DDP", "replicated"] == alone + trained  # the buckets
    # Of four layers one stays; the peak is not in the target's forward, where another is whole.
    assert size["DDP", "replicated"] - size["DDP", "sharded"] == 3 * layer
    # ZeRO-1 keeps a quarter of AdamW's state and of fp32 copies, in place of the whole state and buckets.
    adamw = 2 * trained + 4 * len(training.trained)  # two moments, and a count of steps for each tensor
    assert size["DDP", "replicated"] - size["ZeRO-1", "replicated"] == trained + adamw * 3 // 4 - trained // 4
    assert size["ZeRO-1", "sharded"] == size["ZeRO-1", "replicated"] - 3 * layer
    assert size["DDP", "offline"] < size["DDP", "sharded"]
    assert size["DDP", "nf4"] < size["DDP", "int8"] < size["DDP", "replicated"]


def test_what_cannot_be_done_has_a_reason(tmp_path: Path) -> None:
    found = planned(tiny(tmp_path, "medusa2"), 2)
    assert found["DDP", "replicated"].bytes is not None
    assert "LoRA lies inside the target" in (found["FSDP2", "replicated"].why_not or "")
    assert "own layers" in (found["DDP", "sharded"].why_not or "")
    assert set_up_cell(found["DDP", "offline"], None) == "-"


def test_parts_need_whole_weights(tmp_path: Path) -> None:
    recipe = tiny(tmp_path, "parallel")
    recipe.drafter.options |= {"in_parts": True, "num_masks": 1}
    found = planned(recipe, 2)
    for (launch, placement), each in found.items():
        refused = launch in ("FSDP2", "ZeRO-3")
        assert (each.bytes is None) == refused, (launch, placement)
        assert not refused or (each.why_not or "").startswith(
            "`drafter.options.in_parts` has a drafter's weights whole only"
        )


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_table_of_the_page(tmp_path: Path, shape: str) -> None:
    """Every figure of it, from the config alone."""
    SHAPES[shape].save_pretrained(tmp_path / "target")
    target = {"model": str(tmp_path / "target"), "device": "cpu"}
    recipe = load_recipe("llama3-8b-parallel", [f"target.{key}={value}" for key, value in target.items()])
    found = planned(recipe, 8, labelled_share=0.6)
    rows = re.findall(rf"^\| {shape} \| ([\w-]+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [launch for launch, _ in rows] == list(dict.fromkeys(launch for launch, _ in found))
    for launch, cells in rows:
        expected = [set_up_cell(each, 80) for (name, _), each in found.items() if name == launch]
        assert cells.split(" | ") == expected
