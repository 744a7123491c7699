"""Secrets in recipes and command lines are masked in every file and message."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.openai_setup import StartServer
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
        ("http://me:$PASSWORD@h/v1", None),
        ("http://${TOKEN}@h/v1", None),
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


def test_password_reaches_only_the_server(
    tmp_path: Path, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distil, resume from the recipe in the run folder, and get an error where the password is needed again."""
    monkeypatch.setenv("PASSWORD", "pa/ss@word")
    server = start_server(token_ids=False)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "Say hi"}\n{"prompt": "Say bye"}\n')
    mine = tmp_path / "mine.yaml"
    data = {
        "conversations": {"source": str(questions)},
        "distill": {"engine": "openai", "max_new_tokens": 32},
    }
    mine.write_text(yaml.safe_dump({"name": "x", "runs_dir": str(tmp_path / "runs"), "data": data}))

    def distill(recipe: str, url: str | None) -> tuple[int, str]:
        address = [] if url is None else [f"data.distill.options.base_urls=[{url!r}]"]
        result = RUNNER.invoke(cli.app, ["distill", recipe, *address])
        return result.exit_code, result.stdout + result.stderr

    url = server.url.replace("://", "://me:pa%2Fss%40word@")
    monkeypatch.setattr("sys.argv", ["draftsmith", "distill", "mine.yaml", f"data.distill.options.base_urls=[{url}]"])
    code, said = distill(str(mine), url)
    assert code == 0, said
    assert server.headers[0]["Authorization"] == "Basic bWU6cGEvc3NAd29yZA=="
    assert "Next: draftsmith train " in said
    assert "://***@127.0.0.1" in said
    recipe = tmp_path / "runs" / "x" / "recipe.yaml"
    written = [file.read_bytes() for file in recipe.parent.rglob("*") if file.is_file()]
    for secret in ("pa%2Fss", "pa/ss", "bWU6"):
        assert secret not in said
        assert not any(secret.encode() in text for text in written)
    assert b"://***@127.0.0.1" in (recipe.parent / "provenance.json").read_bytes()

    # Everything is distilled: no request is sent, so no password is needed.
    assert distill(str(recipe), None)[0] == 0
    questions.write_text(questions.read_text() + '{"prompt": "Say more"}\n')
    code, said = distill(str(recipe), None)
    assert code == 2
    assert "error: data.distill.options.base_urls: draftsmith removed the servers' passwords" in said
    code, said = distill(str(recipe), server.url.replace("://", "://me:$PASSWORD@"))
    assert code == 0, said
    assert server.headers[-1]["Authorization"] == "Basic bWU6cGEvc3NAd29yZA=="
    # The name of an environment variable is not secret: this recipe can be run again unchanged.
    assert "://me:$PASSWORD@127.0.0.1" in recipe.read_text()
