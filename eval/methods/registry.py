"""Registry of the methods that need no trained drafter: each is one file in this folder.

The file's name is the method's `eval.methods[].kind` in a recipe; its attribute `METHOD` is a class with `Options` and
`make`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.eval.decoding.method import Method
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.loading import explain
from draftsmith.recipes.schema import MethodConfig


@dataclass(frozen=True)
class DecodingSetting:
    """Target, sampling and limits that a method is built for.

    Args:
        tokens_folder: Folder of the run's distilled tokens, for methods that are fitted on them.
        tokenizer: The target's tokenizer.
    """

    recipe: MethodConfig
    target: PreTrainedModel
    tokenizer: Any
    tokens_folder: Path
    max_length_tokens: int
    sampling: Sampling
    generator: torch.Generator | None = None


def make_method(setting: DecodingSetting) -> Method:
    """Build the method that `kind` and `options` of `setting.recipe` choose; errors as in `load_method_class`."""
    method_class, options = load_method_class(setting.recipe)
    return method_class.make(options, setting)


def load_method_class(config: MethodConfig) -> tuple[Any, Any]:
    """Return the method class that `config.kind` names, and its options, validated and with defaults filled in.

    Raises:
        UserError: The method's kind does not exist, or an option is unknown or wrong.
    """
    kinds = method_kinds()
    if config.kind not in kinds:
        raise UserError(f"eval.methods kind `{config.kind}` does not exist: use drafter, {', '.join(kinds)}")
    method_class: Any = importlib.import_module(f"draftsmith.eval.methods.{config.kind}").METHOD
    try:
        return method_class, method_class.Options.model_validate(config.options)
    except ValidationError as error:
        raise UserError(f"method {config.name}: {explain(method_class.Options, error, 'options')}") from None


def method_kinds() -> list[str]:
    """Return the names of this folder's files that define a `METHOD`."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if "\nMETHOD = " in file.read_text(encoding="utf-8")]
