"""A run whose tokens are on disk, for a target of four tiny layers that is on disk too."""

from pathlib import Path
from typing import Any

import datasets
from support.tiny_models import VOCABULARY, tiny_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

TARGET_LAYERS = 4  # enough for features of a low, a middle and a high layer
LENGTHS = (12, 14, 9, 13, 11, 16, 10, 15)


def save_target(folder: Path, **changes: Any) -> Path:
    """A model and a tokenizer with a chat template."""
    tiny_target(num_hidden_layers=TARGET_LAYERS, **changes).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def token_rows(lengths: tuple[int, ...] = LENGTHS) -> datasets.Dataset:
    """Rows that count upwards, the last two thirds labelled."""
    rows = []
    for number, length in enumerate(lengths):
        ids = [3 + (7 * number + place) % 50 for place in range(length)]
        rows.append({"input_ids": ids, "loss_mask": [0] * (length // 3) + [1] * (length - length // 3)})
    return datasets.Dataset.from_list(rows)


def tiny_run(folder: Path, name: str = "run", **sections: Any) -> Recipe:
    """A recipe in this folder; its target and tokens are made if they are not there."""
    values: dict[str, Any] = {
        "name": name,
        "runs_dir": str(folder / "runs"),
        "target": {"model": str(folder / "target"), "dtype": "float32", "device": "cpu"},
        "drafter": {"kind": "parallel", "options": {"num_masks": 2, "feature_layers": [1, 3, -1]}},
        "train": {
            "per_device_train_batch_size": 3, "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 2,
            "save_steps": 2, "disable_tqdm": True,
        },
    }  # fmt: skip
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    recipe = Recipe.model_validate(values)
    if not (folder / "target").exists():
        save_target(folder / "target")
    tokens = RunFolder(recipe).data / "tokens"
    if not tokens.exists():
        token_rows().save_to_disk(str(tokens))
    return recipe
