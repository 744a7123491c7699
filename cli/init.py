"""`draftsmith init`: write a recipe for one's own target, conversations and engine, with every key that matters.

The values are copied from the shipped recipe for that engine, each with its description; the file extends no recipe.
"""

import importlib.util
import textwrap
from pathlib import Path
from typing import Any

import yaml

from draftsmith.cli.console import console
from draftsmith.data.distill.limits import target_limits
from draftsmith.data.sources.files import is_hub_name
from draftsmith.data.sources.mixture import load_conversations
from draftsmith.errors import UserError
from draftsmith.files import expand_home, write_atomically
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.loading import load_target_config, load_tokenizer, template_variables
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import Recipe, TargetRecipe

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "draftsmith": "draftsmith's own server"}
BASES = {"draftsmith": "llama3-8b-parallel"}  # shipped recipe by engine
BASE_OF_ENGINES = "qwen3-8b-dflash2"
THINKING = "enable_thinking"
WIDTH = 110
# Keys of the written recipe, by section.
KEYS: dict[str, list[str]] = {
    "target": ["model", "dtype", "chat_template_kwargs"],
    "data.conversations": ["source", "limit", "skip_invalid", "decontaminate"],
    "data.distill": ["engine", "options", "temperature", "max_new_tokens", "cut_answers"],
    "data": ["max_length_tokens", "eval_rows_frac", "packing"],
    "drafter": ["kind", "init"],
    "eval": ["questions", "limit_per_task", "max_new_tokens", "runs", "temperatures"],
}


def write_recipe(target: str, data: str, engine: str, name: str | None, file: Path | None) -> Path:
    """Write a recipe to `file`, by default `NAME.yaml`, and return the file.

    Args:
        target: Hub id or folder of the target.
        data: Conversations, as in `data.conversations.source`.
        engine: Engine that will serve the drafter, a key of `ENGINES`.
        name: Name of the run; None: made of the target's name and the drafter's kind.

    Raises:
        UserError: The file exists, a path does not, `data` cannot be read, or the config or
            tokenizer of a local target cannot be read.
    """
    base = load_recipe(BASES.get(engine, BASE_OF_ENGINES))
    kind = base.drafter.kind
    name = name or f"{Path(target).name.lower()}-{kind}"
    file = file or Path(f"{name}.yaml")
    if file.exists():
        raise UserError(f"{file} exists: name another file with --file, or delete it")
    for option, given in (("--target", target), ("--data", data)):
        if not expand_home(given).exists() and not is_hub_name(given):
            raise UserError(f"{option} {given} does not exist: correct the path, or give a Hub id")
    if expand_home(data).exists():
        source = {"source": data, "decontaminate": []}
        try:
            next(load_conversations(Recipe.model_validate({"name": "first", "data": {"conversations": source}})))
        except UserError as error:
            if "data.conversations.columns" not in str(error):
                raise
            console.print(f"Note: {error}", markup=False)
    variables, positions = _read_target(target)
    has_vllm = importlib.util.find_spec("vllm") is not None
    distill = {"engine": "vllm"} if has_vllm else {"engine": "transformers", "options": {}}
    values = base.model_dump()
    values["name"] = name
    values["target"] |= {"model": target, "dtype": "auto", "chat_template_kwargs": variables}
    values["data"]["conversations"] = {"source": data}
    values["data"]["distill"] |= distill
    if positions is not None:
        values["data"]["max_length_tokens"] = min(values["data"]["max_length_tokens"], positions)
        for section in (values["data"]["distill"], values["eval"]):  # half of the positions: prompts need room too
            section["max_new_tokens"] = min(section["max_new_tokens"], positions // 2)
    options = load_drafter_class(kind).config_class.Options.model_fields
    defaults = {key: field.get_default(call_default_factory=True) for key, field in options.items()}
    values["drafter"]["options"] = defaults | base.drafter.options
    write_atomically(file, _as_text(Recipe.model_validate(values), base, engine))
    load_recipe(file)
    return file


def _read_target(target: str) -> tuple[dict[str, bool], int | None]:
    """Return the variable that turns thoughts off, if the target's chat template reads it, and its positions.

    A Hub id that cannot be read now, as without a network, counts as one without both.
    """
    recipe = TargetRecipe(model=target)
    try:
        positions = target_limits(load_target_config(recipe)).positions
        template = str(load_tokenizer(recipe).get_chat_template())
    except UserError:
        if Path(target).is_dir():
            raise
        return {}, None
    return {THINKING: False} if THINKING in template_variables(template) else {}, positions


def _as_text(recipe: Recipe, base: Recipe, engine: str) -> str:
    """Return the recipe as YAML, each key under its description."""
    kind, target = recipe.drafter.kind, recipe.target.model
    lines = [
        f"# Written by `draftsmith init`: a {kind} drafter of {target} for {ENGINES[engine]}.",
        "# `draftsmith plan FILE` and `draftsmith doctor FILE` come first.",
        "",
        f"name: {recipe.name}",
    ]
    options = load_drafter_class(recipe.drafter.kind).config_class.Options
    written: set[str] = set()
    for section, keys in KEYS.items():
        parts = section.split(".")
        for depth in range(len(parts)):
            path = ".".join(parts[: depth + 1])
            if path not in written:
                lines += [""] * (depth == 0) + ["  " * depth + f"{parts[depth]}:"]
                written.add(path)
        model: Any = recipe
        for part in parts:
            model = getattr(model, part)
        for key in keys:
            lines += _entry(len(parts), key, model.model_dump()[key], type(model).model_fields[key].description)
        if section == "drafter":
            lines.append("  options:")
            for key, value in recipe.drafter.options.items():
                lines += _entry(2, key, value, options.model_fields[key].description)
            lines += ["", "# Arguments of transformers.TrainingArguments, and global_batch_size.", "train:"]
            for key, value in base.train.items():
                lines += _entry(1, key, value, None)
    methods = [method.model_dump(exclude_defaults=True) for method in base.eval.methods]
    lines += ["  methods:", *(f"    - {_inline(method)}" for method in methods)]
    return "\n".join(lines) + "\n"


def _entry(depth: int, key: str, value: Any, description: str | None) -> list[str]:
    """Return the lines of a key: its description as a comment, and its value."""
    indent = "  " * depth
    comment = textwrap.wrap(description or "", WIDTH - len(indent))
    return [*(f"{indent}# {line}" for line in comment), f"{indent}{key}: {_inline(value)}"]


def _inline(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n...\n").strip()
