"""Loading of recipes: YAML, `extends`, dotted overrides, validation; errors name the file and the key.

`extends: NAME` starts from another file's values. Mappings merge key by key; lists and scalars replace. `null` removes
an inherited key, so that its default applies. A changed `kind` or `engine` drops the `options` next to it, which belong
to the old one. Files in `base/` are only extended: they need no `name`. The override `drafter.kind` also drops
`drafter.init`, and is added to the run's name. `{kind}` in the name of a method stands for `drafter.kind`.

A recipe named by `drafter.init`, alone or with overrides (`quickstart drafter.kind=eagle`), is the first stage of a
training in two stages. It has its own drafter and training; target, data, seed and `runs_dir` are those of the recipe
that names it, so that both stages learn from the same tokens.
"""

import importlib.resources
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from draftsmith.errors import UserError, did_you_mean, reason
from draftsmith.files import expand_home
from draftsmith.recipes.removed import drop_unset, removal_of
from draftsmith.recipes.run_folder import with_recorded_date
from draftsmith.recipes.schema import SEED_SUFFIX, DrafterRecipe, Recipe

MOST_ALIASES = 20  # nested they stand for some 1,500 times their values at most
MOST_CHARACTERS, MOST_FILES = 2**20, 20  # of a recipe file, and in a chain of `extends`
RECIPE_SUFFIXES = (".yaml", ".yml")
SUMMARY_CHARS = 130


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read and validate a recipe.

    Args:
        path: A YAML file, or the bare name of a shipped recipe (`quickstart`).
        overrides: `section.key=value` pairs with values in YAML, or `section.key=@FILE` for a YAML file's content.

    Raises:
        UserError: A file is missing or not YAML, the recipe is no mapping, or a key is unknown or of the wrong type.
    """
    file = find_recipe(path)
    files = _with_parents(file)
    values: dict[str, Any] = {}
    for own_values in reversed(files.values()):
        values = _merged(values, own_values)
    # The kind first, since options and names given with it replace its own.
    for override in sorted(overrides or [], key=lambda each: not each.startswith("drafter.kind=")):
        _apply_override(values, override)
    if "extends" in values:
        raise UserError("key `extends` cannot be an override: write it into a recipe file")
    _name_methods(values)
    try:
        recipe = Recipe.model_validate(drop_unset(values))
    except ValidationError as error:
        place = _locate(error.errors()[0]["loc"], list(files), overrides or [])
        raise UserError(f"{place}: {explain(Recipe, error)}") from None
    except RecursionError:  # an alias that contains itself
        raise UserError(f"{file} is nested too deeply: resolve its YAML aliases") from None
    if unwritable := _unwritable(recipe.model_dump()):
        raise UserError(
            f"{file}: the value of key `{unwritable}` contains a character that no text file can hold: remove it"
        )
    return with_recorded_date(recipe)


def _name_methods(values: dict[str, Any]) -> None:
    """Replace `{kind}` in the names of methods by the drafter's kind, in place."""
    drafter, evaluation = values.get("drafter"), values.get("eval")
    kind = drafter.get("kind") if isinstance(drafter, dict) else None
    methods = evaluation.get("methods") if isinstance(evaluation, dict) else None
    for method in methods if isinstance(methods, list) else []:
        if isinstance(method, dict) and isinstance(method.get("name"), str):
            method["name"] = method["name"].replace("{kind}", str(kind or DrafterRecipe().kind))


def _with_parents(file: Path) -> dict[Path, dict[str, Any]]:
    """Read a recipe file and the files that it extends, nearest first; return their values without `extends`."""
    files: dict[Path, dict[str, Any]] = {}
    parent: Any = file
    while parent is not None:
        values = _read_yaml(parent)
        if not isinstance(values, dict):
            raise UserError(
                f"{parent} must contain a YAML mapping of sections (name, target, data, ...), not {_kind(values)}"
            )
        name = values.pop("extends", None)
        files[parent], child, parent = values, parent, None
        if name is None:
            break
        place = _locate(("extends",), [child], [])
        if not isinstance(name, str):
            raise UserError(f"{place}: key `extends` must be the name or the path of one recipe, not {_kind(name)}")
        if len(files) == MOST_FILES:
            raise UserError(f"{place}: key `extends`: more than {MOST_FILES} files in a chain: join some of them")
        try:
            parent = find_recipe(name, child)
        except UserError as error:
            raise UserError(f"{place}: key `extends`: {error}") from None
        if any(parent.samefile(other) for other in files):
            names = " extends ".join(str(each) for each in (*files, parent))
            raise UserError(f"{place}: key `extends` goes in a circle ({names}): take it out of one of these files")
    return files


def _merged(parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    """Merge the values of a recipe file over those of the file that it extends."""
    merged = dict(parent)
    if any(key in parent and key in child and child[key] != parent[key] for key in ("kind", "engine")):
        merged.pop("options", None)
    for key, value in child.items():
        if value is None and merged.get(key) is not None:
            del merged[key]
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = value
    return merged


def _locate(location: tuple[int | str, ...], files: list[Path], overrides: list[str]) -> str:
    """Return `file, line N` of a key, in the first file with the longest part of its location.

    For an overridden key, return the first file without a line.
    """
    dotted = ".".join(map(str, location)) + "."
    if any(dotted.startswith(override.partition("=")[0] + ".") for override in overrides):
        return str(files[0])
    place, longest = str(files[0]), 0
    for file in files:
        node = yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader)
        for depth, part in enumerate(location, 1):
            entries: dict[int | str, tuple[yaml.Node, yaml.Node]] = {}  # key and value; of a list the value twice
            if isinstance(node, yaml.SequenceNode):
                entries = {index: (value, value) for index, value in enumerate(node.value)}
            elif isinstance(node, yaml.MappingNode):
                entries = {key.value: (key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}
            if part not in entries:
                break
            key_node, node = entries[part]
            if depth > longest:
                place, longest = f"{file}, line {key_node.start_mark.line + 1}", depth
    return place


def _read_yaml(file: Path) -> Any:
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(MOST_CHARACTERS + 1)
        if len(text) > MOST_CHARACTERS:
            raise UserError(f"{file} has more than {MOST_CHARACTERS:,} characters, too many for a recipe: shorten it")
        return parse_yaml(text)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid YAML: {reason(error)}") from None


class _RecipeLoader(yaml.SafeLoader):
    """YAML's safe loader, which refuses repeated keys, and many aliases: few of them stand for millions of values."""

    num_aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.num_aliases += self.check_event(yaml.AliasEvent)
        if self.num_aliases > MOST_ALIASES:
            raise yaml.YAMLError(f"it has more than {MOST_ALIASES} aliases: write their values out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in keys:
                    raise yaml.MarkedYAMLError(problem=f"the key {key.value} is repeated", problem_mark=key.start_mark)
                keys.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Parse plain values from YAML, as `yaml.safe_load` does, but refuse repeated keys and many aliases.

    Raises:
        yaml.YAMLError: The text is not YAML, repeats a key, or has too many aliases.
    """
    return yaml.load(text, _RecipeLoader)


def _unwritable(value: Any, key: str = "") -> str | None:
    """Find the first key with a text that contains NUL, or half a surrogate pair, which is not UTF-8."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        keys = (_unwritable(part, f"{key}.{name}".removeprefix(".")) for name, part in parts)
        return next(filter(None, keys), None)
    return key if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value) else None


def find_recipe(path: str | Path, child: Path | None = None) -> Path:
    """Return the recipe's file: `path` itself, or the shipped recipe of that name.

    Args:
        child: Recipe file that extends it: relative paths start at its folder, and shipped names include `base/NAME`.
    """
    file = expand_home(path)
    places = [file] if child is None else [child.parent / file, shipped_folder() / f"{file}.yaml"]
    for place in places:
        if place.is_file():
            return place
    shipped = shipped_files()
    # A folder in the path means a file of the user, unless it is the folder of the shipped recipes.
    name = file.name.removesuffix(".yaml")  # no stem: llama3.1-8b-eagle3
    if str(file.parent) in (".", "recipes"):
        if name in shipped:
            return shipped[name]
        if removal := removal_of("recipe", name):
            raise UserError(f"the recipe {removal}")
    if (resolved := file / "recipe.yaml").is_file():
        raise UserError(f"{path} is a run's folder, not a recipe: name its recipe, {resolved}")
    hint = did_you_mean(name, shipped, "`draftsmith recipes` lists the shipped ones", cutoff=0.6)
    raise UserError(f"recipe file {path} does not exist: {hint}")


def shipped_folder() -> Path:
    """Return the folder of the shipped recipes."""
    return Path(str(importlib.resources.files("draftsmith.recipes")))


def shipped_files() -> dict[str, Path]:
    """Return the files of the shipped recipes by name."""
    return {recipe.stem: recipe for recipe in sorted(shipped_folder().glob("*.yaml"), key=lambda file: file.stem)}


def summary_of(file: Path) -> str:
    """Return the first sentence of a recipe file's opening comment; if it is long, only the part before its colon."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    sentence = re.split(r"\.(?: |$)", " ".join(line.lstrip("# ") for line in lines), maxsplit=1)[0]
    return sentence if len(sentence) <= SUMMARY_CHARS else sentence.partition(":")[0]


def _apply_override(values: dict[str, Any], override: str) -> None:
    """Set `a.b.c=value` in place."""
    dotted_key, separator, text = override.partition("=")
    if not separator or not dotted_key:
        raise UserError(f"override `{override}` must look like section.key=value, for example train.learning_rate=1e-4")
    *parents, leaf = dotted_key.split(".")
    section = values
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise UserError(f"override `{override}`: `{parent}` is {_kind(section)}, not a section with keys")
    if text.startswith("@"):  # not valid YAML
        section[leaf] = _read_yaml(expand_home(text[1:]))
        return
    try:
        value = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"override `{override}`: the value is not valid YAML: {reason(error)}") from None
    if isinstance(value, str):  # YAML 1.1 reads `1e-4` as text; people who type it mean the number
        with suppress(ValueError):
            value = float(value)
    if dotted_key == "drafter.kind" and section.get(leaf, DrafterRecipe().kind) != value:
        section.pop("options", None)
        section.pop("init", None)
        values["name"] = f"{values.get('name')}-{value}"
    section[leaf] = value


def explain(schema: type[BaseModel], error: ValidationError, section: str = "") -> str:
    """Return a sentence about the first validation error: the key as `section.key`, what is wrong, and what is valid.

    Args:
        section: Dotted key of the recipe section that `schema` describes; empty for a whole recipe.
    """
    first = error.errors()[0]
    location = first["loc"]
    key = ".".join(str(part) for part in ([section] if section else []) + list(location))
    if first["type"] == "extra_forbidden":
        model: Any = schema  # the section of the key
        for part in location[:-1]:
            if not isinstance(part, int):
                annotation = model.model_fields[part].annotation
                inner = [each for each in getattr(annotation, "__args__", ()) if isinstance(each, type)]
                model = inner[0] if inner else annotation
        valid = list(model.model_fields)
        if removal := removal_of(key):
            return f"key {removal}"
        hint = did_you_mean(str(location[-1]), valid, f"valid keys there are {', '.join(sorted(valid))}")
        return f"unknown key `{key}`: {hint}"
    if first["type"] == "literal_error":
        named = ".".join(part for part in key.split(".") if not part.isdigit())
        if removal := removal_of(named, str(first["input"])):
            return f"key `{key}`: {removal}"
    if first["type"] == "missing":
        return f"key `{key}` is missing: add it"
    message = first["msg"].removeprefix("Value error, ")
    value = first["input"]
    shown = "" if isinstance(value, dict) else f", not {value!r}"
    return f"key `{key}`: {message[0].lower()}{message[1:]}{shown if len(shown) <= 100 else shown[:100] + '...'}"


def _kind(value: Any) -> str:
    return {type(None): "empty", list: "a list", dict: "a mapping", str: "text"}.get(type(value), f"`{value!r}`")


def _with_values(text: str) -> tuple[str, list[str]]:
    """Split a recipe with its own values, as `quickstart drafter.kind=eagle`, into its file and its overrides."""
    try:
        file, *overrides = [text] if Path(text).is_file() else shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text!r} is not a recipe with overrides: {str(error).lower()}") from None
    return file, overrides


def load_compared(arguments: Sequence[str]) -> tuple[list[Recipe], list[Recipe]]:
    """Load the recipes of a comparison.

    Args:
        arguments: Recipes; recipes with overrides in the same argument, as `"quickstart drafter.kind=eagle"`, which are
            named after these unless they set `name`; and `key=value` overrides for all recipes.

    Returns:
        The recipes to compare, and the same recipes without the overrides in their arguments.

    Raises:
        UserError: No recipe is named, or one cannot be loaded.
    """
    shared = [argument for argument in arguments if "=" in argument.partition(" ")[0]]
    compared, plain = [], []
    for argument in arguments:
        if argument in shared:
            continue
        file, own = _with_values(argument)
        plain.append(load_recipe(file, shared))
        recipe = load_recipe(file, [*shared, *own])
        pairs = [each.partition("=") for each in own]
        parts = [f"{key.rpartition('.')[2]}-{value}" for key, _, value in pairs if key != "drafter.kind"]
        if parts and not any(key == "name" for key, *_ in pairs):
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join([recipe.name, *parts]))
            recipe = load_recipe(file, [*shared, *own, f"name={name}"])
        compared.append(recipe)
    if not compared:
        raise UserError(
            'compare got no recipe: name some, as `draftsmith compare quickstart "quickstart drafter.kind=eagle"`'
        )
    return compared, plain


def first_stage(recipe: Recipe, names: tuple[str, ...] = ()) -> Recipe | None:
    """Return the recipe to train first, named by `drafter.init`; None if that is missing, a folder or a Hub id.

    A `train.seed` applies to both stages. If it differs from `seed`, as in a comparison over seeds, the first stage's
    name gets the same suffix as the comparison's recipes, so that they share it.

    Args:
        names: Names of the recipes whose `drafter.init` led to this one, to detect a circle.

    Raises:
        UserError: The named recipe does not exist, or recipes start from each other in a circle.
    """
    init, names = recipe.drafter.init, (*names, recipe.name)
    # A folder takes precedence over a shipped recipe of the same name.
    if init is None or Path(init).is_dir():
        return None
    try:
        file, overrides = _with_values(init)
        if "/" in file and not file.endswith(RECIPE_SUFFIXES):
            return None
        first = load_recipe(file, overrides)
    except UserError as error:
        raise UserError(f"key `drafter.init`: {error}") from None
    same = {key: getattr(recipe, key) for key in ("runs_dir", "seed", "target", "data")}
    train, number = first.train, 0
    seed = recipe.train.get("seed")
    if isinstance(seed, int):
        train, number = {**train, "seed": seed}, seed - recipe.seed
    name = f"{first.name}{SEED_SUFFIX}{number}" if number else first.name
    first = first.model_copy(update={**same, "train": train, "name": name})
    if name in names:
        raise UserError(f"key `drafter.init`: {' starts from '.join((*names, name))}: change `drafter.init` of one")
    first_stage(first, names)  # raises for a circle before any training
    return first
