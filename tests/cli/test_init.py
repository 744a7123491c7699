"""`draftsmith init` writes a recipe that loads, with every option of its kind, in any output encoding."""

import json
from pathlib import Path

import pytest
from support.tiny_runs import save_target
from typer.testing import CliRunner

from draftsmith.cli import init
from draftsmith.cli import main as cli
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.loading import load_target_config
from draftsmith.recipes.loading import load_recipe


@pytest.mark.parametrize(("engine", "kind"), [("vllm", "dflash2"), ("llamacpp", "dflash2"), ("draftsmith", "parallel")])
def test_written_recipe_has_every_option(engine: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "grüße.yaml"
    command = ["init", "--target", "embedded", "--data", "stdlib", "--for", engine, "--file", str(file), "--json"]
    result = CliRunner(charset="ascii").invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"file": str(file), "name": f"embedded-{kind}", "kind": kind}
    assert "gr\\xfc\\xdfe.yaml" in result.stderr
    recipe = load_recipe(file)
    assert (recipe.target.model, recipe.data.conversations.source) == ("embedded", "stdlib")
    assert recipe.drafter.options.keys() == load_drafter_class(kind).config_class.Options.model_fields.keys()
    base = load_recipe(init.BASES.get(engine, init.BASE_OF_ENGINES))
    assert recipe.train == base.train
    assert base.drafter.options.items() <= recipe.drafter.options.items()
    assert "  # size of a reduced draft vocabulary" in file.read_text(encoding="utf-8")
    again = CliRunner().invoke(cli.app, command)
    assert (again.exit_code, "exists: name another file with --file" in again.stderr) == (2, True)
    new = [*command, "--name", "new", "--file", str(tmp_path / "new")]
    (tmp_path / "a.txt").write_text("Say hi\n")
    (tmp_path / "b.jsonl").write_text('{"txt": "hi"}\n')
    for option, given, sentence in (
        ("--target", "/no.jsonl", "--target /no.jsonl does not exist"),
        ("--data", "/no.jsonl", "--data /no.jsonl does not exist"),
        ("--data", tmp_path / "a.txt", "a.txt line 1: not JSON"),
    ):
        wrong = CliRunner().invoke(cli.app, [*new, option, str(given)])
        assert (wrong.exit_code, sentence in wrong.stderr.replace("\n", " ")) == (2, True)
    noted = CliRunner().invoke(cli.app, [*new, "--data", str(tmp_path / "b.jsonl")])
    assert (noted.exit_code, "b.jsonl line 1: a conversation needs" in noted.stderr.replace("\n", " ")) == (0, True)


def test_recipe_follows_template_positions_and_installed_engines(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    template = (tmp_path / "target" / "chat_template.jinja").read_text()
    (tmp_path / "target" / "chat_template.jinja").write_text("{% if enable_thinking %}{% endif %}" + template)
    file = tmp_path / "mine.yaml"
    command = ["init", "--target", str(tmp_path / "target"), "--data", "stdlib", "--file", str(file)]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    assert "mine.yaml sets enable_thinking to false: change it" in result.stdout
    recipe = load_recipe(file)
    is_noted = "Note: vLLM is not installed here, so" in result.stdout
    assert is_noted == (recipe.data.distill.engine == "transformers")
    assert recipe.target.chat_template_kwargs == {"enable_thinking": False}
    positions = load_target_config(recipe.target).max_position_embeddings
    assert (recipe.data.max_length_tokens, recipe.data.distill.max_new_tokens) == (positions, positions // 2)
