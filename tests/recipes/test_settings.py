"""A folder is continued with what it was begun with, or not at all."""

from pathlib import Path
from typing import Any

import pytest

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import check_settings, write_settings

SETTINGS: dict[str, Any] = {
    "eval": {"max_new_tokens": 10, "stop": [], "methods": [{"name": "a"}]},
    "drafter_weights": ["12ab"],
    "data.max_length_tokens": 512,
}
WAY_OUT = "restore the key, give the recipe another `name`, or delete that folder to measure again"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"eval": {"max_new_tokens": 20, "stop": [], "methods": [{"name": "a"}]}, "drafter_weights": ["34cd"]},
            "eval.max_new_tokens = 10, now it is 20 (drafter_weights changed too)",
        ),
        (
            {"eval": {"max_new_tokens": 10, "stop": ["x"], "methods": [{"name": "b"}]}},
            "eval.stop = [], now it is ['x'] (eval.methods.0.name changed too)",
        ),
        (
            {"eval": {"max_new_tokens": 10, "stop": [], "methods": [{"name": "a"}, {"name": "b"}]}},
            "eval.methods.1.name = None, now it is 'b'",
        ),
        ({"eval": {"max_new_tokens": 10, "stop": []}}, "eval.methods.0.name = 'a', now it is None"),
        ({"seed": 1}, "seed = None, now it is 1"),
        ({"data.max_length_tokens": 1024}, "data.max_length_tokens = 512, now it is 1024"),
    ],
)
def test_changed_settings_are_refused(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    file = tmp_path / "settings.json"
    check_settings(file, SETTINGS, "measure again")  # nothing was begun
    write_settings(file, SETTINGS)
    check_settings(file, SETTINGS, "measure again")
    check_settings(file, SETTINGS | {"data.max_length_tokens": 8}, "measure again", ["data.max_length_tokens"])
    with pytest.raises(UserError) as caught:
        check_settings(file, SETTINGS | changed, "measure again", ["data.max_length_tokens"])
    assert str(caught.value) == f"{tmp_path} was begun with {told}: {WAY_OUT}"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_damaged_file_is_named_with_the_way_out(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "settings.json"
    file.write_bytes(content)
    with pytest.raises(
        UserError, match=r"settings.json is damaged or of another version: delete the folder .* to train anew"
    ):
        check_settings(file, SETTINGS, "train anew")


def test_a_key_that_may_fall_may_not_go_missing(tmp_path: Path) -> None:
    write_settings(tmp_path / "settings.json", SETTINGS)
    without = {key: value for key, value in SETTINGS.items() if key != "data.max_length_tokens"}
    with pytest.raises(UserError, match=r"data.max_length_tokens = 512, now it is None"):
        check_settings(tmp_path / "settings.json", without, "distil again", ["data.max_length_tokens"])
