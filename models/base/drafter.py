"""What every drafter q is: a `PreTrainedModel` that borrows the target's embedding and LM head.

A kind of drafter is a file of `models/drafters/` with an attribute `DRAFTER`; `drafter.kind` in a recipe is its name.
What a depth predicts, and from what, is the same for all of them: `models/groups/alignment.py`.

Shapes: B batch, S sequence, G depths, D hidden, F features (`feature_layers` times D), V vocabulary.
"""

import difflib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.models.decoding.protocols import DrafterDecoder, SequenceDecoder, StepwiseDecoder
from draftsmith.models.target.features import FINAL_FEATURES
from draftsmith.recipes.errors import UserError

MODEL_TYPE_PREFIX = "draftsmith-"
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
class Attached:
    """The target and what is borrowed from it. A plain object: torch takes nothing in it for a part of the drafter."""

    target: PreTrainedModel
    embedding: nn.Module
    lm_head: nn.Module


class Drafter(PreTrainedModel):
    """Base of all drafters: attaches to a target, is built from one, and is saved without the target's weights."""

    config_class = DrafterConfig
    _attached: Attached | None = None
    # Why it cannot be trained on features from disk (`data.features.source: offline`), for the user; None if it can.
    offline_obstacle: str | None = None
    # Optimiser steps done; the trainer keeps it up to date.
    training_step = 0

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """What it reads of the target, concatenated in this order: ids of `FeatureTap`."""
        return (FINAL_FEATURES,)

    @property
    def layers_read(self) -> tuple[int, ...]:
        """The layers that a training step reads: `feature_layers`, then the final one if only the loss needs it."""
        layers = self.feature_layers
        return (*layers, FINAL_FEATURES) if self.needs_teacher and FINAL_FEATURES not in layers else layers

    def split_features(self, read: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, S, F] for the drafter and [B, S, D] for its teacher, if it has one, from those of `layers_read`."""
        if not self.needs_teacher:
            return read, None
        parts = read.chunk(len(self.layers_read), dim=-1)
        final = parts[self.layers_read.index(FINAL_FEATURES)]
        return torch.cat(parts[: len(self.feature_layers)], dim=-1), final

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
        self._attached = Attached(target, target.get_input_embeddings(), target.get_output_embeddings())
        return self

    @property
    def attached(self) -> Attached:
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
