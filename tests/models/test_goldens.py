"""Loss, gradients and drafts of every kind of drafter equal the golden numbers; `support/goldens.py` writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import goldens
from support.goldens import FILE, GOLDEN_CASES, NAMES, check_goldens, get_goldens

GOLDENS: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_case_has_goldens() -> None:
    assert list(GOLDENS) == NAMES, "write the missing ones: PYTHONPATH=tests python -m support.goldens"


@pytest.mark.parametrize(("name", "case"), [*zip(NAMES, GOLDEN_CASES, strict=True)], ids=NAMES)
def test_goldens(name: str, case: tuple[str, dict[str, Any]]) -> None:
    assert name in GOLDENS, "write its numbers: PYTHONPATH=tests python -m support.goldens"
    check_goldens(get_goldens(*case), GOLDENS[name])


def test_only_new_and_changed_goldens_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded, changed, new = [index for index, (kind, _) in enumerate(GOLDEN_CASES) if kind == "medusa"][:3]
    names = [NAMES[index] for index in (rounded, changed, new)]
    stored = {name: json.loads(json.dumps(GOLDENS[name])) for name in names[:2]}
    stored[names[0]]["padded"]["loss"] *= 1 + 1e-14
    stored[names[1]]["padded"]["loss"] *= 1 + 1e-9
    file = tmp_path / "goldens.json"
    file.write_text(json.dumps(stored))
    monkeypatch.setattr(goldens, "FILE", file)
    monkeypatch.setattr(goldens, "NAMES", names)
    monkeypatch.setattr(goldens, "GOLDEN_CASES", [GOLDEN_CASES[index] for index in (rounded, changed, new)])
    goldens.main()
    written = json.loads(file.read_text())
    assert list(written) == names
    assert written[names[0]] == stored[names[0]] != GOLDENS[names[0]]
    for name in names[1:]:
        check_goldens(written[name], GOLDENS[name])
