"""The common format of results: it records their origin, and no folders or secrets of this machine."""

import json
import os
from pathlib import Path

import pytest

from draftsmith.results import RESULT_KEYS, portable, write_result


def test_result_records_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "/some/where/benchmarks/step_price.py"
    monkeypatch.setattr("sys.argv", [script, "mine.yaml", "target.model=/a/b/weights"])
    write_result(tmp_path / "deep" / "a.json", {"tau": 2.5, "folder": "/a/b/drafter"})
    result = json.loads((tmp_path / "deep" / "a.json").read_text())
    assert tuple(result) == RESULT_KEYS
    assert result["figures"] == {"tau": 2.5, "folder": ".../drafter"}
    assert result["command"] == "python benchmarks/step_price.py mine.yaml target.model=.../weights"
    assert result["machine"]["cpu_count"] == os.cpu_count()
    assert result["machine"]["memory_bytes"] > 2**28
    assert {"python", "torch"} <= result["versions"].keys()
    assert result["date"][:2] == "20"
    assert result["date"].endswith("Z")


@pytest.mark.parametrize(
    ("text", "shortened"),
    [
        ("target.model=/home/me/smollm2 target.gguf_file=a.gguf", "target.model=.../smollm2 target.gguf_file=a.gguf"),
        ("draftsmith compare runs/a/recipe.yaml", "draftsmith compare runs/a/recipe.yaml"),
        ("a/tree@0", "a/tree@0"),
        ("[{source: \"/x/y/a.jsonl\"}, {source: /x/y/b.jsonl}]", "[{source: \".../a.jsonl\"}, {source: .../b.jsonl}]"),
        ("mixture=@/tmp/x/prompts.yaml", "mixture=@.../prompts.yaml"),
        ("https://host/a/b", "https://host/a/b"),
        ("3 / 4 tokens/s", "3 / 4 tokens/s"),
    ],
)  # fmt: skip
def test_local_folders_are_shortened(text: str, shortened: str) -> None:
    assert portable({text: [text]}) == {shortened: [shortened]}
