"""Held-out rows: their selection, the reported figures, and that evaluation does not affect training."""

from pathlib import Path

import datasets
import pytest
import torch
from support.tiny_runs import have_equal_weights, history_of, make_recipe, token_rows

from draftsmith.data.distill.token_dataset import tokens_hash
from draftsmith.errors import UserError
from draftsmith.models.loss import DrafterOutput
from draftsmith.train.drafter.rows import (
    ROWS_COLUMN,
    PackedRows,
    heldout_metrics,
    heldout_sums,
    replayed_chains,
    split_rows,
)
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.drafter.trainer import Progress


def test_replayed_chains_by_hand() -> None:
    """Tokens 0-1 are the prompt, 2-7 the answer. From 2 one draft is right: 3 and 4; from 4 two: 5, 6 and 7.

    Chains of one draft token: 2 -> 3, 4; 4 -> 5, 6; 6 -> 7, where the draft is wrong. The group at 3 is never used.
    """
    correct_bgs = torch.zeros(1, 2, 8, dtype=torch.bool)
    correct_bgs[0, 0, [2, 3, 4]] = True
    correct_bgs[0, 1, [3, 4, 5]] = True  # at 5 the first depth is wrong: nothing is accepted
    mask_bs = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    assert replayed_chains(correct_bgs, mask_bs) == [[5.0, 5.0], [3.0, 2.0]]
    two_answers = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1]])
    assert replayed_chains(torch.zeros_like(correct_bgs), two_answers) == [[3.0, 3.0], [3.0, 3.0]]


def test_figures_are_summed_over_batches() -> None:
    """The head has two of four labels: a cross entropy of 4 nats is one of 2 on average."""
    outputs = [
        DrafterOutput(
            loss=torch.tensor(loss), depth_loss_sum=torch.tensor([4.0, 0.0]), depth_correct=torch.tensor([correct, 0]),
            depth_count=torch.tensor([4, 0]), depth_count_in_head=torch.tensor([2, 0]),
            correct_bgs=torch.zeros(1, 2, 4, dtype=torch.bool),
        )
        for loss, correct in ((1.0, 2.0), (3.0, 1.0))
    ]  # fmt: skip
    progress = Progress()
    for output in outputs:
        progress.add(4, output.loss.item(), output.depth_sums)
    progress.unlogged_steps = 8
    logs = progress.take_log()
    assert (logs["loss"], logs["loss_depth1"], logs["accuracy_depth1"]) == (0.5, 2.0, 0.375)
    assert not {"loss_depth2", "accuracy_depth2"} & logs.keys()
    sums = [heldout_sums(output, torch.tensor([[0, 1, 1, 1]])) for output in outputs]
    assert heldout_metrics(sums[0] + sums[1]) == {
        "eval_loss": 2.0, "eval_loss_depth1": 2.0, "eval_accuracy_depth1": 0.375, "eval_tau_depth1": 1.0,
        "eval_tau_depth2": 1.0,
    }  # fmt: skip


def test_held_out_rows_are_chosen_by_content() -> None:
    """Adding data does not change the side of a row, and packed rows keep their numbers."""
    few, many = token_rows(), token_rows((*range(9, 60), 12, 14))
    _, kept = split_rows(few, 0.4)
    _, kept_of_many = split_rows(many, 0.4)
    assert kept is not None
    assert kept_of_many is not None
    known = {tuple(row) for row in many["input_ids"]}
    expected = {tuple(row) for row in kept["input_ids"]} & known
    assert expected <= {tuple(row) for row in kept_of_many["input_ids"]}
    train, kept = split_rows(many, 0.4)
    assert kept is not None
    assert sorted(number for part in (train, kept) for (number,) in part[ROWS_COLUMN]) == list(range(len(many)))
    assert 0.2 < len(kept) / len(many) < 0.6
    train = train.add_column("length", [len(row) for row in train["input_ids"]])
    for row in PackedRows(train, 100):
        ids = [token for number in row[ROWS_COLUMN] for token in many[number]["input_ids"]]
        assert row["input_ids"].tolist() == ids
    _, one = split_rows(few, 1e-9)
    assert one is not None
    assert len(one) == 1
    with pytest.raises(UserError, match=r"`data\.eval_rows_frac`: 0\.5 of 1 rows leaves none to train on: set it to 0"):
        split_rows(few.select([0]), 0.5)


def test_conversation_is_not_split_between_training_and_held_out() -> None:
    """Of three rows each the first decides; hashes of the others would put many on the other side."""
    one_each = token_rows(tuple(range(9, 60)))
    _, kept = split_rows(one_each, 0.4)
    assert kept is not None
    rows = [
        {"input_ids": row["input_ids"][part:], "loss_mask": row["loss_mask"][part:], "conversation": number}
        for number, row in enumerate(one_each)
        for part in range(3)
    ]
    tokens = datasets.Dataset.from_list(rows)
    train, kept_of_three = split_rows(tokens, 0.4)
    assert kept_of_three is not None
    numbers = [number for (number,) in kept[ROWS_COLUMN]]
    assert kept_of_three[ROWS_COLUMN] == [[3 * number + part] for number in numbers for part in range(3)]
    assert set(train["conversation"]) == set(range(51)) - set(numbers)
    # With one row each, its number changes neither the split nor the hash.
    alone = one_each.add_column("conversation", list(range(len(one_each))))
    assert split_rows(alone, 0.4)[1][ROWS_COLUMN] == kept[ROWS_COLUMN]  # type: ignore[index]
    assert tokens_hash(alone) == tokens_hash(one_each)
    assert tokens_hash(tokens) != tokens_hash(tokens.remove_columns("conversation"))


def test_evaluation_changes_no_bit_of_the_training(target_folder: Path) -> None:
    """Noise is drawn in every step: a random number drawn by an evaluation would show. `never` evaluates at the end."""
    often = {"eval_strategy": "steps", "eval_steps": 1}
    recipes = make_recipe(target_folder, "never"), make_recipe(target_folder, "often", **often)
    for recipe in recipes:
        recipe.data.eval_rows_frac = 0.3
        recipe.drafter.kind = "eagle_parallel"
        train_drafter(recipe)
    assert have_equal_weights(*recipes)
    never, always = ([e for e in history_of(recipe) if "eval_loss" in e] for recipe in recipes)
    assert (len(never), len(always)) == (1, 6)
    assert {key: value for key, value in never[0].items() if "eval" in key} == {
        key: value for key, value in always[-1].items() if "eval" in key
    }
