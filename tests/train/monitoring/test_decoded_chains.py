"""The decode in training is the loop's: the same rounds for the same prompts. And training does not notice it."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from support.processes import in_processes
from support.tiny_models import tiny_drafter_of, tiny_target
from support.tiny_runs import make_recipe

from draftsmith.eval.decoding.loop import generate
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import DrafterMethod
from draftsmith.eval.trees.builders import tree_builder
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import MethodRecipe, Recipe
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.monitoring.decoded_chains import decoded_chains, first_prompts, greedy_answers

NEW_TOKENS = 24


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("parallel", {"num_masks": 3}),
        ("parallel", {"num_masks": 3, "draft_vocab_size": 40}),
        ("parallel", {"num_masks": 3, "markov_rank": 5}),
        ("medusa", {}),
        ("hydra", {}),
        ("eagle", {"draft_depth": 3}),
        ("draft_model", {"num_layers": 2}),  # the target's own two layers: all is accepted
    ],
)
def test_rounds_are_the_loops(kind: str, options: dict[str, Any]) -> None:
    target = tiny_target().double()
    drafter = tiny_drafter_of(kind, target, **options).double()
    if kind == "draft_model":
        drafter.initialize_from_target(target)
    prompts = [[5, 9, 33, 12, 40, 7], [8], [*range(10, 30)], [44, 45]]
    answers = greedy_answers(drafter, target, [torch.tensor(prompt) for prompt in prompts], NEW_TOKENS)
    chain, greedy, rounds = MethodRecipe(name="x"), Sampling(), []
    with TargetSession(target, 64, drafter.feature_layers) as session:
        for prompt, answer in zip(prompts, answers, strict=True):
            decoder = drafter.decoder(64)
            method = DrafterMethod("x", decoder, tree_builder(chain, decoder), greedy)
            record = generate(session, method, prompt, greedy, NEW_TOKENS, end_ids=[2])
            assert answer.ids_s.tolist() == prompt + record.ids
            tokens, num_rounds = decoded_chains(drafter, [answer])
            assert (tokens, num_rounds) == (len(record.ids) - 1, record.rounds)
            rounds.append(num_rounds)
    assert decoded_chains(drafter, answers)[1] == sum(rounds)
    if kind == "draft_model":
        assert rounds == [-(-(len(a.ids_s) - a.prompt_tokens - 1) // 6) for a in answers]


def test_prompts_end_where_answers_begin() -> None:
    rows = datasets.Dataset.from_dict(
        {"input_ids": [[5, 6, 7, 8, 9], [5, 6], [7, 8]], "loss_mask": [[0, 0, 1, 1, 0], [1, 1], [0, 0]]}
    )
    assert [prompt.tolist() for prompt in first_prompts(rows)] == [[5, 6]]


def with_decodes(target_folder: Path, name: str, **validation: Any) -> Recipe:
    values = make_recipe(target_folder, name, max_steps=6, per_device_train_batch_size=2).model_dump()
    values["data"]["eval_rows_frac"] = 0.4
    values["validation"] = {"decode_new_tokens": 12, **validation}
    return Recipe.model_validate(values)


def decoded(recipe: Recipe) -> dict[int, tuple[float, float]]:
    history = json.loads((RunFolder(recipe).drafter / "training.json").read_text())["history"]
    return {log["step"]: (log["decoded_tau"], log["decoded_tokens"]) for log in history if "decoded_tau" in log}


def test_training_does_not_notice(target_folder: Path) -> None:
    """The same weights with and without; in two processes each decodes a part, and the log is of all."""
    with_them, without = with_decodes(target_folder, "with", decode_steps=2), with_decodes(target_folder, "without")
    for recipe in (with_them, without):
        train_drafter(recipe)
    expected, found = (load_file(RunFolder(recipe).drafter / "model.safetensors") for recipe in (without, with_them))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert decoded(without) == {}
    assert decoded(with_them).keys() == {2, 4, 6}
    assert all(tau >= 1 and tokens > 0 for tau, tokens in decoded(with_them).values())
    shared = with_decodes(target_folder, "shared", decode_steps=6)
    in_processes(train_drafter, 2, shared)
    assert decoded(shared)[6][1] == decoded(with_them)[6][1]
