"""A tiny target and its tokens on disk, for tests that run the train stage."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from draftsmith.recipes.schema import Recipe

VOCABULARY = 40


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def make_recipe(target_folder: Path, name: str, **train: Any) -> Recipe:
    """A recipe whose tokens are on disk: 12 rows that count upwards, so that a drafter can learn something."""
    recipe = Recipe.model_validate(
        {
            "name": name,
            "runs_dir": str(target_folder.parent / "runs"),
            "target": {"model": str(target_folder), "dtype": "float32", "device": "cpu"},
            "drafter": {"kind": "parallel", "options": {"num_masks": 2}},
            "train": {
                "per_device_train_batch_size": 3, "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 2,
                "save_steps": 2, "disable_tqdm": True, **train,
            },
        }
    )  # fmt: skip
    rows = [{"input_ids": [3 + (s + i) % 30 for i in range(12 + s % 3)]} for s in range(12)]
    for row in rows:
        row["loss_mask"] = [0] * 4 + [1] * (len(row["input_ids"]) - 4)
    folder = Path(recipe.runs_dir) / name / "data" / "tokens"
    datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    return recipe


def drafter_folder(recipe: Recipe) -> Path:
    return Path(recipe.runs_dir) / recipe.name / "drafter"


class InterruptAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt
