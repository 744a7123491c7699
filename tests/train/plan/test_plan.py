"""`draftsmith plan`: its figures are those of real steps, of hand counts, or the exact sums that it says they are."""

import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from support.tiny_runs import make_recipe, recipe_file, recipe_in
from support.tiny_tokenizers import CHATML, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, Qwen3MoeConfig
from typer.testing import CliRunner

from draftsmith.data.distill.token_dataset import tokens_hash
from draftsmith.data.sources.questions import load_questions
from draftsmith.eval.commands import cli
from draftsmith.eval.commands.stages import run_train
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.loading import load_target
from draftsmith.models.weights import is_out_of_memory
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import DataRecipe, Recipe
from draftsmith.train.drafter import stage
from draftsmith.train.drafter.optimizer import muon_parameters
from draftsmith.train.drafter.trainer import DrafterTrainer, collate_right_padded
from draftsmith.train.drafter.training_arguments import training_arguments
from draftsmith.train.features.cache import open_features
from draftsmith.train.features.write import project_features, write_features
from draftsmith.train.plan.fake_step import FakeTraining, StepCost
from draftsmith.train.plan.out_of_memory import out_of_memory_explained
from draftsmith.train.plan.plan import (
    SCALING_FILE,
    Line,
    PlanOptions,
    SetUp,
    make_plan,
    training_data,
    ways_out,
    what_more_data_is_worth,
)
from draftsmith.train.processes.frozen_target import sync_models


def llama_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    }  # fmt: skip
    return LlamaConfig(**{**values, **changes})


def recipe_of(tmp_path: Path, config: PreTrainedConfig | None = None, **sections: Any) -> Recipe:
    """A recipe for a target of which only the config exists."""
    (config or llama_config()).save_pretrained(tmp_path / "target")
    train = {"per_device_train_batch_size": 2, "save_strategy": "no", "max_steps": 2, **sections.pop("train", {})}
    data = {"max_length_tokens": 32, **sections.pop("data", {})}
    return recipe_in(tmp_path, "planned", train=train, data=data, **sections)


def training_row(length: int, labelled: int) -> dict[str, list[int]]:
    return {"input_ids": [3 + i % 500 for i in range(length)], "loss_mask": [0] * (length - labelled) + [1] * labelled}


def predicted_step(recipe: Recipe, row: dict[str, list[int]]) -> StepCost:
    args = training_arguments(recipe.train, Path("unused"), 0, use_cpu=True)
    return FakeTraining(recipe, args).step(collate_right_padded([row] * args.per_device_train_batch_size))


def measured_peak_bytes(recipe: Recipe, config: LlamaConfig, row: dict[str, list[int]], folder: Path) -> int:
    """Of the real Trainer with real weights: what torch's allocator gave out at most, and the weights themselves."""
    args = training_arguments(recipe.train, folder, 0, use_cpu=True)
    rows = datasets.Dataset.from_list([row] * (4 * args.per_device_train_batch_size * args.gradient_accumulation_steps))
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    drafter = load_drafter_class(recipe.drafter.kind).from_target(target, recipe.drafter.options)
    drafter.prepare(rows)
    return traced_peak_bytes(DrafterTrainer(drafter, target, args, rows))


def traced_peak_bytes(trainer: DrafterTrainer) -> int:
    target, drafter = trainer._target, trainer._drafter
    weights = {*target.parameters(), *drafter.parameters(), *drafter.buffers()}
    gc.collect()  # what an earlier test left would be freed in between, and counted as if it had been of this one
    with torch.profiler.profile(profile_memory=True) as profile:
        trainer.train()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now_bytes = peak_bytes = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, now_bytes)
    assert peak_bytes > 0
    return peak_bytes + sum(weight.numel() * weight.element_size() for weight in weights)


# ---- memory ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "train"),
    [
        ("eagle3", {}, {}),  # with a teacher
        ("medusa2", {"warmup_steps": 0}, {}),  # its most expensive step at once
        ("parallel", {"attention": "dense", "markov_rank": 64}, {}),
        ("parallel", {"loss": "lk_lambda", "draft_vocab_size": 500}, {"gradient_accumulation_steps": 2}),
        ("parallel", {"num_layers": 2}, {"bf16": True}),
    ],
)
def test_drafters_are_planned_as_they_are_trained(
    tmp_path: Path, kind: str, options: dict[str, Any], train: dict[str, Any]
) -> None:
    config = llama_config()
    recipe = recipe_of(tmp_path, config, drafter={"kind": kind, "options": options}, train=train)
    row = training_row(96, 64)
    predicted = predicted_step(recipe, row).peak[1].peak_bytes
    assert predicted == pytest.approx(measured_peak_bytes(recipe, config, row, tmp_path), rel=0.05)


@pytest.mark.slow
def test_training_from_disk_is_planned_as_it_is_trained(tmp_path: Path) -> None:
    """No layers of the target; all batches of a step at once. The CPU also holds the batch after them."""
    accumulation = 3
    config, row, offline = llama_config(num_hidden_layers=8), training_row(96, 64), {"features": {"source": "offline"}}
    recipe = recipe_of(
        tmp_path, config, data={"max_length_tokens": 96, **offline}, train={"gradient_accumulation_steps": accumulation}
    )  # fmt: skip
    tokens = datasets.Dataset.from_list([row] * (4 * 2 * accumulation))
    tokens.save_to_disk(str(RunFolder(recipe).data / "tokens"))
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "target")
    write_features(recipe, project_features(recipe), progress=False)
    predicted = predicted_step(recipe, row).peak[1]
    batch_bytes = 2 * 96 * 64 * 2
    assert predicted.at_peak_bytes["target"] < 3 * 512 * 64 * 4  # embedding, LM head, norm
    assert predicted.at_peak_bytes["features"] >= accumulation * batch_bytes
    target, _ = load_target(recipe.target)
    drafter = load_drafter_class("parallel").from_target(target, recipe.drafter.options)
    cache = open_features(recipe, tokens_hash(tokens), drafter)
    sync_models(recipe, target, drafter, torch.device("cpu"))
    args = training_arguments(recipe.train, tmp_path, 0, use_cpu=True)
    measured = traced_peak_bytes(DrafterTrainer(drafter, target, args, tokens, cache))
    assert predicted.peak_bytes + batch_bytes == pytest.approx(measured, rel=0.05)
    (line,) = make_plan(recipe, PlanOptions(peak_tflops=1.0)).disk
    assert line.amount == project_features(recipe).total_bytes
    assert "are free on that disk" in line.how


def test_memory_adds_up_and_labels_cost(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    plan = make_plan(recipe, PlanOptions(peak_tflops=1.0))
    *parts, total = plan.memory
    assert sum(line.amount for line in parts) == total.amount == plan.peak_bytes == max(plan.phase_peak_bytes.values())
    amounts = {line.what: line.amount for line in parts}
    trained = amount(plan.parameters, "trainable parameters")
    # AdamW in fp32: weights, two moments and a step count for each tensor.
    assert amounts["drafter weights"] == 4 * trained
    assert 0 <= amounts["optimiser state"] - 8 * trained <= 4 * 100
    muon = recipe.model_copy(update={"train": {**recipe.train, "optimizer": "muon"}})
    drafter = FakeTraining(muon, training_arguments(muon.train, tmp_path, 0, use_cpu=True)).drafter
    matrices = sum(drafter.get_parameter(name).numel() for name in muon_parameters(drafter))
    saved = amounts["optimiser state"] - amount(make_plan(muon, PlanOptions(peak_tflops=1.0)).memory, "optimiser state")
    assert 0 <= saved - 4 * matrices <= 4 * 100  # one moment of each matrix, and its step count
    fewer = make_plan(recipe, PlanOptions(peak_tflops=1.0, labelled_share=0.25))
    assert fewer.peak_bytes < plan.peak_bytes
    assert amount(fewer.flops_per_token, "LM head") < 0.3 * amount(plan.flops_per_token, "LM head")
    assert amount(fewer.flops_per_token, "target forward") == amount(plan.flops_per_token, "target forward")


def amount(lines: list[Line], what: str) -> float:
    (found,) = (line.amount for line in lines if line.what == what)
    return found


# ---- FLOPs ----


def test_flops_by_hand(tmp_path: Path) -> None:
    """2 rows of 32 tokens, the last 16 labelled; K=2, so 16 + 15 + 14 labels a row; D=64, V=512, MLP 160, 4 layers.

    Present rows of the drafter: real tokens up to the last group with a label, t = 0..30, and 15 + 14 masks.
    """
    cost = predicted_step(recipe_of(tmp_path), training_row(32, 16))
    linear = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160
    causal_attention = 2 * (4 * 16) * 32 * 32 * 2 // 2
    flops = cost.flops()
    assert flops["target forward"] == 4 * 2 * (2 * 32 * linear + causal_attention)
    assert flops["LM head"] == 2 * (2 * 64 * 512) * 2 * (16 + 15 + 14)
    fusion = 2 * (2 * 64) * 64 * 31 * 2
    rows = 31 + 15 + 14
    # The attention core runs on the full grid of 3 streams; it also has the products within a group.
    own_group = flops["drafter forward"] - fusion - 2 * 2 * rows * linear - 3 * 2 * causal_attention
    assert 0 <= own_group < 0.05 * flops["drafter forward"]
    assert cost.tokens == 64
    half = predicted_step(recipe_of(tmp_path, train={"bf16": True}), training_row(32, 16))
    assert half.flops()["LM head"] == flops["LM head"]  # though the head is cast then


def test_flops_of_the_experts_that_a_token_takes(tmp_path: Path) -> None:
    """2 of 8, 40 wide, and a router; Llama's layer, 160 wide, in the drafter."""
    config = llama_config().to_dict() | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    cost = predicted_step(recipe_of(tmp_path, Qwen3MoeConfig(**config)), training_row(32, 16))
    linear = 64 * 64 * 2 + 64 * 32 * 2 + 2 * 3 * 64 * 40 + 64 * 8
    causal_attention = 2 * (4 * 16) * 32 * 32 * 2 // 2
    assert cost.flops()["target forward"] == 4 * 2 * (2 * 32 * linear + causal_attention)
    dense = predicted_step(recipe_of(tmp_path), training_row(32, 16))
    assert cost.flops()["drafter forward"] == dense.flops()["drafter forward"]


# ---- sizes ----


def test_llama3_8b_without_its_weights(tmp_path: Path) -> None:
    """Published: 8,030,261,248. A layer 2D^2 + 2D*1024 + 3D*14336 + 2D; the fusion 2D^2 with three norms."""
    config = llama_config(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    train = {"per_device_train_batch_size": 1, "bf16": True}
    recipe = recipe_of(tmp_path, config, target={"dtype": "bfloat16"}, train=train)
    distilling = {"engine": "vllm", "max_new_tokens": 500, "options": {"concurrency": 20}}
    recipe.data = DataRecipe.model_validate({"conversations": {"limit": 2000}, "distill": distilling})
    recipe.eval.max_new_tokens, recipe.eval.limit_per_category, recipe.eval.runs = 100, 1, 2
    plan = make_plan(recipe, PlanOptions(memory_gib=80, peak_tflops=300.0, memory_gb_per_s=3000.0))
    size = 4096
    layer = 2 * size**2 + 2 * size * 1024 + 3 * size * 14336 + 2 * size
    assert amount(plan.parameters, "target parameters") == 8_030_261_248
    assert amount(plan.parameters, "trainable parameters") == layer + 2 * size**2 + 3 * size + 2 * size
    assert amount(plan.memory, "target weights") == pytest.approx(2 * 8_030_261_248, rel=1e-6)  # and RoPE's angles
    assert plan.verdict is not None
    assert plan.verdict.fits
    # A step reads all weights but the embedding's table once, 5.0 ms at 3 TB/s: longer than 20 rows' products take.
    step_s = 2 * (8_030_261_248 - 128256 * size) / 3e12
    assert amount(plan.stages, "distilling") == pytest.approx(2000 * 500 / 20 * step_s, rel=0.01)
    turns = sum(len(question.turns) for question in load_questions(recipe.eval.questions, limit_per_category=1))
    methods = 1 + len(recipe.eval.methods)
    assert amount(plan.stages, "measuring") == pytest.approx(turns * 100 * 2 * methods * step_s, rel=0.05)
    recipe.data.distill.options = {"concurrency": 4000}  # then products are: 2 FLOPs for each of the weights
    wide = make_plan(recipe, PlanOptions(peak_tflops=300.0, memory_gb_per_s=3000.0, utilisation=0.5)).stages
    products_s = 2 * (8_030_261_248 - 128256 * size) / 150e12
    assert amount(wide, "distilling") == pytest.approx(2000 * 500 * products_s, rel=0.1)  # attention on top


def test_published_runs_stand_beside_the_plan(tmp_path: Path) -> None:
    config = llama_config(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    large = recipe_of(tmp_path, config, target={"dtype": "bfloat16"}, drafter={"kind": "eagle3", "options": {}})
    notes = make_plan(large, PlanOptions(peak_tflops=300.0, memory_gb_per_s=3000.0)).notes
    assert any("at 6.6 conversations a second for each of four H100" in note for note in notes)
    small = recipe_of(tmp_path / "small", drafter={"kind": "eagle3", "options": {}})
    assert not any("H100" in note for note in make_plan(small, PlanOptions(peak_tflops=1.0)).notes)


def test_the_feature_cache(tmp_path: Path) -> None:
    """2 bytes x 64 hidden x layers x tokens."""
    recipe = recipe_of(tmp_path, data={"conversations": {"limit": 10}, "max_length_tokens": 32})
    (line,) = make_plan(recipe, PlanOptions(peak_tflops=1.0)).disk
    assert line.amount == 2 * 64 * 10 * 32
    assert "nothing is distilled yet" in line.how
    unknown = recipe_of(tmp_path)
    (line,) = make_plan(unknown, PlanOptions(peak_tflops=1.0)).disk
    assert (line.amount, line.unit) == (2 * 64, "bytes a token")
    save_tokens(recipe, [20, 9, 30])
    with_teacher = recipe.model_copy(deep=True)
    with_teacher.drafter.kind, with_teacher.drafter.options = "eagle3", {"feature_layers": [0, 2]}
    (line,) = make_plan(with_teacher, PlanOptions(peak_tflops=1.0)).disk
    assert line.amount == 2 * 64 * 3 * (20 + 9 + 30)
    assert "are free on that disk; training online needs none of it" in line.how
    with_teacher.drafter.kind, with_teacher.drafter.options = "medusa2", {}
    (line,) = make_plan(with_teacher, PlanOptions(peak_tflops=1.0)).disk
    assert (line.amount, line.how.partition(":")[0]) == (0, "not for drafter.kind medusa2")


def save_tokens(recipe: Recipe, lengths: list[int]) -> None:
    rows = datasets.Dataset.from_list([training_row(length, length // 2) for length in lengths])
    rows.save_to_disk(str(Path(recipe.runs_dir) / recipe.name / "data" / "tokens"))


def test_batches_come_from_the_data(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    save_tokens(recipe, [8, 30, 10, 20, 12, 14, 16, 18])
    data = training_data(recipe, batch_size=2)
    assert data.tokens == 128
    assert data.largest["attention_mask"].sum(1).tolist() == [30, 20]
    assert data.typical["attention_mask"].sum(1).tolist() == [12, 20]  # the 3rd and the 7th by length
    assumed = training_data(recipe, batch_size=2, labelled_share=0.25)
    assert assumed.largest["loss_mask"].sum(1).tolist() == [8, 8]
    assert assumed.tokens == 128


def test_throughput_is_rate_over_flops(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, train={"max_steps": 0, "num_train_epochs": 3})
    save_tokens(recipe, [16, 16])
    plan = make_plan(recipe, PlanOptions(peak_tflops=2.0, utilisation=0.25))
    throughput = amount(plan.throughput, "throughput")
    assert throughput == pytest.approx(0.25 * 2e12 / amount(plan.flops_per_token, "all"))
    assert amount(plan.throughput, "training time") == pytest.approx(3 * 32 / throughput)


# ---- out of memory ----

TOO_LARGE = 1 << 50


class OutOfMemory(DrafterTrainer):
    """A real allocation, of a pebibyte, in the third step."""

    held: weakref.ref[Any]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            large = torch.zeros(1 << 10)
            OutOfMemory.held = weakref.ref(large)
            torch.empty(TOO_LARGE, dtype=torch.uint8)
        return super().compute_loss(*args, **kwargs)


@pytest.mark.slow
def test_training_that_runs_out_of_memory(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(target_folder, "large", per_device_train_batch_size=4)
    monkeypatch.setattr(stage, "DrafterTrainer", OutOfMemory)
    with pytest.raises(UserError) as error:
        run_train(recipe)
    sentence = str(error.value)
    assert sentence.startswith("out of memory (")
    assert "train.per_device_train_batch_size=2 train.gradient_accumulation_steps=2 (" in sentence
    printed = capsys.readouterr().err
    plan = make_plan(recipe, PlanOptions(peak_tflops=1.0))
    assert all(line.what in printed for line in plan.memory)
    gc.collect()
    assert OutOfMemory.held() is None  # the failed step's tensors are freed before the plan is made
    first, *others = ways_out(recipe, plan.peak_bytes)
    assert first.lines == {"train.per_device_train_batch_size": 2, "train.gradient_accumulation_steps": 2}
    assert all(way.peak_bytes < plan.peak_bytes for way in others)
    assert {"train.optim"} <= {key for way in others for key in way.lines}
    for share, sentence in ((0.95, "does not fit: .* is the same training in less"), (1e-3, "no single change of")):
        verdict = make_plan(recipe, PlanOptions(memory_gib=share * plan.peak_bytes / 2**30, peak_tflops=1.0)).verdict
        assert verdict is not None
        assert not verdict.fits
        assert re.search(sentence, verdict.sentence)


def test_what_is_out_of_memory(target_folder: Path) -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(TOO_LARGE, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("not enough memory"))
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        out_of_memory_explained(make_recipe(target_folder, "other")),
    ):
        raise RuntimeError("in the middle of a step")


# ---- several processes ----


def set_ups_of(recipe: Recipe, processes: int) -> dict[tuple[str, str], SetUp]:
    plan = make_plan(recipe, PlanOptions(peak_tflops=1.0, processes=processes))
    return {(each.launch, each.target): each for each in plan.set_ups}


def test_what_each_process_holds_by_hand(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    training = FakeTraining(recipe, training_arguments(recipe.train, tmp_path, seed=0, use_cpu=True))
    alone = make_plan(recipe, PlanOptions(peak_tflops=1.0)).peak_bytes
    trained = 4 * sum(p.numel() for p in training.trained)
    layer = 4 * sum(p.numel() for p in training.target.base_model.layers[0].parameters())
    size = {key: each.bytes or 0 for key, each in set_ups_of(recipe, 4).items()}
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
    found = set_ups_of(recipe_of(tmp_path, drafter={"kind": "medusa2", "options": {}}), 2)
    assert found["DDP", "replicated"].bytes is not None
    assert found["DDP", "offline"].bytes is None
    assert "LoRA is inside the target" in (found["FSDP2", "replicated"].why_not or "")
    assert "own layers" in (found["DDP", "sharded"].why_not or "")


# ---- what more data is worth ----


def test_what_more_data_is_worth(tmp_path: Path) -> None:
    recipe, file = recipe_of(tmp_path), tmp_path / "data_scaling.json"
    fit = {
        "tau_per_doubling": 0.1, "tau_per_doubling_error": 0.004, "residual": 0.02, "least_tokens": 10,
        "most_tokens": 14,
    }  # fmt: skip
    file.write_text(json.dumps({"figures": {"target": "Small", "trees": {"parallel": fit}}}))
    sentence = (
        "each doubling of the answer tokens changed the tree's tau by +0.10 ± 0.00 between 10 and 14 (measured on "
        "Small with parallel, points 0.02 off the line; your target may differ)"
    )
    assert what_more_data_is_worth(recipe, file) == f"more data: {sentence}"
    save_tokens(recipe, [20, 10])
    assert what_more_data_is_worth(recipe, file) == (
        f"more data: there are 15 answer tokens; {sentence}; that is more than was measured, so what more are worth is "
        "not known"
    )
    assert what_more_data_is_worth(recipe_of(tmp_path, drafter={"kind": "hydra", "options": {}}), file) is None
    file.write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        what_more_data_is_worth(recipe, file)
    assert what_more_data_is_worth(recipe, SCALING_FILE) is not None


# ---- the command ----


def test_the_command_prints_and_writes_the_plan(tmp_path: Path) -> None:
    options = ["drafter.options.attention=flex", "--memory-gib=1", "--processes=2", f"--json={tmp_path}/p.json"]
    result = CliRunner().invoke(cli.app, ["plan", recipe_file(recipe_of(tmp_path)), *options])
    assert result.exit_code == 0, result.output
    assert "fits: " in result.stdout
    assert "flex is planned as folded" in result.stdout
    assert "Memory of each of 2 processes" in result.stdout
    written = json.loads((tmp_path / "p.json").read_text())
    assert written["peak_bytes"] == sum(line["amount"] for line in written["memory"][:-1])
    assert written["throughput"][0]["amount"] > 0
    assert "measured on this cpu" in written["throughput"][0]["how"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory-gib", "0"], "option --memory-gib must be above 0, not 0"),
        (["--labelled-share", "1.5"], "option --labelled-share must be above 0 and at most 1, not 1.5"),
        (["drafter.options.num_mask=3"], "did you mean `num_masks`?"),
        (["train.optim=apollo_adamw"], "key `train.optim`: "),
        (["train.gradient_checkpointing=true"], "train.gradient_checkpointing"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["plan", recipe_file(recipe_of(tmp_path)), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
