"""Ways of proposing tokens, behind three calls. The verification loop does not know which one it runs.

A method that is no trained drafter is one file in this folder, named by its recipe key (`eval.methods[].kind`), with a
module attribute `METHOD`: a class with `Options` and `make`.

Shapes: P prompt, n newly committed tokens, F features (those of the session's layers, one after the other), N tree
nodes, V vocabulary.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.eval.trees.sampling import Sampling
from draftsmith.eval.trees.tree import DraftTree, root_only
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loading import explain
from draftsmith.recipes.schema import MethodRecipe

AUTOREGRESSIVE = "autoregressive"


class Method(Protocol):
    """How a round's draft tree comes about.

    start: a new sequence; features [P, F] are the target's *at* the prompt's tokens.
    propose: the tree under the newest committed token.
    observe: tokens were committed; features [n, F] are the target's that *predicted* them, at the token before each.
    """

    name: str

    def start(self, prompt_ids: list[int], features: Tensor) -> None: ...

    def propose(self) -> DraftTree: ...

    def observe(self, committed_ids: list[int], features: Tensor) -> None: ...


class Autoregressive:
    """Proposes nothing: the same loop becomes the baseline that every speedup is measured against."""

    name = AUTOREGRESSIVE

    def __init__(self) -> None:
        self._newest = -1

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        pass

    def propose(self) -> DraftTree:
        return root_only(self._newest)

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        self._newest = committed_ids[-1]


@runtime_checkable
class ReadsLogits(Protocol):
    """A method that learns from what the target said of the whole tree, as Lookahead decoding does."""

    def read_logits(self, tree: DraftTree, logits: Tensor) -> None:
        """After every verification forward, before `observe`. logits [N, V]."""


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
    """The method that a recipe's `kind` and `options` ask for.

    Raises:
        UserError: There is no such kind, or an option is unknown or wrong.
    """
    recipe = setting.recipe
    kinds = method_kinds()
    if recipe.kind not in kinds:
        raise UserError(f"eval.methods kind `{recipe.kind}` does not exist: use drafter, {', '.join(kinds)}")
    method_class: MethodClass = importlib.import_module(f"draftsmith.eval.methods.{recipe.kind}").METHOD
    try:
        options = method_class.Options.model_validate(recipe.options)
    except ValidationError as error:
        raise UserError(f"method {recipe.name}: {explain(method_class.Options, error, 'options')}") from None
    return method_class.make(options, setting)


def method_kinds() -> list[str]:
    """Files of this folder that define a `METHOD`."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if "\nMETHOD = " in file.read_text(encoding="utf-8")]
