"""The tables of the README and of docs/reference, made from the code: `make reference` writes them into the pages.

A page says where they stand, by marks such as `<!-- made: recipes -->`: of the schema, the `Options` classes, the
command line, the exporters, the figures of a result, and what `targets.py` found. A recipe key without a description
is an error. A test compares the pages with what is made.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

from generate.engines import engines_evidence, engines_speed, engines_step
from generate.picture import NAMES, RESULT
from pydantic import BaseModel

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "guides" / "train.md",
    ROOT / "docs" / "measured" / "engines.md",
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
)
MADE_TEXT = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- /made -->)", re.DOTALL)
ENGINES = ("transformers", "vllm", "openai")
TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
TABLE_HEAD = ("| key | is | default | what it means |", "|---|---|---|---|")
# Formats whose every kind a test runs in a real engine.
RUN_IN_TESTS = {"vllm": "run in vLLM", "speculators": "run in vLLM", "gguf": "run in llama.cpp"}


def filled(page: str) -> str:
    """Return the text of a page with all that is made from the code as it is today."""

    def text(mark: re.Match[str]) -> str:
        made = "\n".join(MADE[mark[2]]()).strip()
        return f"{mark[1]}\n{made}\n\n{mark[3]}"

    return MADE_TEXT.sub(text, page)


def without_made(page: str) -> str:
    """Return the text of a page that was written by hand."""
    return MADE_TEXT.sub("", page)


def formats() -> list[str]:
    """Return the table of export formats by kind: how a drafter is served, or why not."""
    from draftsmith.models.base.registry import drafter_kinds, load_drafter_class
    from draftsmith.models.formats.exporting import EXPORTERS, FORMATS

    columns = " | ".join(f"`--to {to}` ({what})" for to, what in FORMATS.items())
    lines = [f"| kind | {columns} |", "|---|" + "---|" * len(FORMATS)]
    conditions: dict[tuple[str, str, str], list[str]] = {}
    for kind in drafter_kinds():
        cells = []
        for to in FORMATS:
            exporter = EXPORTERS.get((kind, to))
            if exporter is None:
                cells.append("-")
                continue
            served = f"as `{exporter.method}`" if exporter.method else "yes"
            served += " with `parallel_drafting`" if exporter.parallel else ""
            served += f" in {exporter.versions}" if exporter.versions else ""
            cells.append(f"{served}; {RUN_IN_TESTS.get(to, 'checked by the rules')}")
            for each in exporter.refusals:
                why = re.sub(r"{config\.[\w\[\]]*?(\w+)\]?}", r"`\1`", each.why)
                condition = (kind, each.drafters, f"{why}: train with {each.recipe_line}")
                conditions.setdefault(condition, []).append(to)
        lines.append(f"| `{kind}` | {' | '.join(cells)} |")
    reasons = {kind: load_drafter_class(kind).config_class.not_exported for kind in drafter_kinds()}
    lines += ["", *(f"- `{kind}` goes nowhere: {why}." for kind, why in reasons.items() if why)]
    lines += ["", "What a format takes of a kind depends on its options and on the target:", ""]
    lines += ["| kind | with | `--to` | refused, and what to train with |", "|---|---|---|---|"]
    kinds_of: dict[tuple[str, str, str], list[str]] = {}
    for (kind, drafters, why), places in conditions.items():
        kinds_of.setdefault((drafters, ", ".join(places), why), []).append(f"`{kind}`")
    for condition, kinds in kinds_of.items():
        lines.append(f"| {', '.join(kinds)} | {' | '.join(condition)} |")
    return lines


def kinds_by_engine() -> list[str]:
    """Return the README's table of kinds by engine."""
    from draftsmith.models.base.registry import drafter_kinds
    from draftsmith.models.formats.exporting import EXPORTERS

    def support(kind: str, to: str) -> str:
        if (kind, to) not in EXPORTERS:
            return "-"
        shown = "tested" if to in RUN_IN_TESTS else "by its rules"
        return f"{shown}, by the plugin" if (kind, to) == ("parallel", "vllm") else shown

    columns = {"vLLM": "vllm", "SGLang": "sglang", "llama.cpp": "gguf"}
    lines = [f"| kind | own loop | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for kind in drafter_kinds():
        lines.append(f"| `{kind}` | run | {' | '.join(support(kind, to) for to in columns.values())} |")
    return lines


def headline() -> list[str]:
    """Return the README's figures of SmolLM2: the drafter alone, the best way without training, and both."""
    rows = {name: row["over_tasks"] for name, row in _measured()["rows"].items() if name in NAMES}
    drafter, untrained, both = (rows[name] for name in ("tree-7@0", "prompt-lookup@0", "tree-7-lookup@0"))
    gains = [each["speedup_mean"] / untrained["speedup_mean"] for each in (drafter, both)]
    return [
        f"On **SmolLM2-135M-Instruct**, whose drafter has seen 24 million answer tokens: **{_speedup(drafter)}** by "
        f"itself, {_speedup(untrained)} by prompt lookup, **{_speedup(both)} by both**. "
        f"Training brings {gains[0]:.2f} times the best way without it, and {gains[1]:.2f} times with both."
    ]


def coder() -> list[str]:
    """Return the README's first figures, Qwen2.5-Coder-0.5B's: its drafter alone, lookups alone, and both."""
    file = ROOT / "docs" / "results" / "qwen" / "coder_0.5b_512.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["figures"]["rows"]
    alone, untrained, both = (rows[f"{name}@0"]["over_tasks"] for name in ("tree-6", "prompt-lookup", "tree-6-lookup"))
    return [
        "On **Qwen2.5-Coder-0.5B-Instruct** the drafter that ships, which has seen 1.2 million answer tokens so far, "
        f"generates **{_speedup(alone)}** the tokens per second of the same loop without a draft. Prompt lookup, the "
        f"best way without training: {_speedup(untrained)}. Both together: **{_speedup(both)}**, "
        f"{both['speedup_mean'] / untrained['speedup_mean']:.2f} times the best way without training."
    ]


def measured() -> list[str]:
    """Return the README's table of methods on a real model."""
    lines = [
        "| method | tokens a round (tau) | speedup, mean of six tasks (95 %) | all questions together |",
        "|---|---|---|---|",
    ]
    figures = _measured()
    for name, words in NAMES.items():
        row = figures["rows"][name]
        if name != "autoregressive@0":
            mean = row["over_tasks"]
            lines.append(f"| {words} | {mean['tau']:.2f} | {_speedup(mean)} | {row['speedup_mean']:.2f}x |")
    return lines


def adapted() -> list[str]:
    """Return the training guide's table: tau on a fine-tuned target, before and after training."""
    figures = json.loads((ROOT / "docs" / "results" / "smollm2" / "tuned.json").read_text(encoding="utf-8"))["figures"]
    lines = ["| drafter | target | chain | tree |", "|---|---|---|---|"]
    for row in figures["rows"]:
        lines.append(f"| {row['drafter']} | {row['target']} | {row['chain']:.2f} | {row['tree']:.2f} |")
    return lines


def _measured() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(RESULT.read_text(encoding="utf-8"))["figures"])


def _speedup(figures: dict[str, Any]) -> str:
    low, high = figures["speedup_interval"]
    return f"{figures['speedup_mean']:.2f}x ({low:.2f} to {high:.2f})"


def commands() -> list[str]:
    """Return every command by group: what it does, how it is called, and its options."""
    from typer.main import get_group

    from draftsmith.cli.console import PANELS
    from draftsmith.cli.main import app

    group: Any = get_group(app)
    lines: list[str] = []
    for panel in PANELS:
        lines += [f"## {panel}", ""]
        for name, command in group.commands.items():
            if command.rich_help_panel == panel:
                lines += _command(name, command)
    return lines


def _command(name: str, command: Any) -> list[str]:
    """Return the section of one command, an argument or an option a line of its table."""
    words, rows, types = [f"draftsmith {name}"], list[str](), get_type_hints(command.callback)
    for parameter in command.params:
        meaning = cell(getattr(parameter, "help", None) or "")
        if parameter.param_type_name == "argument":
            words.append(parameter.metavar or parameter.name.upper())
            rows.append(f"| `{words[-1]}` | | {meaning} |".replace("[section.key=value ...]`", "section.key=value`"))
        else:
            value = "" if parameter.is_flag else f" {_value(types[parameter.name])}"
            default = "" if parameter.is_flag or parameter.default in (None, "") else f"`{parameter.default}`"
            rows.append(f"| `{'`, `'.join(parameter.opts)}{value}` | {default} | {meaning} |")
    table = ["| argument, option | default | meaning |", "|---|---|---|", *rows, ""] if rows else []
    return [f"### `{name}`", "", inspect.cleandoc(command.help or ""), "", f"`{' '.join(words)}`", "", *table]


def _value(annotation: Any) -> str:
    """Return the placeholder of an option's value: its choices, or its type."""
    inner = [each for each in get_args(annotation) if each is not type(None)]
    if get_origin(annotation) is Literal:
        return "/".join(map(str, inner))
    return (
        _value(inner[0])
        if inner
        else {"int": "N", "float": "X", "str": "TEXT"}.get(annotation.__name__, annotation.__name__.upper())
    )


def recipes() -> list[str]:
    """Describe every section of a recipe."""
    lines: list[str] = []
    for key, model in sections():
        lines += [f"## `{key}`\n" if key else "## The recipe itself\n", *_section(model)]
    return lines


def drafters() -> list[str]:
    """Return the options of the kinds of drafters: in one table what several kinds share, then what each kind has."""
    from draftsmith.models.base.registry import drafter_kinds, load_drafter_class

    options = {kind: load_drafter_class(kind).config_class.Options for kind in drafter_kinds()}
    rows = {kind: _rows(model) for kind, model in options.items()}
    uses = Counter((row.name, row.type, row.meaning) for each in rows.values() for row in each)
    shared: dict[tuple[str, str, str], Counter[str]] = {}
    for row in (row for each in rows.values() for row in each):
        if uses[row.name, row.type, row.meaning] > 1:
            shared.setdefault((row.name, row.type, row.meaning), Counter())[row.default] += 1
    defaults = {key: counts.most_common(1)[0][0] for key, counts in shared.items()}
    table = [f"| `{name}` | {kind} | {defaults[name, kind, words]} | {words} |" for name, kind, words in shared]
    lines = ["### Shared by several kinds", "", *TABLE_HEAD, *table, ""]
    for kind, each in rows.items():
        lines += [f"### Drafter `{kind}`", ""]
        named = [
            f"`{row.name}`" + (f" (default {row.default or 'none'})" if row.default != default else "")
            for row in each
            if (default := defaults.get((row.name, row.type, row.meaning))) is not None
        ]
        lines += [f"Shared: {', '.join(named)}.", ""] if named else []
        own = [row.line for row in each if (row.name, row.type, row.meaning) not in shared]
        lines += [*TABLE_HEAD, *own, ""] if own else []
    return lines


def methods() -> list[str]:
    """Return the options of every method that needs no training."""
    from draftsmith.eval.methods.registry import method_kinds

    classes = {kind: importlib.import_module(f"draftsmith.eval.methods.{kind}").METHOD for kind in method_kinds()}
    return _option_tables("Method", {kind: method.Options for kind, method in classes.items()})


def engines() -> list[str]:
    """Return the options of every engine that answers prompts."""
    from draftsmith.data.engines.engine import engine_class

    options = {name: engine_class(name).Options for name in ENGINES}
    return _option_tables("Engine", options)


def _option_tables(what: str, options: dict[str, type[BaseModel]]) -> list[str]:
    """Return a heading and a table of options for each name."""
    return [line for name, model in options.items() for line in (f"### {what} `{name}`\n", *_table(model))]


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every section of a recipe with its dotted key, the recipe itself first; entries of lists end with []."""
    from draftsmith.recipes.schema import Recipe

    pending: list[tuple[str, type[BaseModel]]] = [("", Recipe)]
    while pending:
        key, model = pending.pop(0)
        yield key, model
        inner = [(f"{key}.{name}".lstrip("."), _model_in(field.annotation)) for name, field in _own_fields(model)]
        pending = [(name, each) for name, each in inner if each is not None] + pending


def cell(text: str) -> str:
    """Convert text to a cell of a Markdown table: one line, with special characters escaped."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))  # code is at the odd places
    plain = [part if number % 2 else re.sub(r"([*<_\[\]])", r"\\\1", part) for number, part in enumerate(parts)]
    return "".join(plain).replace("|", "\\|")


def _own_fields(model: type[BaseModel]) -> list[tuple[str, Any]]:
    """Return the fields of a section; of a mixture's entry only those that the enclosing section lacks."""
    in_mixture = model.__name__ == "MixedSourceRecipe"
    return [(name, each) for name, each in model.model_fields.items() if not in_mixture or name in ("source", "weight")]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a key holds, alone or in a list."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _section(model: type[BaseModel]) -> list[str]:
    """Return a section's docstring and its table of keys."""
    words = inspect.getdoc(model) or ""
    if words and model.__name__ == "MixedSourceRecipe":
        words += "\n\nThe other keys are those of `data.conversations`."
    own = [] if not words or words == inspect.getdoc(BaseModel) else [words + "\n"]
    return [*own, *_table(model)]


class Row(NamedTuple):
    """A key of a section, as cells of a table."""

    name: str
    type: str
    default: str
    meaning: str

    @property
    def line(self) -> str:
        return f"| `{self.name}` | {self.type} | {self.default} | {self.meaning} |"


def _rows(model: type[BaseModel]) -> list[Row]:
    """Return the keys of a section."""
    schema = model.model_json_schema()
    return [
        Row(name, _type(schema["properties"][name], schema), _default(field), _meaning(name, field))
        for name, field in _own_fields(model)
    ]


def _table(model: type[BaseModel]) -> list[str]:
    """Return a Markdown table of a section's keys."""
    rows = _rows(model)
    return [*TABLE_HEAD, *(row.line for row in rows), ""] if rows else []


def _type(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """Describe a JSON Schema in words."""
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
    """Return the description of a key as a table cell.

    Raises:
        ValueError: The key has no description.
    """
    model = _model_in(field.annotation)
    words = field.description or (inspect.getdoc(model) or "").split("\n\n")[0] if model else field.description
    if not words:
        raise ValueError(f"recipe key `{name}` has no description")
    return cell(words)


def targets() -> list[str]:
    """Return the table of features per target architecture, from the results of `targets.py`: a line per outcome."""
    table = json.loads(Path(__file__).with_name("targets.json").read_text(encoding="utf-8"))
    columns = ("logits", "attention", "trees", "drafter")
    names: dict[tuple[str, ...], list[str]] = {}
    for model_type, cells in table["targets"].items():
        outcome = tuple(_outcome(cells.get(name, "")) for name in columns)
        names.setdefault(outcome, []).append(f"`{model_type}`")
    lines = [f"| `model_type` | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for outcome in sorted(names, key=lambda outcome: -len(names[outcome])):
        lines.append(f"| {', '.join(names[outcome])} | {' | '.join(outcome)} |")
    not_built = ", ".join(f"`{name}`" for name in table["not_built"])
    return [*lines, "", f"With transformers {table['transformers']}. No tiny one can be made of: {not_built}."]


def _outcome(text: str) -> str:
    """Return a result of `targets.py` without the sizes of its tiny model and its general advice."""
    text = re.sub(
        r" (?:by|at) [\d.]+(?=$|,)| of [\d,]+ tokens| \((?:largest difference|\w+Error).*?\)(?=$|[;,])", "", text
    )
    text = re.sub(r" are of shape .*? wide,", " are no [batch, tokens, width],", text)
    text = re.sub(r"; decoder-only transformers .*|; use vLLM: .*", "", text)
    text = re.sub(r"(?: of)? \w+(?:Model|ForCausalLM)(?: \(\w+\))?", "", text)
    return text.replace("|", "/")


MADE = {
    made.__name__: made
    for made in (
        recipes,
        drafters,
        methods,
        engines,
        commands,
        formats,
        targets,
        kinds_by_engine,
        headline,
        coder,
        measured,
        adapted,
        engines_evidence,
        engines_speed,
        engines_step,
    )
}


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(filled(file.read_text(encoding="utf-8")), encoding="utf-8")
