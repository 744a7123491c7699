"""Recipes of large targets on tiny checkpoints of the same architecture: answers, training, figures, an export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_tokenizers as templates
from support.tiny_models import EXPERTS
from support.tiny_tokenizers import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.cli.stages import run_distill, run_eval, run_train
from draftsmith.models.formats.exporting import export_run
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

THINKING = templates.CHATML.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
)
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# Architecture, template, and smaller drafter options for a target of 8 layers and a few hundred tokens.
LARGE: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "llama3.1-8b-eagle3": ("llama", {"rope_parameters": LLAMA3_ROPE}, templates.LLAMA3, ["draft_vocab_size=200"]),
    "qwen3-30b-a3b-dflash": ("qwen3_moe", EXPERTS["qwen3_moe"], THINKING, ["block_size=4", "num_layers=2"]),
}
# As in ParallelSpec's paper, a layout that no engine loads.
PAPER = "vicuna-7b-medusa_parallel"
LONGER = ["data.max_length_tokens=256"]  # for the tokens of Vicuna's system prompt
IN_HALF = ["target.dtype=float16", "train.bf16=true"]  # as in this recipe


def shrink_recipe(
    name: str, folder: Path, model_type: str, changes: dict[str, Any], template: str, further: list[str]
) -> Recipe:
    """Return the recipe for two steps with a tiny checkpoint, eight conversations and one question."""
    tokenizer = tiny_tokenizer(template)
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.3,
    }  # fmt: skip
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**values, **changes}))
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    answer = {"role": "assistant", "content": "Here it is."}
    talk = [
        {"messages": [{"role": "user", "content": f"Say {word} {number}"}, answer]}
        for number in range(4)
        for word in "ab"
    ]
    (folder / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in talk))
    question = {"question_id": 1, "category": "qa", "turns": ["Hello there"]}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")
    return load_recipe(
        name,
        [
            f"runs_dir={folder}", f"target.model={folder / 'target'}", "target.dtype=float32", "target.device=cpu",
            f"data.conversations.source={folder / 'talk.jsonl'}", "data.conversations.file=null",
            "data.conversations.limit=null", "data.conversations.decontaminate=[]",
            "data.max_length_tokens=128", "data.features.source=online", "data.eval_rows_frac=0",
            "train.global_batch_size=4", "train.per_device_train_batch_size=2", "train.max_steps=2", "train.bf16=false",
            f"eval.questions={folder / 'questions.jsonl'}", "eval.max_new_tokens=8", "eval.runs=1",
            "eval.temperatures=[0.0]", "eval.warmup_questions=0", *further,
        ],
    )  # fmt: skip


@pytest.mark.slow
def test_training_on_given_answers_end_to_end(tmp_path: Path) -> None:
    template = load_recipe(PAPER).target.chat_template or ""
    recipe = shrink_recipe(PAPER, tmp_path, "llama", {}, template, [*LONGER, *IN_HALF])
    assert run_distill(recipe)["conversations"]["kept"] == 8
    assert run_train(recipe)["steps"] == 2
    rows = {row["method"]: row for row in run_eval(recipe)}
    trees = [rows[method.name] for method in recipe.eval.methods]
    assert all(row["tau"] >= 1 and row["greedy_identical"] for row in trees)
    (shard,) = (RunFolder(recipe).data / "shards").glob("*.jsonl")
    lines = map(json.loads, shard.read_text().splitlines())
    assert {line["messages"][-1]["content"] for line in lines} == {"Here it is."}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_distillation_to_export_end_to_end(name: str, tmp_path: Path) -> None:
    model_type, changes, template, smaller = LARGE[name]
    own_answers = [
        "data.distill.engine=transformers", "data.distill.options={batch_size: 4}", "data.distill.max_new_tokens=12",
        "data.distill.cut_answers=keep",
    ]  # fmt: skip
    further = [*own_answers, *(f"drafter.options.{line}" for line in smaller)]
    recipe = shrink_recipe(name, tmp_path, model_type, changes, template, further)
    assert run_distill(recipe)["conversations"]["kept"] >= 4
    found = run_train(recipe)
    assert found["steps"] == 2
    (chain, *_) = (row for row in run_eval(recipe) if row["method"].endswith("-chain"))
    assert chain["tau"] >= 1
    exported = export_run(recipe, "vllm", None)
    config = json.loads((exported.folder / "config.json").read_text())
    scaling = config.get("rope_scaling") or {}
    assert scaling.get("rope_type") == ("llama3" if "rope_parameters" in changes else None)
    assert config["model_type"] == ("llama" if model_type == "llama" else "qwen3")
    (shard,) = (RunFolder(recipe).data / "shards").glob("*.jsonl")
    lines = map(json.loads, shard.read_text().splitlines())
    assert all("<think>" not in message["content"] for line in lines for message in line["messages"])
