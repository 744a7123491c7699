"""No speedup without a baseline of the same process, target, dtype, prompts, sampling and token limit."""

import copy
from typing import Any

import pytest
import torch
from support.records import made_up
from support.tiny_models import tiny_target

from draftsmith.eval.bench.fair_clock import (
    SETTINGS,
    answer_settings,
    check_fair_clock,
    target_settings,
    weights_fingerprint,
)
from draftsmith.eval.report.summary import summarize, summarize_timing
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.recipes.errors import UserError

OTHER: dict[str, Any] = {
    "target": "another",
    "dtype": "bfloat16",
    "prompts": "others",
    "sampling": {"temperature": 0.0, "top_k": 5, "top_p": 1.0},
    "max_new_tokens": 11,
}


def test_every_setting_is_tested() -> None:
    made = answer_settings({"target": "a", "dtype": "float32"}, [1], ("x",), Sampling(), 10)
    assert made.keys() == SETTINGS.keys() == OTHER.keys()


@pytest.mark.parametrize("key", SETTINGS)
@pytest.mark.parametrize("changed", ["chain@0", "autoregressive@0"])
@pytest.mark.parametrize("summary", [summarize, summarize_timing])
def test_nothing_is_compared_that_differs(key: str, changed: str, summary: Any) -> None:
    record = made_up(0, 2.0, 4.0)
    check_fair_clock([record])
    record.answers[changed].settings[key] = OTHER[key]
    message = f"run 0 of question 1: chain was measured with other {SETTINGS[key]} than its autoregressive baseline"
    with pytest.raises(UserError, match=message):
        summary([made_up(0, 2.0, 4.0), record])


@pytest.mark.parametrize("key", ["target", "dtype", "sampling", "max_new_tokens"])
def test_records_of_another_target_are_not_averaged(key: str) -> None:
    """Fair each by itself, but not of one thing. The prompts do differ from question to question."""
    later = made_up(1, 2.0, 4.0)
    for answer in later.answers.values():
        answer.settings["prompts"] = "of another question"
    check_fair_clock([made_up(0, 2.0, 4.0), later])
    for answer in later.answers.values():
        answer.settings[key] = OTHER[key]
    with pytest.raises(
        UserError, match=f"run 1 of question 1 was measured with another {SETTINGS[key]} than the first"
    ):
        summarize([made_up(0, 2.0, 4.0), later])


def test_times_of_two_processes_are_never_compared() -> None:
    record = made_up(0, 2.0, 4.0)
    record.answers["chain@0"].process = "another"
    with pytest.raises(UserError, match="mixes times of several processes, which cannot be compared"):
        summarize([record])
    del record.answers["autoregressive@0"]
    with pytest.raises(UserError, match="lacks its autoregressive baseline"):
        summarize([record])
    with pytest.raises(UserError, match="nothing has been measured yet"):
        summarize([])


def test_a_target_is_told_by_its_weights() -> None:
    target = tiny_target()
    name = weights_fingerprint(target)
    assert weights_fingerprint(copy.deepcopy(target)) == name
    assert target_settings(target) == {"target": name, "dtype": "float32"}
    other = copy.deepcopy(target)
    with torch.no_grad():
        weight = other.model.layers[1].mlp.down_proj.weight
        weight[3, 4] += 1e-3
        changed = weights_fingerprint(other)
        weight[3, 4] = target.model.layers[1].mlp.down_proj.weight[3, 4]
        assert weights_fingerprint(other) == name
        weight[[0, 1]] = weight[[1, 0]]  # the same numbers elsewhere
    assert len({name, changed, weights_fingerprint(other), weights_fingerprint(target.to(torch.bfloat16))}) == 4


def test_prompts_are_those_that_were_asked() -> None:
    def prompts(ids: list[int], *turns: str) -> str:
        return answer_settings({}, ids, turns, Sampling(), 10)["prompts"]

    assert prompts([1, 2], "a", "b") == prompts([1, 2], "a", "b")
    assert (
        len({prompts([1, 2], "a", "b"), prompts([1, 3], "a", "b"), prompts([1, 2], "a", "c"), prompts([1], "a")}) == 4
    )
