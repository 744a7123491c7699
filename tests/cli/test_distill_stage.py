"""`data.distill.model`: a served copy of the target generates the answers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import SMALL_VOCABULARY, recipe_in, save_tokenizer
from transformers import LlamaForCausalLM

from draftsmith.cli.stages import run_distill
from draftsmith.errors import UserError
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe


def write_recipe(folder: Path, name: str, **distill: Any) -> Recipe:
    prompts = folder / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"w{number} w{number + 1}"}]} for number in range(4, 24)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = {"max_new_tokens": 1, "cut_answers": "keep", **distill}
    data = {"conversations": {"source": str(prompts), "decontaminate": []}, "distill": answers}
    return recipe_in(folder, name, data=data)


def first_tokens(recipe: Recipe) -> dict[str, int]:
    run_distill(recipe)
    shards = RunFolder(recipe).data.glob("shards/*.jsonl")
    lines = [json.loads(line) for shard in shards for line in shard.read_text().splitlines()]
    return {line["messages"][0]["content"]: line["answer_ids"][0][0] for line in lines}


def test_copy_of_the_target_generates_the_answers(target_folder: Path, tmp_path: Path) -> None:
    """Its head is shifted: it generates the token id after the target's."""
    copy = tmp_path / "copy"
    shutil.copytree(target_folder, copy)
    model = LlamaForCausalLM.from_pretrained(copy)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.roll(1, 0))
    model.save_pretrained(copy)
    own = first_tokens(write_recipe(tmp_path, "own"))
    recipe = write_recipe(tmp_path, "copied", model=str(copy))
    found = first_tokens(recipe)
    both = own.keys() & found.keys()  # an answer of an end token alone is dropped
    assert {key: found[key] for key in both} == {key: own[key] + 1 for key in both}
    assert len({own[key] for key in both}) > 3
    card = (RunFolder(recipe).data / "README.md").read_text()
    assert "every answer was written by `copy`, a copy of `target`, to train drafters for both." in card
    with pytest.raises(UserError, match=r"data\.distill\.model = .*copy', now it is None"):
        run_distill(write_recipe(tmp_path, "copied"))
    switched = "{% if shout %}w9 {% endif %}{% for m in messages %}{{ m.content }} {% endfor %}"
    for each in (target_folder, copy):
        save_tokenizer(each, SMALL_VOCABULARY, switched)
    silent = write_recipe(tmp_path, "silent", model=str(copy))
    silent.target.chat_template_kwargs = {"shout": True}
    assert len(first_tokens(silent)) > 3
    save_tokenizer(copy, SMALL_VOCABULARY - 1)
    with pytest.raises(UserError, match=r"data\.distill\.model .*copy has another tokenizer than target\.model"):
        run_distill(write_recipe(tmp_path, "other", model=str(copy)))
