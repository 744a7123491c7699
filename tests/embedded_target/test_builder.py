"""The embedded target's builder, which is not part of the package: it builds, trains and measures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import ROOT

BUILDER = ROOT / "embedded_target"


@pytest.mark.nightly
def test_conversations_and_a_training_step(tmp_path: Path) -> None:
    """The share of each category is its weight in `MAKERS`: 14 % of 50 are 7 from docstrings."""
    build = (
        "from conversations import build_conversations, choose_questions\n"
        "made = build_conversations(50)\n"
        "import collections, json\n"
        "counts = collections.Counter(c['category'] for c in made)\n"
        "print(json.dumps([counts, len({c['id'] for c in made}), len(choose_questions(made))]))\n"
    )
    made = subprocess.run([sys.executable, "-c", build], cwd=BUILDER, capture_output=True, text=True, check=True)
    counts, different, questions = json.loads(made.stdout)
    expected = {"docstring": 7, "source": 4, "reading": 13, "multi_turn": 8, "retrieval": 8, "rewrite": 7, "summary": 3}
    assert counts == expected
    assert different == sum(expected.values())
    assert 0 < questions < different
    train = [sys.executable, BUILDER / "train.py", "--output-dir", tmp_path / "out", "--work-dir", tmp_path / "work"]
    done = subprocess.run(
        [*train, "--max-steps", "1", "--conversations", "3"], capture_output=True, text=True, check=True
    )
    assert '"answers cut by the length limit": 1.0' in done.stdout  # after one step its answers are arbitrary
    shipped = json.loads((ROOT / "models" / "embedded_target" / "config.json").read_text(encoding="utf-8"))
    trained = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    trained.pop("transformers_version"), shipped.pop("transformers_version")
    assert trained == shipped
