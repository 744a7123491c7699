"""mkdocs hook: the reference pages that are made from the code when the site is built (`make docs`).

`reference/recipes.md` and `options.md` from the schema and the `Options` classes, `commands.md` from the command line
(typer's own documentation), `formats.md` from the rules of the export formats. None of them is committed. A recipe key
without a description is an error.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ENGINES = ("transformers", "vllm", "openai")
TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
RECIPES_HEAD = """# Every key of a recipe

To look up a key: what it means, what it may be, and what it is if you leave it out.

A key that does not exist is refused, with the nearest that does. On the command line a key is written with dots,
`data.distill.max_new_tokens=256`, its value in YAML; `key=@FILE` takes the value from a YAML file. Texts that begin
with `~/` begin at your home. What drafters, methods and engines have as `options` is on
[a page of its own](options.md). [`quickstart.yaml`](../../recipes/quickstart.yaml) is a commented example.
"""
OPTIONS_HEAD = """# Options of drafters, methods and engines

To look up what goes under an `options` key of a recipe, by what it is for. The other keys: [recipes](recipes.md).
"""
COMMANDS_HEAD = """# Every command

To look up a command: what it does, what it takes, and what its options are. `draftsmith COMMAND --help` says the same.

RECIPE is a YAML file, or the name of a shipped recipe (`quickstart`); after it any key may be given another value, as
`train.learning_rate=1e-4` ([every key](recipes.md)). All commands may be interrupted and continue where they stopped.
The exit code is 0 if all went well, 2 for a mistake in what was asked, which is told in one sentence.

Training over several processes is `accelerate launch train/train_parallel.py RECIPE [section.key=value ...]`:
[scaling](../guides/scaling.md).

"""

FORMATS_HEAD = """# Where a drafter can go

Which engine or other code loads which kind of drafter, how that was verified, or why not and what to train instead.

Made by `make docs` from the rules that `draftsmith export` and `draftsmith doctor` apply.

    draftsmith doctor mine.yaml --serve vllm                 # before training: can it be served, how, or why not
    draftsmith export mine.yaml --to vllm                    # after it: the folder, and the command that serves it
    draftsmith import mine.yaml --from user/repo             # a published checkpoint as this run's drafter

Every export is compared with its reader's rules (names, shapes, config; read from the reader's source, which the rules
name), its config against the target's, and its values, read back, against the drafter's. *Real vLLM* means more: vLLM
0.32 loads the folder, no greedy token changes, and at every position it accepts as often as our decoder's chain
(`tests/models/formats/test_vllm_serves.py`: on a CPU, for the embedded target, a Llama, with `first_token: false` where
a drafter has that option; with a row for the first token, which engines have not, a few drafts differ). Of DFlash that
holds for layers that share a norm of keys: on a CPU vLLM norms those of all layers with the first layer's weight.
DSpark needs vLLM's newer runner, so a GPU. Qwen's classes in vLLM, vLLM 0.33 and SGLang were not run. The way to a
running server, and what goes wrong: [serving.md](../guides/serving.md).
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    for uri, text in pages().items():
        files.append(File.generated(config, uri, content=text))
    return files


def pages() -> dict[str, str]:
    """The text of each page by its place in the site."""
    return {
        "reference/recipes.md": recipes_page(),
        "reference/options.md": options_page(),
        "reference/commands.md": commands_page(),
        "reference/formats.md": formats_page(),
    }


def formats_page() -> str:
    """Where every kind can go, how it is served there, or why not."""
    # Imported in functions: mkdocs loads its hooks before it knows whether it will build anything.
    from draftsmith.models.base.registry import drafter_kinds
    from draftsmith.models.formats.exporting import EXPORTERS, FORMATS, no_place

    columns = " | ".join(f"`--to {to}` ({what})" for to, what in FORMATS.items())
    lines = [FORMATS_HEAD, f"| kind | {columns} |", "|---|" + "---|" * len(FORMATS)]
    conditions: dict[tuple[str, str, str], list[str]] = {}
    for kind in drafter_kinds():
        cells = []
        for to in FORMATS:
            exporter = EXPORTERS.get((kind, to))
            if exporter is None:
                cells.append(f"no: {no_place(kind, to)}")
                continue
            served = f"as `{exporter.method}`" if exporter.method else "yes"
            served += " with `parallel_drafting`" if exporter.parallel else ""
            cells.append(f"{served}; {'real vLLM' if in_real_vllm(kind, to) else 'checked by the rules'}")
            for each in exporter.refusals:
                why = re.sub(r"{config\.(?:target_config\[)?(\w+)\]?}", r"`\1`", each.why)
                told = (kind, each.drafters, f"{why}: train with {each.recipe_line}")
                conditions.setdefault(told, []).append(to)
        lines.append(f"| `{kind}` | {' | '.join(cells)} |")
    lines += ["", "What a format takes of a kind depends on its options and on the target:", ""]
    lines += ["| kind | with | `--to` | refused, and what to train with |", "|---|---|---|---|"]
    for (kind, drafters, why), formats in conditions.items():
        lines.append(f"| `{kind}` | {drafters} | {', '.join(formats)} | {why} |")
    return "\n".join(lines) + "\n"


def in_real_vllm(kind: str, to: str) -> bool:
    """Whether real vLLM is shown this export by a test. DSpark needs its newer runner, which needs Triton."""
    return to in ("vllm", "speculators") and kind != "dspark"


def commands_page() -> str:
    """What typer says of every command, with their names as the headings."""
    import typer
    from typer.cli import get_docs_for_click

    from draftsmith.eval.commands.cli import app

    command: Any = typer.main.get_command(app)
    docs = get_docs_for_click(obj=command, ctx=typer.Context(command), name="draftsmith")
    return COMMANDS_HEAD + re.sub(r"^#", "##", docs, count=1).replace("```console\n", "```text\n")


def recipes_page() -> str:
    """Every section of a recipe."""
    lines = [RECIPES_HEAD]
    for key, model in sections():
        lines += [f"## `{key}`\n" if key else "## The recipe itself\n", *_section(model)]
    return "\n".join(lines)


def options_page() -> str:
    """The `options` of every drafter, method and engine."""
    from draftsmith.eval.methods.registry import method_kinds
    from draftsmith.models.base.registry import drafter_kinds, load_drafter_class

    lines = [OPTIONS_HEAD, "## `drafter.options`\n\nBy kind; [what each kind is](../concepts/drafters.md).\n"]
    for kind in drafter_kinds():
        lines += [f"### Drafter `{kind}`\n", *_table(load_drafter_class(kind).config_class.Options)]
    lines.append("## `eval.methods[].options`\n\nOf methods that need no training, by kind.\n")
    for kind in method_kinds():
        lines += [f"### Method `{kind}`\n", *_table(_options(f"eval.methods.{kind}", "METHOD"))]
    lines.append("## `data.distill.options`\n\nBy engine; [who answers](../guides/data.md#who-answers).\n")
    for engine in ENGINES:
        lines += [f"### Engine `{engine}`\n", *_table(_options(f"data.engines.{engine}_engine", "ENGINE"))]
    return "\n".join(lines)


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section of a recipe by its dotted key, the recipe itself first; entries of lists end with []."""
    from draftsmith.recipes.schema import Recipe

    found: list[tuple[str, type[BaseModel]]] = [("", Recipe)]
    while found:
        key, model = found.pop(0)
        yield key, model
        inner = [(f"{key}.{name}".lstrip("."), _model_in(field.annotation)) for name, field in _own_fields(model)]
        found = [(name, each) for name, each in inner if each is not None] + found


def cell(text: str) -> str:
    """Text from code for a cell of a table: one line, without characters that mean something to Markdown."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))  # code is at the odd places
    plain = [part if number % 2 else re.sub(r"([*<_\[\]])", r"\\\1", part) for number, part in enumerate(parts)]
    return "".join(plain).replace("|", "\\|")


def _options(module: str, attribute: str) -> type[BaseModel]:
    options: type[BaseModel] = getattr(importlib.import_module(f"draftsmith.{module}"), attribute).Options
    return options


def _own_fields(model: type[BaseModel]) -> list[tuple[str, Any]]:
    """The fields of a section; of an entry of a mixture only those that the section around it does not have."""
    in_mixture = model.__name__ == "MixedSourceRecipe"
    return [(name, each) for name, each in model.model_fields.items() if not in_mixture or name in ("source", "weight")]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, alone or as a list of such."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _section(model: type[BaseModel]) -> list[str]:
    words = inspect.getdoc(model) or ""
    if words and model.__name__ == "MixedSourceRecipe":
        words += "\n\nThe other keys are those of `data.conversations`."
    own = [] if not words or words == inspect.getdoc(BaseModel) else [words + "\n"]
    return [*own, *_table(model)]


def _table(model: type[BaseModel]) -> list[str]:
    schema = model.model_json_schema()
    rows = [
        f"| `{name}` | {_type(schema['properties'][name], schema)} | {_default(field)} | {_meaning(name, field)} |"
        for name, field in _own_fields(model)
    ]
    return ["| key | is | default | what it means |", "|---|---|---|---|", *rows, ""] if rows else []


def _type(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """A JSON Schema in words."""
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
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        return "one greedy chain"
    return "" if value is None or isinstance(value, BaseModel) else f"`{json.dumps(value)}`"


def _meaning(name: str, field: Any) -> str:
    """
    Raises:
        ValueError: The key has no description.
    """
    model = _model_in(field.annotation)
    words = field.description or (inspect.getdoc(model) or "").split("\n\n")[0] if model else field.description
    if not words:
        raise ValueError(f"recipe key `{name}` has no description")
    return cell(words)
