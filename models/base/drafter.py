"""What every drafter q is: a `PreTrainedModel` that borrows the target's embedding and LM head.

A drafter is one file in this folder, named by its recipe key (`drafter.kind`), with a module attribute `DRAFTER`.

Alignment, the same for every drafter: group t is "x_t is the newest committed token". It predicts x_{t+1} (depth 1) to
x_{t+G} (depth G). Available then: the embedding of x_t and the target's feature h_{t-1}, the one that *predicted* x_t;
h_t does not exist yet, because the target has not processed x_t.

A drafter whose depths do not depend on each other's tokens decodes with a `DrafterDecoder` (ParallelSpec, Medusa);
one that reads its own drafted tokens with a `StepwiseDecoder` (Hydra, EAGLE).

Shapes: B batch, S sequence, G depths, D hidden, F features (`feature_layers` times D), V vocabulary, P prompt,
n newly committed tokens, W tree nodes of one call.
"""

import difflib
import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from draftsmith.models.compiling import BACKEND
from draftsmith.models.target.loading import FINAL_FEATURES
from draftsmith.recipes.errors import UserError

MODEL_TYPE_PREFIX = "draftsmith-"
IGNORED_LABEL = -100
# What a drafter's target must have in common with the one that it was made for.
MATCHED_KEYS = ("model_type", "hidden_size", "vocab_size")


class DrafterConfig(PreTrainedConfig):
    """What all drafters record: the target that they were made for.

    Args:
        target_config: The target's own config as a dictionary, so that a drafter can be built without its target.
        target_name_or_path: Where that target came from, for humans.
    """

    model_type = "draftsmith"

    def __init__(
        self, target_config: dict[str, Any] | None = None, target_name_or_path: str = "", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.target_config = target_config or {}
        self.target_name_or_path = target_name_or_path


@dataclass
class DrafterOutput(ModelOutput):
    """The loss that is trained on, and sums per depth that add up over batches and processes."""

    loss: Tensor | None = None
    depth_loss_sum: Tensor | None = None  # [G] cross entropy in nats, summed over labels
    depth_correct: Tensor | None = None  # [G] labels that are the argmax
    depth_count: Tensor | None = None  # [G] labels


class SequenceDecoder(Protocol):
    """A drafter at work on one sequence. `start` and `observe` only queue."""

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        """Begin a sequence. prompt_ids [P]; features [P, F], row i being the target's AT prompt token i."""

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        """Tokens that are final. committed_ids [n]; features [n, F], row i having PREDICTED committed_ids[i]."""


class DrafterDecoder(SequenceDecoder, Protocol):
    """All depths from one forward: what a depth drafts does not depend on the tokens drafted before it."""

    def draft(self) -> Tensor:
        """fp32 logits [G, V] of depths 1..G after the newest committed token; one forward."""


class StepwiseDecoder(SequenceDecoder, Protocol):
    """A tree level by level: what a node's children are depends on the tokens of the path to it."""

    num_depths: int  # the longest path worth drafting

    def begin(self) -> Tensor:
        """Read what is queued. fp32 logits [1, V] of the children of node 0, the newest committed token."""

    def expand(self, tokens: list[int], parents: list[int]) -> Tensor:
        """Add W nodes below `parents`; fp32 logits [W, V] of their children.

        Nodes are numbered 1, 2, ... in the order given over all calls since `begin`.
        """


@runtime_checkable
class Compilable(Protocol):
    """A decoder whose rounds `torch.compile` can run."""

    def compile(self, backend: str = BACKEND) -> None:
        """Before the first sequence."""


@dataclass
class _Attached:
    """Borrowed from the target. Held in a plain object so that torch neither registers nor saves it."""

    embedding: nn.Module
    lm_head: nn.Module


class Drafter(PreTrainedModel):
    """Base of all drafters: attaches to a target, is built from one, and is saved without the target's weights."""

    config_class = DrafterConfig
    _attached: _Attached | None = None
    # Drafts a token from the tokens it drafted before (a StepwiseDecoder).
    stepwise = False
    # Why it cannot be trained on features from disk (`data.features.source: offline`), for the user; None if it can.
    offline_obstacle: str | None = None
    # Optimiser steps done; the trainer keeps it up to date.
    training_step = 0

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """What it reads of the target, concatenated in this order: ids of `FeatureTap`."""
        return (FINAL_FEATURES,)

    @property
    def needs_teacher(self) -> bool:
        """Whether its loss compares with the target's distribution, so that training hands it `teacher_features`."""
        return False

    @property
    def trains_target(self) -> bool:
        """Whether the step at work also trains weights of this drafter inside the target (see `target_change`).

        Training then hands it features that carry a gradient, and `teacher_features` of the target as it was.
        """
        return False

    @property
    def target_change(self) -> str | None:
        """One plain sentence for the report, if attaching this drafter changes what the target says."""
        return None

    @contextmanager
    def original_target(self) -> Iterator[None]:
        """In here the target is as it was before the drafter changed it."""
        yield

    def learning_rate_factors(self) -> dict[str, float]:
        """Factors on the recipe's learning rate, by the beginning of the parameters' names."""
        return {}

    def attach(self, target: PreTrainedModel) -> "Drafter":
        """Borrow the target's frozen embedding and LM head. They are neither parameters of this model nor saved."""
        expected, found = self.config.target_config, target.config
        for key in MATCHED_KEYS:
            if expected.get(key) != getattr(found, key, None):
                raise UserError(
                    f"this drafter was made for a target with {key} {expected.get(key)} "
                    f"({self.config.target_name_or_path}), not {getattr(found, key, None)}: use it with that target, "
                    "or train a drafter for this one"
                )
        embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
        self._attached = _Attached(embedding, lm_head)
        return self

    @property
    def attached(self) -> _Attached:
        if self._attached is None:
            raise ValueError("the drafter has no target: call drafter.attach(target) first")
        return self._attached

    def decoder(self, max_length_tokens: int) -> DrafterDecoder | StepwiseDecoder:
        """A decoder for sequences of at most this many tokens, prompt included."""
        raise NotImplementedError

    def batch_decoders(self, max_length_tokens: int, batch_size: int) -> Sequence[SequenceDecoder]:
        """A decoder for each row of a batch. Rows whose draft is one forward share it where a drafter can do that."""
        return [self.decoder(max_length_tokens) for _ in range(batch_size)]

    def group_logits(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[B, G, S, V] that training compares with labels, of every group: for tests and small vocabularies.

        Where a depth reads drafted tokens it is given the true ones. -inf for tokens outside a reduced vocabulary.
        """
        raise NotImplementedError

    @classmethod
    def from_target(cls, target: PreTrainedModel, options: dict[str, Any]) -> "Drafter":
        """A new, untrained drafter for this target, attached to it.

        Args:
            options: `drafter.options` of the recipe, the keys of the drafter's config.

        Raises:
            UserError: An option is unknown or has a wrong value, or the architecture is not supported.
        """
        reserved = {"self", "kwargs", "target_config", "target_name_or_path"}
        valid = [key for key in inspect.signature(cls.config_class.__init__).parameters if key not in reserved]
        for key in options:
            if key not in valid:
                nearest = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
                hint = f"did you mean `{nearest[0]}`?" if nearest else f"valid keys there are {', '.join(valid)}"
                raise UserError(f"unknown key `drafter.options.{key}`: {hint}")
        # Under these names too where the architecture has others for them, as GPT-2 has.
        matched = {key: getattr(target.config, key) for key in MATCHED_KEYS}
        config = cls.config_class(
            target_config={**target.config.to_dict(), **matched},
            target_name_or_path=target.config._name_or_path,
            **options,
        )
        cls.complete_config(config, target)
        drafter = cls(config).to(target.device)
        drafter.attach(target)
        drafter.initialize_from_target(target)
        return drafter

    @classmethod
    def complete_config(cls, config: DrafterConfig, target: PreTrainedModel) -> None:
        """Note down in the config what can only be read off the target."""

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Start from the target's own weights where that helps."""

    def prepare(self, dataset: Dataset) -> None:
        """Look at the tokens that it will be trained on (`input_ids`, `loss_mask`), once, before the first step."""

    def freeze(self) -> "Drafter":
        """Trained: from now on it only drafts, in eval mode and without gradients."""
        return self.eval().requires_grad_(False)


def load_drafter_class(kind: str) -> type[Drafter]:
    """The class that `drafter.kind` names: the attribute `DRAFTER` of `models/drafters/<kind>.py`.

    Raises:
        UserError: There is no such drafter; lists those that there are.
    """
    kinds = drafter_kinds()
    if kind not in kinds:
        raise UserError(f"drafter.kind `{kind}` does not exist: use one of {', '.join(kinds)}")
    return importlib.import_module(f"draftsmith.models.drafters.{kind}").DRAFTER


def drafter_kinds() -> list[str]:
    """Files of `models/drafters/` that define a `DRAFTER`."""
    files = sorted((Path(__file__).parents[1] / "drafters").glob("*.py"))
    return [file.stem for file in files if "\nDRAFTER = " in file.read_text(encoding="utf-8")]


def load_drafter(folder: str | Path, target: PreTrainedModel) -> Drafter:
    """A trained drafter from a folder or the Hub, in the target's dtype, on its device, attached, in eval mode."""
    folder = str(folder)
    try:
        values, _ = PreTrainedConfig.get_config_dict(folder)
    except (OSError, ValueError):
        values = {}
    model_type = str(values.get("model_type", ""))
    if not model_type.startswith(MODEL_TYPE_PREFIX):
        raise UserError(f"{folder} holds no trained drafter: run `draftsmith train RECIPE` first")
    drafter_class = load_drafter_class(model_type.removeprefix(MODEL_TYPE_PREFIX))
    drafter = drafter_class.from_pretrained(folder, dtype=target.dtype).to(target.device)
    drafter.attach(target)
    return drafter.freeze()


def document_starts(position_ids_bs: Tensor) -> Tensor:
    """[B, S] bool: the first token of each document of packed rows, where position ids do not go on counting.

    The same rule by which transformers keeps packed documents apart in the target's attention.
    """
    first_b1 = torch.ones_like(position_ids_bs[:, :1], dtype=torch.bool)
    return torch.cat([first_b1, position_ids_bs.diff(dim=1) != 1], dim=1)


def previous_features(features_bsf: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """[B, S, F]: h_{t-1} at t, the feature that predicted x_t; zeros for a document's first token."""
    previous_bsf = torch.cat([torch.zeros_like(features_bsf[:, :1]), features_bsf[:, :-1]], dim=1)
    if position_ids is None:
        return previous_bsf
    starts_bs = document_starts(position_ids.expand(features_bsf.shape[:2]))
    return previous_bsf.masked_fill(starts_bs.unsqueeze(-1), 0.0)


def depth_labels(input_ids_bs: Tensor, loss_mask_bs: Tensor, num_depths: int) -> Tensor:
    """[B, G, S]: label of depth j+1 at t is x_{t+1+j} if loss_mask[t+1..t+1+j] are all 1, else -100.

    A run of ones in the mask is one assistant turn, so no label crosses the end of a turn.
    """
    batch, length = input_ids_bs.shape
    labels = input_ids_bs.new_full((batch, num_depths, length), IGNORED_LABEL)
    valid = torch.ones_like(input_ids_bs, dtype=torch.bool)
    for j in range(min(num_depths, length - 1)):
        shift = j + 1
        valid = valid[:, : length - shift] & loss_mask_bs[:, shift:].bool()
        labels[:, j, : length - shift] = torch.where(valid, input_ids_bs[:, shift:], IGNORED_LABEL)
    return labels
