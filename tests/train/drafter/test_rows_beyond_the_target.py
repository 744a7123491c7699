"""Rows beyond the target's limits are reported in one sentence before it is loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_runs import tiny_run

from draftsmith.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.features.write import project_features


@pytest.mark.parametrize("begin", [train_drafter, project_features])
@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("max_position_embeddings", 7, r"has a row of \d+ tokens, and the target has 7 positions: set data.max"),
        ("vocab_size", 5, r"has the token id \d+, and the target's embedding has 5 rows: take the tokenizer"),
    ],
)  # fmt: skip
def test_too_long_rows_are_refused_before_loading(
    tmp_path: Path, begin: Callable[[Recipe], Any], key: str, value: int, sentence: str
) -> None:
    recipe = tiny_run(tmp_path)
    file = tmp_path / "target" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    for weights in (tmp_path / "target").glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UserError, match=sentence):
        begin(recipe)
