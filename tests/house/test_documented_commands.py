"""Every command of the README and of docs/ is valid: each is parsed by the program that it calls.

`draftsmith` by its command line, up to the start of the work, with recipes and overrides checked by the schema and the
drafter's options; make by `make --dry-run`, and the commands that it would run; scripts by their parsers;
`accelerate launch` by accelerate's. A command without a rule fails by its name.
"""

import argparse
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser
from generate.reference import without_made
from support.places import ROOT
from typer.main import get_group

from draftsmith.eval.commands.cli import app
from draftsmith.eval.methods.registry import load_method_class
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import DRAFTER_KIND
from draftsmith.train.drafter.training_arguments import KEYS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")]
OTHER_TARGETS = {"num_hidden_layers": 30, "vocab_size": 49152}  # of the smallest target that a document names
TRAINING = "draftsmith.train.train_parallel"
PLACEHOLDERS = {"RECIPE": "mine.yaml", "FILES": "question.jsonl"}
MODULES_ELSEWHERE = ("vllm.entrypoints.openai.api_server", "sglang.launch_server")  # in separate environments
FOREIGN = {"hf", "curl", "grep", "pip", "cp", "llama-server", "llama-bench"}
PROGRAMS = "draftsmith|make|python|accelerate|pip"
FENCED = re.compile(r"^( *)```bash\n(.*?)^\1```", re.DOTALL | re.MULTILINE)  # also in lists
ANY_FENCED = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(rf"(?:^    (?:{PROGRAMS}) .*\n(?:^    .*\n)*)+", re.MULTILINE)
SPAN = re.compile(rf"`((?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) [^`\n]+)`")
ASSIGNMENT = re.compile(r"""(?:^|\s)([A-Z])=(?:"([^"]*)"|'([^']*)'|(\S+))""")


class Parsed(BaseException):
    """Raised when a script has parsed its command line."""


def list_commands(page: Path) -> set[tuple[str, ...]]:
    """Yield the words of all commands in bash blocks, also indented, and code spans, without leading assignments.

    `draftsmith eval`, `draftsmith export --to vllm`, `accelerate launch` in a code span are names, not commands.
    """
    text = without_made(page.read_text(encoding="utf-8"))  # the rest is the command line
    rest = ANY_FENCED.sub("", text)
    blocks = [match[2] for match in FENCED.finditer(text)] + INDENTED.findall(rest)
    found: set[tuple[str, ...]] = set()
    variables: dict[str, str] = {}
    for block in map(textwrap.dedent, blocks):
        if not block.startswith("#!"):  # a script for Slurm
            variables |= {name: "".join(values) for name, *values in ASSIGNMENT.findall(block)}
            for _ in range(2):  # their values contain other commands
                for name, value in variables.items():
                    block = block.replace(f"${name}", value)
            found |= set(commands_in(block))
    spans = {words for span in SPAN.findall(rest) for words in commands_in(span)}
    is_whole = lambda words: len(words) > 2 and not words[2].startswith("-")  # noqa: E731
    return found | {words for words in spans if words[0] not in ("draftsmith", "accelerate") or is_whole(words)}


def commands_in(block: str) -> Iterator[tuple[str, ...]]:
    without_comments = re.sub(r"(^|\s)#.*$", r"\1", block.replace("\\\n", ""), flags=re.MULTILINE)
    lexer = shlex.shlex(without_comments, posix=True, punctuation_chars="|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    for ends, words in groupby(lexer, lambda word: not word.strip("|\n")):
        command = tuple(dropwhile(re.compile(r"[A-Za-z_]\w*=").match, words))
        if command and not ends:
            yield command


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build a checkout with a reader's files: a recipe, prompts, questions and measured runs."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name not in ("runs", "site"):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / ".ci").symlink_to(ROOT / ".ci")
    for name in ("mine.yaml", "recipe.yaml"):
        shutil.copyfile(ROOT / "recipes" / "llama3-8b-parallel.yaml", tmp_path / name)
    for name in ("sources.yaml", "prompts.yaml"):
        (tmp_path / name).write_text("[{source: a.jsonl, weight: 2}, {source: b.jsonl}]")
    shutil.copyfile(ROOT / "recipes" / "embedded-medusa.yaml", tmp_path / "one_block.yaml")
    (tmp_path / "question.jsonl").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jsonl").touch()
    for name in ("mine", "yours", "a", "b"):
        (tmp_path / "runs" / name / "eval").mkdir(parents=True)
        (tmp_path / "runs" / name / "eval" / "records.jsonl").touch()
    (tmp_path / "runs" / "table").mkdir()
    shutil.copyfile(ROOT / "recipes" / "quickstart.yaml", tmp_path / "runs" / "table" / "recipe.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one command by the rule of its program.

    Raises:
        AssertionError: The command is invalid, or has no rule.
    """
    program = Path(words[0]).name
    arguments = tuple(PLACEHOLDERS.get(word, word) for word in words[1:])
    rules: dict[str, Callable[[tuple[str, ...], pytest.MonkeyPatch], None]] = {
        "draftsmith": check_draftsmith,
        "make": check_make,
        "python": check_python,
        "accelerate": check_accelerate,
    }
    if program in rules:
        rules[program](arguments, monkeypatch)
    else:
        assert program in FOREIGN, f"no rule for the command {program}"


def check_exists(file: str) -> None:
    assert Path(file).exists(), file


@cache
def command_line() -> tuple[Any, dict[str, Any]]:
    """Return draftsmith's command line, whose commands only store their arguments, and the place of these."""
    group, given = get_group(app), dict[str, Any]()
    for command in group.commands.values():
        command.callback = lambda **values: given.update(values)
    return group, given


def check_draftsmith(arguments: tuple[str, ...], _: pytest.MonkeyPatch) -> None:
    """Parse the arguments, and check the recipes that they name, with their overrides."""
    group, given = command_line()
    given.clear()
    group.main(list(arguments), standalone_mode=False)
    assert given or arguments[0].startswith("--")
    named = [str(given["recipe"])] if given.get("recipe") else list(given.get("recipes", []))
    check_recipes([*named, *(given.get("overrides") or [])], arguments[0] in ("distill", "run"))


def check_recipes(named: list[str], distils: bool = False) -> None:
    """Check recipes with the overrides that follow them."""
    overrides = tuple(word for word in named if "=" in word)
    for name in (word for word in named if "=" not in word and not Path(word, "eval").is_dir()):
        check_recipe(name, overrides, distils)


@cache
def check_recipe(name: str, overrides: tuple[str, ...], distils: bool) -> None:
    """Check beyond the schema: options of the drafter, methods and the engine, and the trainer's arguments."""
    recipe = load_recipe(name, list(overrides))
    embedded = json.loads((ROOT / "models" / "embedded_target" / "config.json").read_text(encoding="utf-8"))
    of_target = embedded if recipe.target.model == "embedded" else OTHER_TARGETS
    load_drafter_class(recipe.drafter.kind).config_class.Options.model_validate(
        recipe.drafter.options, context=of_target
    )
    if distils and recipe.data.distill.engine != "none":
        module = importlib.import_module(f"draftsmith.data.engines.{recipe.data.distill.engine}_engine")
        module.ENGINE.Options.model_validate(recipe.data.distill.options)
    for method in recipe.eval.methods:
        if method.kind != DRAFTER_KIND:
            load_method_class(method)
    assert set(recipe.train) <= KEYS


def check_make(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    printed = subprocess.run(["make", "--dry-run", *arguments], capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr
    for line in printed.stdout.splitlines():
        called = re.search(r"\S*/(?:draftsmith|python) (?:\w+|\S+\.py) .*", line)
        if called is not None and "-m pip" not in line:
            check(tuple(shlex.split(called[0])), monkeypatch)


def check_python(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    is_module = arguments[0] == "-m"
    if is_module and arguments[1] != TRAINING:
        assert arguments[1] in MODULES_ELSEWHERE or importlib.util.find_spec(arguments[1]) is not None, arguments[1]
        return
    if is_module:
        arguments = arguments[1:]
    else:
        check_exists(arguments[0])
    parse = argparse.ArgumentParser.parse_args

    def only_parse(parser: argparse.ArgumentParser, *given: Any) -> None:
        raise Parsed(parse(parser, *given))

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
        patch.setattr(sys, "argv", list(arguments))
        with pytest.raises(Parsed) as parsed:
            (runpy.run_module if is_module else runpy.run_path)(arguments[0], run_name="__main__")
    options = parsed.value.args[0]
    if hasattr(options, "recipe") and hasattr(options, "overrides"):
        check_recipes([str(options.recipe), *options.overrides])
    check_recipes(getattr(options, "recipes", []))


def check_accelerate(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments[0] == "launch"
    options = launch_command_parser().parse_args(list(arguments[1:]))
    if options.config_file:
        check_exists(options.config_file)
    module = ["-m"] if options.module else []
    check_python((*module, options.training_script, *options.training_script_args), monkeypatch)


@pytest.mark.usefixtures("workplace")
def test_documented_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = {words: page for page in PAGES for words in list_commands(page)}
    wrong = []
    for words, page in commands.items():
        try:
            check(words, monkeypatch)
        except (Exception, SystemExit) as error:
            wrong.append(f"{page.name}: {' '.join(words)}: {error}")
    assert wrong == []
    assert len(commands) > 100
    assert commands.keys() >= {("make", "quickstart"), ("grep", "^vllm:spec_decode.*_total")}


@pytest.mark.parametrize(
    "line",
    [
        "draftsmith eval mine.yaml --engin vllm",
        "draftsmith train mine.yaml train.learning_rat=1",
        "draftsmith train mine.yaml drafter.options.num_mask=1",
        "make smollm2 SET=eval.run=1",
        "python benchmarks/serving.py --questons 5",
        "accelerate launch -m draftsmith.train.train_parallel mine.yaml eval.run=2",
    ],
)
@pytest.mark.usefixtures("workplace")
def test_invalid_command_fails(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((Exception, SystemExit)):
        check(tuple(line.split()), monkeypatch)
