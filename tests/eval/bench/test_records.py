"""Records are read back as written, and incomparable times give no speedup."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.report_facts import made_up
from support.tiny_models import tiny_target

from draftsmith.errors import UserError
from draftsmith.eval.bench.records import (
    SETTINGS,
    QuestionRecord,
    RecordLog,
    answer_settings,
    check_fair_clock,
    target_settings,
    weights_fingerprint,
)
from draftsmith.eval.report.summary import summarize
from draftsmith.models.sampling import Sampling

OTHER: dict[str, Any] = {
    "target": "another",
    "dtype": "bfloat16",
    "prompts": "others",
    "sampling": {"temperature": 0.0, "top_k": 5, "top_p": 1.0},
    "max_new_tokens": 11,
}


def two_turns() -> QuestionRecord:
    """Build records of two turns; in the second the chain takes one more round, without drafts."""
    record = made_up(3, 2.0, 4.0)
    for answer in record.answers.values():
        (turn,) = answer.turns
        answer.turns.append(replace(turn, text="ü\n", accept_lengths=[3, 3, 2, 1], draft_lengths=[2, 2, 1, 0], tried=7))
        answer.turns[1].round_s, answer.turns[1].draft_depths = [0.1, 0.2, 0.3, 0.4], [2, 2, 2, 0]
    return record


def test_appended_records_are_read_back(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "records.jsonl")
    records = [made_up(0, 2.0, 4.0), two_turns()]
    records[0].weights_bytes, records[0].weights_read_s = 2_000_000, 0.0005
    for record in records:
        log.append(record)
    assert list(RecordLog(log.file)) == records
    assert len(log.file.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("key", "changed"),
    [(key, "chain@0") for key in SETTINGS] + [("dtype", "autoregressive@0")],
)
def test_different_settings_are_not_compared(key: str, changed: str) -> None:
    assert answer_settings(target_settings(tiny_target()), [1], ("x",), Sampling(), 10).keys() == SETTINGS.keys()
    record = made_up(0, 2.0, 4.0)
    check_fair_clock([record])
    record.answers[changed].settings[key] = OTHER[key]
    message = f"run 0 of question 1: chain was measured with other {SETTINGS[key]} than its autoregressive baseline"
    with pytest.raises(UserError, match=message):
        summarize([made_up(0, 2.0, 4.0), record])


@pytest.mark.parametrize("key", ["target", "dtype", "sampling", "max_new_tokens"])
def test_records_of_another_target_are_not_averaged(key: str) -> None:
    """Each is valid alone, but they measure different targets. Prompts may differ between questions."""
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


def test_target_is_identified_by_its_weights() -> None:
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
