"""How a method is found: a method that is no trained drafter is one file in this folder.

Its name is the recipe's key (`eval.methods[].kind`), and its module attribute `METHOD` a class with `Options` and
`make`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ValidationError
from transformers import PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.eval.decoding.method import Method
from draftsmith.eval.trees.verify import Sampling
from draftsmith.recipes.loading import explain
from draftsmith.recipes.schema import MethodRecipe


@dataclass(frozen=True)
class MethodSetting:
    """What a method is made for.

    Args:
        tokens_folder: The run's distilled tokens, for methods that are fitted on them.
        tokenizer: The target's.
    """

    recipe: MethodRecipe
    target: PreTrainedModel
    tokenizer: Any
    tokens_folder: Path
    max_length_tokens: int
    sampling: Sampling
    generator: torch.Generator | None = None


class MethodClass(Protocol):
    """What a file's `METHOD` is."""

    Options: type[BaseModel]

    def make(self, options: Any, setting: MethodSetting) -> Method: ...


def make_method(setting: MethodSetting) -> Method:
    """The method that a recipe's `kind` and `options` ask for; errors as `method_of`."""
    method_class, options = method_of(setting.recipe)
    return method_class.make(options, setting)


def method_of(recipe: MethodRecipe) -> tuple[MethodClass, Any]:
    """The class that `kind` names, and its options with the defaults.

    Raises:
        UserError: There is no such kind, or an option is unknown or wrong.
    """
    kinds = method_kinds()
    if recipe.kind not in kinds:
        raise UserError(f"eval.methods kind `{recipe.kind}` does not exist: use drafter, {', '.join(kinds)}")
    method_class: MethodClass = importlib.import_module(f"draftsmith.eval.methods.{recipe.kind}").METHOD
    try:
        options: Any = method_class.Options.model_validate(recipe.options)
    except ValidationError as error:
        raise UserError(f"method {recipe.name}: {explain(method_class.Options, error, 'options')}") from None
    return method_class, options


def method_kinds() -> list[str]:
    """Files of this folder that define a `METHOD`."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if "\nMETHOD = " in file.read_text(encoding="utf-8")]
