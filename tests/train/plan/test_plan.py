"""`draftsmith plan`: its figures equal those of real steps, counts by hand, or exact sums."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from support.tiny_runs import recipe_file, recipe_in
from support.tiny_tokenizers import CHATML, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig
from typer.testing import CliRunner

from draftsmith.cli import main as cli
from draftsmith.data.sources.questions import load_questions
from draftsmith.errors import UserError
from draftsmith.recipes.schema import DataRecipe, Recipe
from draftsmith.train.drafter.training_arguments import recipe_arguments
from draftsmith.train.plan.estimate import StepCost, step_cost
from draftsmith.train.plan.plan import Line, PlanOptions, make_plan, read_bytes_per_s

GIVEN = PlanOptions(peak_tflops=1.0, memory_gb_per_s=10.0)  # nothing is measured


def llama_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    }  # fmt: skip
    return LlamaConfig(**{**values, **changes})


def build_recipe(tmp_path: Path, config: PreTrainedConfig | None = None, **sections: Any) -> Recipe:
    """Return a recipe whose target has a config and no weights."""
    (config or llama_config()).save_pretrained(tmp_path / "target")
    train = {"per_device_train_batch_size": 2, "save_strategy": "no", "max_steps": 2, **sections.pop("train", {})}
    data = {"max_length_tokens": 32, **sections.pop("data", {})}
    return recipe_in(tmp_path, "planned", train=train, data=data, **sections)


def training_row(length: int, labelled: int) -> dict[str, list[int]]:
    return {"input_ids": [3 + i % 500 for i in range(length)], "loss_mask": [0] * (length - labelled) + [1] * labelled}


def predicted_step(recipe: Recipe, row: dict[str, list[int]]) -> StepCost:
    return step_cost(recipe, recipe_arguments(recipe), len(row["input_ids"]), sum(row["loss_mask"]))


# ---- memory ----


def test_memory_adds_up_and_work_grows_with_labels(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path)
    plan = make_plan(recipe, GIVEN)
    *parts, total = plan.memory
    assert sum(line.amount for line in parts) == total.amount == plan.kept_bytes
    amounts = {line.what: line.amount for line in parts}
    trained = read_amount(plan.parameters, "trainable")
    # AdamW in fp32: weights and two moments.
    assert amounts["drafter"] == 4 * trained
    assert amounts["optimiser"] == 8 * trained
    fewer = predicted_step(recipe, training_row(32, 8))
    more = predicted_step(recipe, training_row(32, 32))
    assert fewer.drafter_flops < 0.5 * more.drafter_flops
    assert fewer.target_flops == more.target_flops


def read_amount(lines: list[Line], what: str) -> float:
    (found,) = (line.amount for line in lines if line.what == what)
    return found


# ---- FLOPs ----


def test_flops_by_hand(tmp_path: Path) -> None:
    """2 rows of 32 tokens, the last 16 labelled; K=2, so 16 + 15 + 14 labels a row; D=64, V=512, MLP 160, 4 layers.

    Active rows of the drafter: real tokens up to the last group with a label, t = 0..30, and 15 + 14 masks.
    """
    cost = predicted_step(build_recipe(tmp_path), training_row(32, 16))
    linear = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160
    assert cost.target_flops == 4 * 2 * (2 * 32 * linear)
    head = 2 * (2 * 64 * 512) * 2 * (16 + 15 + 14)
    rows = 31 + 15 + 14
    # A backward costs two forwards.
    assert cost.drafter_flops == 3 * 2 * 2 * rows * (linear + 2 * 64 * 64) + head
    assert cost.tokens == 64


# ---- sizes ----


def test_llama3_8b_without_its_weights(tmp_path: Path) -> None:
    """Published: 8,030,261,248. A layer 2D^2 + 2D*1024 + 3D*14336 + 2D; the fusion 2D^2 with three norms."""
    config = llama_config(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    train = {"per_device_train_batch_size": 1, "bf16": True}
    recipe = build_recipe(tmp_path, config, target={"dtype": "bfloat16"}, train=train)
    distilling = {"engine": "vllm", "max_new_tokens": 500, "options": {"concurrency": 20}}
    recipe.data = DataRecipe.model_validate({"conversations": {"limit": 2000}, "distill": distilling})
    recipe.eval.max_new_tokens, recipe.eval.limit_per_category, recipe.eval.runs = 100, 1, 2
    plan = make_plan(recipe, PlanOptions(memory_gib=80, peak_tflops=300.0, memory_gb_per_s=3000.0))
    size = 4096
    layer = 2 * size**2 + 2 * size * 1024 + 3 * size * 14336 + 2 * size
    assert read_amount(plan.parameters, "target") == 8_030_261_248
    assert read_amount(plan.parameters, "trainable") == layer + 2 * size**2 + 3 * size + 2 * size
    assert read_amount(plan.memory, "target") == pytest.approx(2 * 8_030_261_248, rel=1e-6)  # and RoPE's frequencies
    assert plan.fits
    # A step reads all weights but the embedding's table once, 5.0 ms at 3 TB/s: longer than 20 rows' products take.
    step_s = 2 * (8_030_261_248 - 128256 * size) / 3e12
    assert read_amount(plan.time, "distilling") == pytest.approx(2000 * 500 / 20 * step_s, rel=0.01)
    turns = sum(len(question.turns) for question in load_questions(recipe.eval.questions, limit_per_category=1))
    methods = 1 + len(recipe.eval.methods)
    assert read_amount(plan.time, "measuring") == pytest.approx(turns * 100 * 2 * methods * step_s, rel=0.05)
    recipe.data.distill.options = {"concurrency": 4000}  # then matrix products dominate: 2 FLOPs per weight
    wide = make_plan(recipe, PlanOptions(peak_tflops=300.0, memory_gb_per_s=3000.0)).time
    products_s = 2 * (8_030_261_248 - 128256 * size) / 120e12
    assert read_amount(wide, "distilling") == pytest.approx(2000 * 500 * products_s, rel=0.1)  # attention on top


def test_size_of_the_feature_cache(tmp_path: Path) -> None:
    """2 bytes x 64 hidden x layers x tokens."""
    recipe = build_recipe(tmp_path, data={"conversations": {"limit": 10}, "max_length_tokens": 32})
    (line,) = make_plan(recipe, GIVEN).disk
    assert line.amount == 2 * 64 * 10 * 32
    assert "nothing is distilled yet" in line.how
    unknown = build_recipe(tmp_path)
    (line,) = make_plan(unknown, GIVEN).disk
    assert (line.amount, line.unit) == (2 * 64, "bytes a token")
    save_tokens(recipe, [20, 9, 30])
    recipe.drafter.kind, recipe.drafter.options = "eagle3", {"feature_layers": [0, 2]}
    (line,) = make_plan(recipe, GIVEN).disk
    assert line.amount == 2 * 64 * 3 * (20 + 9 + 30)
    assert "are free; training online needs none of it" in line.how
    recipe.drafter.kind, recipe.drafter.options = "medusa2", {}
    assert make_plan(recipe, GIVEN).disk == []


def save_tokens(recipe: Recipe, lengths: list[int]) -> None:
    rows = datasets.Dataset.from_list([training_row(length, length // 2) for length in lengths])
    rows.save_to_disk(str(Path(recipe.runs_dir) / recipe.name / "data" / "tokens"))


def test_processes_divide_the_time(tmp_path: Path) -> None:
    """Training is divided by the processes, distillation by one copy of the target per GPU; `eval` takes one."""
    distill = {"engine": "vllm", "options": {"tensor_parallel_size": 2}}
    data = {"conversations": {"limit": 100}, "distill": distill}
    recipe = build_recipe(tmp_path, data=data, train={"max_steps": 0, "num_train_epochs": 3})
    plans = [make_plan(recipe, replace(GIVEN, processes=number)) for number in (1, 8)]
    times = [{line.what: line.amount for line in plan.time if line.unit == "seconds"} for plan in plans]
    assert {stage: times[0][stage] / times[1][stage] for stage in times[0]} == pytest.approx(
        {"training": 8, "distilling": 4, "measuring": 1}
    )


@pytest.mark.slow
def test_measured_step_gives_memory_and_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of a process is more than what is kept; the rate is that of the last step, of 2 rows of 32 tokens."""
    monkeypatch.setattr("draftsmith.train.plan.measure.STEPS", 2)
    recipe = build_recipe(tmp_path)
    LlamaForCausalLM(llama_config()).save_pretrained(tmp_path / "target")
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "target")
    plan = make_plan(recipe, replace(GIVEN, memory_gib=100, measure=True))
    peak, rate = plan.memory[-1], plan.time[0]
    assert peak.amount > plan.kept_bytes
    assert rate.amount > 0
    assert (rate.how, plan.fits) == ("of one process: measured on this cpu", True)
    assert plan.time[1].amount == pytest.approx(2 * 2 * 32 / rate.amount)
    assert not (tmp_path / "runs").exists()
    recipe.data.features.source = "offline"
    with pytest.raises(UserError, match="option --measure runs the target in each step"):
        make_plan(recipe, replace(GIVEN, measure=True))


# ---- the command ----


def test_plan_command_prints_and_writes_the_plan(tmp_path: Path) -> None:
    options = ["drafter.options.attention=dense", "--memory-gib=1", "--memory-gb-per-s=10", "--json"]
    result = CliRunner().invoke(cli.app, ["plan", recipe_file(build_recipe(tmp_path)), *options])
    assert result.exit_code == 0, result.output
    assert "fits: " in result.stderr
    assert "the times are this CPU's: for a GPU give its rates" in " ".join(result.stderr.split())
    written = json.loads(result.stdout)
    assert written["kept_bytes"] == sum(line["amount"] for line in written["memory"][:-1])
    assert written["time"][0]["amount"] > 0
    assert "measured on this cpu" in written["time"][0]["how"]
    assert read_bytes_per_s(torch.device("cpu"), num_bytes=1 << 20) > 1e6
    assert not (tmp_path / "runs").exists()
