"""Common rules of all sections of a recipe: unknown keys are refused, `~` is expanded, names are valid for files."""

import re
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

from draftsmith.files import expand_home

NOT_PATHS = ("stop", "chat_template")  # keys of texts in which a ~ is only a character


def check_name(name: str) -> str:
    """Check a name that becomes the name of a file or folder, and return it.

    Raises:
        ValueError: The name is not valid.
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{,79}", name) is None:
        raise ValueError(
            "must be at most 80 letters, digits, ., _ and -, the first one a letter or digit, as it becomes a file's "
            "name"
        )
    return name


def _check_method_name(name: str) -> str:
    """Check a method's name, or `recipe/method`, as comparisons call it, and return it."""
    recipe_name, slash, own_name = name.partition("/")
    return check_name(recipe_name) + (slash and slash + check_name(own_name))


Day = Annotated[str, BeforeValidator(lambda day: date.fromisoformat(str(day)).isoformat())]
MethodName = Annotated[str, AfterValidator(_check_method_name)]


def _expand_home(value: Any) -> Any:
    """Expand `~` in all texts that start with it, at any depth."""
    if isinstance(value, dict):
        return {key: inner if key in NOT_PATHS else _expand_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_expand_home(inner) for inner in value]
    if isinstance(value, str) and re.match(r"~[\w.-]*(/|$)", value):
        expanded = expand_home(value)
        return value if expanded == Path(value) else str(expanded)
    return value


class Section(BaseModel):
    """A section of the recipe, which refuses unknown keys. Its paths may start with `~`."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _expand_paths(cls, values: Any) -> Any:
        return _expand_home(values)
