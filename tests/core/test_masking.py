"""Secrets in recipes and command lines are masked in every file and message."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from draftsmith.cli import main as cli
from draftsmith.errors import UserError, masked
from draftsmith.train.drafter.training_arguments import training_arguments

RUNNER = CliRunner()


@pytest.mark.parametrize(
    ("open_text", "shown"),
    [
        ("http://me:pw@h/v1", "http://***@h/v1"),
        ("http://token@h/v1", "http://***@h/v1"),
        ("x http://me:p@s/s@h/v1: no", "x http://***@h/v1: no"),
        ('a=["http://a:b@h1/v1","http://c:d@h2/v1"]', 'a=["http://***@h1/v1","http://***@h2/v1"]'),
        ("[http://a:b@h1,http://c:d@h2]", "[http://***@h1,http://***@h2]"),
        ("me:pw@h/v1 does not begin", "***@h/v1 does not begin"),
        ("train.hub_token=hf_abc", "train.hub_token=***"),
        ("data.distill.options={llm: {hf_token: hf_abc}, n: 1}", "data.distill.options={llm: {hf_token: ***}, n: 1}"),
        ("data.distill.options.api_key_env=sk-proj-1", "data.distill.options.api_key_env=***"),
        # No secrets in these.
        ("data.distill.options.api_key_env=MY_KEY", None),
        ("http://h:8000/v1 says HTTP 400: no", None),
        ("data.max_length_tokens=64 tokenizer.pad_token: <pad>", None),
    ],
)
def test_secrets_in_text_are_masked(open_text: str, shown: str | None) -> None:
    assert masked(open_text) == (shown or open_text)
    assert str(UserError(open_text)) == (shown or open_text)


def test_secrets_in_nested_values_are_masked() -> None:
    tree: dict[str, Any] = {"train": {"hub_token": "hf_abc", "max_steps": 3}, "urls": ["http://a:b@h"], "n": None}
    assert masked(tree) == {"train": {"max_steps": 3}, "urls": ["http://***@h"], "n": None}
    assert masked({"api_key_env": "MY_KEY"}) == {"api_key_env": "MY_KEY"}
    assert masked({"api_key_env": "sk-1"}) == {}


def test_hub_token_in_a_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.hub_token.*HF_TOKEN") as caught:
        training_arguments({"hub_token": "hf_abc"}, tmp_path, seed=0)
    assert "hf_abc" not in str(caught.value)


def test_url_with_a_login_is_refused_without_showing_it() -> None:
    """It would be lost where the recipe is stored; a key has its own option."""
    options = "data.distill={engine: openai, options: {base_urls: ['http://me:pw@h/v1']}}"
    result = RUNNER.invoke(cli.app, ["doctor", "quickstart", options])
    said = " ".join((result.stdout + result.stderr).split())
    assert "a URL may not hold a login: give the servers' key by `api_key_env`" in said
    assert "pw" not in said
