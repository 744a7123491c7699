"""Every architecture of transformers as a target: none is silently wrong, and the page lists its support."""

import json

import pytest
from generate import targets

from draftsmith.models.target.architectures import KNOWN, LOGITS, OTHER_LOGITS, SLIDING


@pytest.mark.nightly
def test_no_architecture_is_silently_wrong_as_a_target() -> None:
    rows, not_built = targets.sweep(targets.architectures())
    assert [f"{row.model_type}: {defect}" for row in rows for defect in row.defects] == []
    page = json.loads(targets.RESULT.read_text(encoding="utf-8"))
    assert page["targets"] == {row.model_type: row.cells for row in rows}, "python docs/generate/targets.py"
    assert page["not_built"] == not_built


def test_known_types_are_those_that_were_tried() -> None:
    """Two names of the page have the text model of another type: Persimmon's and GPT-2's."""
    page = json.loads(targets.RESULT.read_text(encoding="utf-8"))
    assert page["targets"].keys() - {"fuyu", "gpt-sw3"} == KNOWN
    assert {*LOGITS, *OTHER_LOGITS, *SLIDING} <= KNOWN


def test_wrong_logits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's logits are compared with its own forward, not with values read from its config."""
    monkeypatch.setattr("draftsmith.models.target.architectures.logit_shape", lambda target: targets_shape)
    from draftsmith.models.target_logits import LogitShape

    targets_shape = LogitShape(0.5)
    row = targets.tried("cohere2")
    assert row is not None
    assert any(defect.startswith("logits: ValueError: logits differ") for defect in row.defects)
