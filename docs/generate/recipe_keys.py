"""The recipe reference: every key with its type, default and meaning, from the schema itself.

make reference      # writes docs/reference/recipes.md and options.md; a test keeps them so

What a key means is said once, in its `description`. A key without one is a defect: `undescribed_keys` names it.
"""

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generate.markdown import cell
from pydantic import BaseModel

from draftsmith.eval.methods.registry import method_kinds
from draftsmith.models.base.registry import drafter_kinds, load_drafter_class
from draftsmith.recipes.schema import MethodRecipe, MixedSourceRecipe, Recipe

FOLDER = Path(__file__).parents[1] / "reference"
ENGINES = ("transformers", "vllm", "openai")
RECIPES_HEAD = """# Every key of a recipe

To look up a key: what it means, what it may be, and what it is if you leave it out.

Made by `make reference` from the schema that reads recipes
([`schema.py`](../../recipes/schema.py)); a test keeps it so. A key that does not exist is refused, with the nearest
that does. On the command line a key is written with dots, `data.distill.max_new_tokens=256`, its value in YAML;
`key=@FILE` takes the value from a YAML file. Texts that begin with `~/` begin at your home. What drafters, methods and
engines have as `options` is on [a page of its own](options.md).

[`quickstart.yaml`](../../recipes/quickstart.yaml) is a commented example.
"""
OPTIONS_HEAD = """# Options of drafters, methods and engines

To look up what goes under an `options` key of a recipe, by what it is for. The other keys: [recipes](recipes.md).

Made by `make reference` from the `Options` in the code; a test keeps it so.
"""
TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}


def pages() -> dict[Path, str]:
    """Each page and its text."""
    recipes = [RECIPES_HEAD]
    for key, model in sections():
        recipes += [f"## `{key}`\n" if key else "## The recipe itself\n", *_section(model)]
    options = [OPTIONS_HEAD, "## `drafter.options`\n\nBy kind; [what each kind is](../concepts/drafters.md).\n"]
    for kind in drafter_kinds():
        options += [f"### Drafter `{kind}`\n", *_table(load_drafter_class(kind).config_class.Options)]
    options.append("## `eval.methods[].options`\n\nOf methods that need no training, by kind.\n")
    for kind in method_kinds():
        options += [f"### Method `{kind}`\n", *_table(_options(f"eval.methods.{kind}", "METHOD"))]
    options.append("## `data.distill.options`\n\nBy engine; [who answers](../guides/data.md#who-answers).\n")
    for engine in ENGINES:
        options += [f"### Engine `{engine}`\n", *_table(_options(f"data.engines.{engine}_engine", "ENGINE"))]
    return {FOLDER / "recipes.md": "\n".join(recipes), FOLDER / "options.md": "\n".join(options)}


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section of a recipe by its dotted key, the recipe itself first; entries of lists end with []."""
    found: list[tuple[str, type[BaseModel]]] = [("", Recipe)]
    while found:
        key, model = found.pop(0)
        yield key, model
        inner = [(f"{key}.{name}".lstrip("."), _model_in(field.annotation)) for name, field in _own_fields(model)]
        found = [(name, each) for name, each in inner if each is not None] + found


def undescribed_keys() -> list[str]:
    """Keys that do not say what they mean."""
    options = {
        **{f"drafter {kind}": load_drafter_class(kind).config_class.Options for kind in drafter_kinds()},
        **{f"method {kind}": _options(f"eval.methods.{kind}", "METHOD") for kind in method_kinds()},
        **{f"engine {engine}": _options(f"data.engines.{engine}_engine", "ENGINE") for engine in ENGINES},
    }
    return [
        f"{place}: {name}"
        for place, model in [*sections(), *options.items()]
        for name, field in _own_fields(model)
        if _model_in(field.annotation) is None and not field.description
    ]


def _options(module: str, attribute: str) -> type[BaseModel]:
    options: type[BaseModel] = getattr(importlib.import_module(f"draftsmith.{module}"), attribute).Options
    return options


def _own_fields(model: type[BaseModel]) -> list[tuple[str, Any]]:
    """Of an entry of a mixture only what the section around it does not have."""
    fields = model.model_fields.items()
    return [(name, each) for name, each in fields if model is not MixedSourceRecipe or name in ("source", "weight")]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, alone or as a list of such."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _section(model: type[BaseModel]) -> list[str]:
    words = inspect.getdoc(model) or ""
    more = "\n\nThe other keys are those of `data.conversations`." if model is MixedSourceRecipe else ""
    own = [] if words == inspect.getdoc(BaseModel) or not words else [words + more + "\n"]
    return [*own, *_table(model)]


def _table(model: type[BaseModel]) -> list[str]:
    schema = model.model_json_schema()
    rows = [
        f"| `{name}` | {_type(schema['properties'][name], schema)} | {_default(field)} | {_meaning(field)} |"
        for name, field in _own_fields(model)
    ]
    return ["| key | is | default | what it means |", "|---|---|---|---|", *rows, ""] if rows else []


def _type(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """In words, from JSON Schema."""
    if "$ref" in value:
        return _type(schema["$defs"][value["$ref"].rsplit("/", 1)[-1]], schema)
    if "anyOf" in value:
        return " or ".join(_type(each, schema) for each in value["anyOf"] if each.get("type") != "null")
    if "const" in value or "enum" in value:
        return ", ".join(f"`{each}`" for each in value.get("enum", [value.get("const")]))
    if value.get("type") == "array":
        inner = _type(value.get("items", {}), schema)
        return "list of sections" if inner == "section" else f"list of {inner}"
    if value.get("type") == "object":
        return "section" if "properties" in value else "mapping"
    bounds = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    words = [f"{word} {value[bound]:g}" for bound, word in bounds.items() if bound in value]
    return " ".join([TYPES.get(value.get("type", ""), "anything"), *words])


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, list) and value and isinstance(value[0], MethodRecipe):
        return "one greedy chain"
    return "" if value is None else f"`{json.dumps(value)}`"


def _meaning(field: Any) -> str:
    model = _model_in(field.annotation)
    if field.description:
        return cell(field.description)
    return cell((inspect.getdoc(model) or "").split("\n\n")[0]) if model else ""


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
