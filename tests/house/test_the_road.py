"""The commands of docs/guides/train.md on a tiny Qwen 3: from a copied recipe to a dry run of the push."""

import json
import re
import runpy
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from support.chat_families import FAMILIES
from support.places import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from typer.testing import CliRunner

from draftsmith.errors import UserError
from draftsmith.eval.commands.cli import app
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.loading import load_recipe

PAGE = ROOT / "docs" / "guides" / "train.md"
# Small sizes, in addition to the keys set on the page; the rest is the shipped recipe's.
SMALL: dict[str, Any] = {
    "name": "mine",
    "target": {"model": "target", "dtype": "float32", "device": "cpu"},
    "data": {
        "conversations": {"source": "prompts.jsonl", "limit": None},
        "distill": {"engine": "transformers", "max_new_tokens": 24, "cut_answers": "keep", "options": {}},
        "max_length_tokens": 96,
        "eval_rows_frac": 0.0,
    },
    "drafter": {"options": {"num_layers": 1, "sliding_window": 64, "selector_top_k": 4}},
    "train": {"max_steps": 2, "global_batch_size": 2, "bf16": False, "use_cpu": True, "disable_tqdm": True},
    "eval": {"questions": "questions.jsonl", "max_new_tokens": 12, "runs": 1, "temperatures": [0.0], "compile": False},
}


def guide_commands() -> list[list[str]]:
    """Return the words of the commands in the page's first block."""
    block = re.search(r"## The road\n+```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return [shlex.split(line) for line in block[1].splitlines() if not line.startswith("#")]


def merge(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    parts = {
        key: merge(values.get(key) or {}, each) if isinstance(each, dict) else each for key, each in changes.items()
    }
    return {**values, **parts}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build a folder with the shipped recipes, a tiny Qwen 3, prompts and questions."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    torch.manual_seed(0)
    tokenizer = FAMILIES["Qwen3"].tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    prompts = [json.dumps({"prompt": f"Say {word} twice."}) for word in ("one", "two", "three", "four")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    question = {"question_id": 1, "category": "qa", "turns": ["What is next?"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@torch.no_grad()
def test_lora_adapter_is_merged_by_the_lines_of_the_guide(workplace: Path) -> None:
    from peft import LoraConfig, get_peft_model  # vLLM's environment has no peft, and its tests read this file too

    base = AutoModelForCausalLM.from_pretrained("target")
    ids = torch.arange(12)[None]
    logits = base(ids).logits
    adapted = get_peft_model(base, LoraConfig(init_lora_weights=False, target_modules=["q_proj", "down_proj"]))
    adapted.save_pretrained("my-lora")
    AutoTokenizer.from_pretrained("target").save_pretrained("my-lora")
    with pytest.raises(UserError, match=r"my-lora is a LoRA adapter of target .*train\.md has the lines"):
        load_recipe("quickstart", ["target.model=my-lora"])
    lines = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert lines is not None
    exec(textwrap.dedent(lines[1]), {})
    recipe = load_recipe("quickstart", ["target.model=my-merged", "target.device=cpu", "target.dtype=float32"])
    merged, _ = load_target(recipe.target)
    wanted = adapted(ids).logits
    error, change = (merged(ids).logits - wanted).abs().max(), (logits - wanted).abs().max()
    assert error < 0.1 * change  # bf16 rounds the merged weights


def launch(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the script of an `accelerate launch` command in this process."""
    options = launch_command_parser().parse_args(words)
    assert options.module
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [options.training_script, *options.training_script_args])
        runpy.run_module(options.training_script, run_name="__main__")


@pytest.mark.nightly
def test_commands_of_the_training_guide(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = {}
    for program, *words in guide_commands():
        if program == "cp":
            mine = Path(shutil.copyfile(*words))
            mine.write_text(yaml.safe_dump(merge(yaml.safe_load(mine.read_text()), SMALL)))
        elif program == "accelerate":
            assert words[0] == "launch"
            launch(words[1:], monkeypatch)
        elif program == "draftsmith" and "--engine" not in words:
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, (words, result.output)
            printed[words[0]] = result.output
    assert [*printed] == ["plan", "doctor", "distill", "eval", "export", "push"]
    assert "8 processes" in printed["plan"]
    assert "vLLM, SGLang, llama.cpp can load it" in printed["doctor"]
    run = workplace / "runs" / "mine"
    assert (run / "report.html").is_file()
    (served,) = (line for line in printed["export"].splitlines() if "--speculative-config" in line)
    config = json.loads(shlex.split(served)[-1])
    assert (config["method"], config["num_speculative_tokens"]) == ("dflash", 7)
    assert (Path(config["model"]) / "model.safetensors").is_file()
    assert "Nothing was sent" in printed["push"]
