"""The drafter of docs/guides/write-a-drafter.md works as a single file."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.places import PACKAGES, ROOT, make_importable

import draftsmith.models.drafters
from draftsmith.models.base import registry
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.train.drafter.model_card import _papers

PAGE = (ROOT / "docs" / "guides" / "write-a-drafter.md").read_text(encoding="utf-8")
FILE, CHECK = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
(RECIPE,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
KIND = "one_block"
# One process for all commands: `draftsmith` is imported once.
COMMANDS = """
import json, sys
from draftsmith.cli.main import main
for command in json.loads(sys.argv[1]):
    sys.argv = ["draftsmith", *command]
    try:
        main()
    except SystemExit as end:
        print("ENDED", command[0], end.code or 0, flush=True)
sys.path.insert(0, "docs")
from generate import reference
print(*reference.drafters(), *reference.formats(), sep="\\n")
"""


@pytest.mark.slow
def test_drafter_is_one_file(tmp_path: Path) -> None:
    """In a copy of the package with only the page's file added, every command accepts the new kind."""
    house = tmp_path / "house"
    for folder in (*PACKAGES, "docs/generate"):
        shutil.copytree(ROOT / folder, house / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (house / "models" / "drafters" / f"{KIND}.py").write_text(FILE, encoding="utf-8")
    (house / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    make_importable(house)
    small = [
        "data.conversations.limit=12", "data.distill.max_new_tokens=16", "train.max_steps=4", "train.warmup_steps=1",
        "train.logging_steps=1", "eval.limit_per_category=1", "eval.max_new_tokens=12",
    ]  # fmt: skip
    stages = [
        ["distill"],
        ["doctor"],
        ["train"],
        ["eval"],
        ["export", "--to", "vllm"],
        ["push", "--dry-run", "--repo", "me/it"],
    ]
    commands = [[name, "mine.yaml", *small, *options] for name, *options in stages]
    ran = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        env=os.environ | {"PYTHONPATH": str(house / ".typing")}, cwd=house, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    ended = dict(re.findall(r"^ENDED (\w+) (\d+)$", ran.stdout, re.MULTILINE))
    assert ended == {name: "2" if name == "export" else "0" for name, *_ in stages}, ran.stdout + ran.stderr
    told = " ".join((ran.stdout + ran.stderr).split())
    assert "Traceback" not in told
    assert "train = decode" in told
    assert f"`{KIND}`" in told  # the export's error, and the documents
    assert f"### Drafter `{KIND}`" in ran.stdout
    assert "rows of A, columns of B" in ran.stdout
    answers = [json.loads(line) for line in (house / "runs/one_block/eval/records.jsonl").read_text().splitlines()]
    assert answers


@pytest.mark.parametrize("row", ["-1", "0"])
def test_training_equals_decoding_for_the_pages_drafter(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's file is loaded as if it were in `models/drafters/`; the page's check finds the feature shifted."""
    (tmp_path / f"{KIND}.py").write_text(FILE.replace("features[-1]", f"features[{row}]"), encoding="utf-8")
    kinds = registry.drafter_kinds()
    monkeypatch.setattr(registry, "drafter_kinds", lambda: [*kinds, KIND])
    monkeypatch.setattr(draftsmith.models.drafters, "__path__", [*draftsmith.models.drafters.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    with nullcontext() if row == "-1" else pytest.raises(AssertionError, match="prefix_tokens=7"):
        exec(compile(CHECK, "write-a-drafter.md", "exec"), {})
    assert not {"num_layers", "lm_heads"} & set(load_drafter_class(KIND).config_class.Options.model_fields)
    assert _papers(KIND) == ["2401.10774"]
    assert max(map(len, FILE.splitlines())) <= 120
    sys.modules.pop(f"draftsmith.models.drafters.{KIND}", None)
