"""Loss, gradients and drafts of every kind of drafter equal the golden numbers; `support/goldens.py` writes them."""

import json
from typing import Any

import pytest
from support.goldens import FILE, GOLDEN_CASES, NAMES, check_goldens, get_goldens

GOLDENS: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_case_has_goldens() -> None:
    assert list(GOLDENS) == NAMES, "write the missing ones: PYTHONPATH=tests python -m support.goldens"


@pytest.mark.parametrize(("name", "case"), [*zip(NAMES, GOLDEN_CASES, strict=True)], ids=NAMES)
def test_goldens(name: str, case: tuple[str, dict[str, Any]]) -> None:
    assert name in GOLDENS, "write its numbers: PYTHONPATH=tests python -m support.goldens"
    check_goldens(get_goldens(*case), GOLDENS[name])
