"""A run of a tiny target with recipe, target and tokens in one folder; and interrupted training."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import VOCABULARY, tiny_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.loading import load_target
from draftsmith.models.weights import weights_sha256
from draftsmith.recipes.run_folder import TRAINING_FILE, RunFolder
from draftsmith.recipes.schema import Recipe

TARGET_LAYERS = 4  # enough for features of a low, a middle and a high layer
LENGTHS = (12, 14, 9, 13, 11, 16, 10, 15)
SMALL_VOCABULARY = 40  # of the target in `target_folder`


def save_tokenizer(
    folder: Path, vocabulary: int, template: str | None = "{% for m in messages %}{{ m.content }} {% endfor %}"
) -> None:
    """Save a tokenizer of the words w0 (padding), w1, w2 (the end), ..."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    tokenizer.chat_template = template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)


def save_target(folder: Path, **changes: Any) -> Path:
    """Save a model and a tokenizer with a chat template."""
    tiny_target(num_hidden_layers=TARGET_LAYERS, **changes).save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY)
    return folder


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    """Return the folder of a smaller target of a single layer."""
    return save_small_target(tmp_path / "target")


def save_small_target(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SMALL_VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, SMALL_VOCABULARY)
    return folder


def token_rows(lengths: tuple[int, ...] = LENGTHS) -> datasets.Dataset:
    """Return rows that count upwards, the last two thirds labelled."""
    rows = []
    for number, length in enumerate(lengths):
        ids = [3 + (7 * number + place) % 50 for place in range(length)]
        rows.append({"input_ids": ids, "loss_mask": [0] * (length // 3) + [1] * (length - length // 3)})
    return datasets.Dataset.from_list(rows)


def recipe_in(folder: Path, name: str = "run", **sections: Any) -> Recipe:
    """Return a recipe for the target in `folder/target`, which is not created; `sections` override its values."""
    values: dict[str, Any] = {
        "name": name,
        "runs_dir": str(folder / "runs"),
        "target": {"model": str(folder / "target"), "dtype": "float32", "device": "cpu"},
        "drafter": {"kind": "parallel", "options": {"num_masks": 2}},
        "train": {
            "per_device_train_batch_size": 3, "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 2,
            "save_steps": 2, "disable_tqdm": True,
        },
    }  # fmt: skip
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes} if isinstance(changes, dict) else changes
    return Recipe.model_validate(values)


def untrained_run(folder: Path, **evaluation: Any) -> Recipe:
    """Return a recipe for the embedded target with an untrained drafter, which changes no answer."""
    recipe = recipe_in(folder, target={"model": "embedded", "dtype": "float32"}, eval=evaluation)
    torch.manual_seed(0)
    drafter = load_drafter_class("parallel").from_target(load_target(recipe.target)[0], {"num_masks": 2})
    drafter.save_pretrained(RunFolder(recipe).drafter)
    return recipe


def save_trained(recipe: Recipe, drafter: Drafter) -> dict[str, str]:
    """Save a drafter as that of the run's finished training; return the hashes of its weights."""
    folder = RunFolder(recipe).drafter
    drafter.save_pretrained(folder)
    hashes = weights_sha256(folder)
    (folder / TRAINING_FILE).write_text(json.dumps({"steps": 1, "history": [], "weights_sha256": hashes}))
    return hashes


def recipe_file(recipe: Recipe) -> str:
    """Write the recipe to a file for the command line."""
    file = Path(recipe.runs_dir).parent / f"{recipe.name}.yaml"
    file.write_text(recipe.model_dump_json())  # JSON is YAML
    return str(file)


def tiny_run(folder: Path, name: str = "run", **sections: Any) -> Recipe:
    """Return a recipe whose target and tokens are on disk; missing ones are created."""
    options = {"num_masks": 2, "feature_layers": [1, 3, -1]}
    recipe = recipe_in(folder, name, **{"drafter": {"options": options}, **sections})
    if not (folder / "target").exists():
        save_target(folder / "target")
    tokens = RunFolder(recipe).data / "tokens"
    if not tokens.exists():
        token_rows().save_to_disk(str(tokens))
    return recipe


def make_recipe(target_folder: Path, name: str, **train: Any) -> Recipe:
    """Return a recipe whose tokens are on disk: 12 rows that count upwards, so that a drafter can learn."""
    recipe = recipe_in(target_folder.parent, name, train=train)
    rows = [{"input_ids": [3 + (s + i) % 30 for i in range(12 + s % 3)]} for s in range(12)]
    for row in rows:
        row["loss_mask"] = [0] * 4 + [1] * (len(row["input_ids"]) - 4)
    datasets.Dataset.from_list(rows).save_to_disk(str(RunFolder(recipe).data / "tokens"))
    return recipe


class InterruptAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def train_until(callback: TrainerCallback, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> KeyboardInterrupt:
    """Train with a callback that interrupts; return the exception."""
    from draftsmith.train.drafter import stage

    class Interrupted(stage.DrafterTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, callbacks=[callback], **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "DrafterTrainer", Interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            stage.train_drafter(recipe)
    return caught.value


def weights_of(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Return the tensors of the trained drafter's file."""
    return load_file(RunFolder(recipe).drafter / "model.safetensors")


def have_equal_weights(first: Recipe, second: Recipe) -> bool:
    """Return whether two runs have bitwise equal weights."""
    expected, found = weights_of(first), weights_of(second)
    return expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


def history_of(recipe: Recipe) -> list[dict[str, float]]:
    """Return the training's log."""
    return json.loads((RunFolder(recipe).drafter / "training.json").read_text())["history"]
