"""A damaged file of a run ends a command with one sentence that names it: no traceback, no hang."""

import pytest
from support.finished_run import FinishedRun

FORM, NO_JSON = b'{"x": {}}', b"\x89PNG\xff"


@pytest.mark.parametrize(
    ("name", "command", "content"),
    [
        ("drafter/config.json", "prove", FORM), ("drafter/settings.json", "train", FORM),
        ("drafter/training.json", "eval", FORM), ("eval/settings.json", "report", FORM),
        ("eval/notes.json", "report", FORM), ("eval/proof.json", "eval", FORM),
        ("provenance.json", "report", NO_JSON),
        ("drafter/training.json", "train", NO_JSON), ("eval/settings.json", "eval", NO_JSON),
    ],
)  # fmt: skip
def test_damaged_file_is_named(finished: FinishedRun, name: str, command: str, content: bytes) -> None:
    file = finished.root / name
    file.write_bytes(content)
    sentence = finished.error(command)
    assert str(file) in sentence or f"{file.parent} " in sentence
