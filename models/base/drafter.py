"""What every drafter q is: a `PreTrainedModel` that borrows the target's embedding and LM head.

A kind of drafter is a file of `models/drafters/` with an attribute `DRAFTER`; `drafter.kind` in a recipe is its name.
What a depth predicts, and from what, is the same for all of them: `models/groups/alignment.py`.

Shapes: B batch, S sequence, G depths, D hidden, F features (`feature_layers` times D), V vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, cast

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.models.base.options import DrafterOptions
from draftsmith.models.decoding.protocols import DrafterDecoder, StepwiseDecoder
from draftsmith.models.decoding.token_columns import ALL_TOKENS, TokenColumns
from draftsmith.models.groups.alignment import IGNORED_LABEL, depth_labels
from draftsmith.models.losses import DrafterOutput
from draftsmith.models.target.features import FINAL_FEATURES, target_features
from draftsmith.recipes.errors import UserError

MODEL_TYPE_PREFIX = "draftsmith-"
# What a drafter's target must have in common with the one that it was made for.
MATCHED_KEYS = ("model_type", "hidden_size", "vocab_size")


class DrafterConfig(PreTrainedConfig):
    """What all drafters record: the target that they were made for, and their kind's options.

    Args:
        target_config: The target's own config as a dictionary, so that a drafter can be built without its target.
        target_name_or_path: Where that target came from, for humans.
        kwargs: Keys of `Options`, all of which become attributes. Those that it does not know are kept as they are.
    """

    model_type = "draftsmith"
    has_no_defaults_at_init = True
    Options: ClassVar[type[DrafterOptions]] = DrafterOptions

    target_config: dict[str, Any] = field(default_factory=dict)
    target_name_or_path: str = ""

    def __post_init__(self, **kwargs: Any) -> None:
        given = {key: kwargs.pop(key) for key in self.Options.model_fields if key in kwargs}
        super().__post_init__(**kwargs)
        for key, value in self.Options.checked(given, self.target_config):
            setattr(self, key, value)

    @property
    def hidden_size(self) -> int:
        """D of the target. DeepSpeed's `auto` sizes are computed from it."""
        return self.target_config.get("hidden_size", 0)

    @property
    def options(self) -> DrafterOptions:
        """The attributes that are options, as such."""
        return self.Options.model_construct(**{key: getattr(self, key) for key in self.Options.model_fields})

    @property
    def num_depths(self) -> int:
        """G, the depths that are trained."""
        return self.options.num_depths


@dataclass(frozen=True)
class DraftedShare:
    """How much of the training data a drafter can draft, in tokens that carry loss.

    size, vocabulary: tokens that it drafts, and that there are; seen: different ones in the data.
    """

    size: int
    vocabulary: int
    seen: int
    coverage: float

    def sentence(self) -> str:
        """For the terminal."""
        sentence = (
            f"the draft vocabulary, {self.size:,} of {self.vocabulary:,} tokens, covers {self.coverage:.2%} of the "
            "answers' tokens"
        )
        if self.seen < self.size:
            return (
                f"{sentence}; only {self.seen:,} occur in them: drafter.options.draft_vocab_size={self.seen} would do"
            )
        return sentence


@dataclass
class Attached:
    """The target and what is borrowed from it. A plain object: torch takes nothing in it for a part of the drafter."""

    target: PreTrainedModel
    embedding: nn.Module
    lm_head: nn.Module


class Drafter(PreTrainedModel):
    """Base of all drafters: attaches to a target, is built from one, and is saved without the target's weights."""

    config_class = DrafterConfig
    base_model_prefix = "drafter"
    _no_split_modules: list[str] = []  # noqa: RUF012
    _attached: Attached | None = None
    # What its kind is called in a repository's name, where it is not `drafter.kind`: engines read the method off that.
    published_as: str | None = None
    # Why it cannot be trained on features from disk (`data.features.source: offline`), for the user; None if it can.
    offline_obstacle: str | None = None
    # Its loss is divided by `label_counts` of the whole batch, so the Trainer need not.
    accepts_loss_kwargs = True
    # Why its target can neither be split among processes nor quantised; None if it can.
    whole_target_needed: str | None = None
    # Optimiser steps done, and as a share of all of them; the trainer keeps both up to date.
    training_step, training_progress_frac = 0, 1.0
    # What training draws at random (noise, rows to keep) comes from here; from torch's own generator by default.
    generator: torch.Generator | None = None

    @classmethod
    def split_obstacle(cls, options: Mapping[str, Any]) -> str | None:
        """Why its weights cannot be split (FSDP2, ZeRO-3) with these `drafter.options`; None if they can."""
        if options.get("in_parts"):
            return "`drafter.options.in_parts` has a drafter's weights whole only while autograd asks for them"
        return None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.build(config)
        self.post_init()

    def build(self, config: DrafterConfig) -> None:
        """Make the parameters."""

    def get_input_embeddings(self) -> None:
        """None of its own: it borrows the target's."""

    def get_output_embeddings(self) -> None:
        """None of its own that is tied to anything."""

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

    def training_features(
        self, target: PreTrainedModel, ids_bs: Tensor, positions_bs: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[B, S, F] for the drafter and, if its loss has a teacher, [B, S, D]: from one forward if possible."""
        if not self.trains_target:
            return self.split_features(target_features(target, ids_bs, None, positions_bs, self.layers_read))
        teacher_features = None
        if self.needs_teacher:
            with self.original_target():
                teacher_features = target_features(target, ids_bs, None, positions_bs)
        features = target_features(target, ids_bs, None, positions_bs, self.feature_layers, with_gradient=True)
        return features, teacher_features

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

    @property
    def depth_shares(self) -> list[float]:
        """Share of each depth in the loss at this point of the training; what it ends with where nothing is trained."""
        return self.config.options.depth_shares(self.training_progress_frac if self.training else 1.0)

    def learning_rate_factors(self) -> dict[str, float]:
        """Factors on the recipe's learning rate, by the beginning of the parameters' names."""
        return {}

    def attach(self, target: PreTrainedModel) -> Self:
        """Borrow the target's frozen embedding and LM head. They are neither parameters of this model nor saved."""
        self.refuse_other_target(target)
        self._attached = Attached(target, target.get_input_embeddings(), target.get_output_embeddings())
        return self

    def refuse_other_target(self, target: PreTrainedModel) -> None:
        """
        Raises:
            UserError: The drafter was made for a target of another kind or size.
        """
        expected, found = self.config.target_config, target.config
        for key in MATCHED_KEYS:
            if expected.get(key) != getattr(found, key, None):
                raise UserError(
                    f"this drafter was made for a target with {key} {expected.get(key)} "
                    f"({self.config.target_name_or_path}), not {getattr(found, key, None)}: use it with that target, "
                    "or train a drafter for this one"
                )

    @property
    def attached(self) -> Attached:
        if self._attached is None:
            raise ValueError("the drafter has no target: call drafter.attach(target) first")
        return self._attached

    @property
    def columns(self) -> TokenColumns:
        """What its decoders' logits are of."""
        return ALL_TOKENS

    @property
    def borrowed_head(self) -> nn.Linear:
        """What it reads of the target's LM head, frozen: a linear layer [V', D]."""
        return cast(nn.Linear, self.attached.lm_head)

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        teacher_features: Tensor | None = None,
        label_counts: Tensor | None = None,
    ) -> DrafterOutput:
        """The training loss, of all groups at once.

        Args:
            input_ids: [B, S], padded on the right if at all: then causal order alone keeps padding out.
            features: [B, S, F] of the target, AT each token.
            loss_mask: [B, S], 1 at tokens that may be predicted.
            position_ids: [B, S], 0..S-1 by default; packed documents each have their own, from 0 on, and at their
                first token a `loss_mask` of 0.
            teacher_features: [B, S, D] that the LM head reads, if the loss compares with the target's distribution and
                `features` are others (`needs_teacher`).
            label_counts: [2, G] of the whole batch that these rows are a part of: the losses of all parts then add up
                to its loss. By default these rows are all of it.
        """
        raise NotImplementedError

    def label_counts(self, input_ids: Tensor, loss_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[2, G] what the loss of a batch is divided by: labels of each depth, and those that the class loss reads.

        They add up over the parts of a batch, on however many processes. Where rows are dropped at random it is the
        number expected, which all parts can know before the first of them is computed.
        """
        labels_bgs = depth_labels(input_ids, loss_mask, self.config.num_depths)
        labelled_bgs = self.rows_with_labels(labels_bgs, position_ids)
        read_bgs = labelled_bgs & self.labels_read(labels_bgs)
        return torch.stack([labelled_bgs, read_bgs]).sum((1, 3)).float()

    def rows_with_labels(self, labels_bgs: Tensor, position_ids: Tensor | None) -> Tensor:
        """[B, G, S] bool: rows that are trained."""
        return labels_bgs != IGNORED_LABEL

    def labels_read(self, labels_bgs: Tensor) -> Tensor:
        """[B, G, S] bool: labels that the class loss can use, whatever it is for rows without one."""
        return torch.ones_like(labels_bgs, dtype=torch.bool)

    def decoder(self, max_length_tokens: int) -> DrafterDecoder | StepwiseDecoder:
        """A decoder for sequences of at most this many tokens, prompt included."""
        raise NotImplementedError

    def group_logits(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[B, G, S, V] that training compares with labels, of every group: for tests and small vocabularies.

        Where a depth reads drafted tokens it is given the true ones. -inf for tokens outside a reduced vocabulary.
        """
        raise NotImplementedError

    @classmethod
    def from_target(cls, target: PreTrainedModel, options: dict[str, Any]) -> Self:
        """A new, untrained drafter for this target, attached to it.

        Args:
            options: `drafter.options` of the recipe, keys of the config's `Options`.

        Raises:
            UserError: An option is unknown or has a wrong value, or the architecture is not supported.
        """
        # Under these names too where the architecture has others for them, as GPT-2 has.
        matched = {key: getattr(target.config, key) for key in MATCHED_KEYS}
        target_config = {**target.config.to_dict(), **matched}
        config = cls.config_class(
            target_config=target_config,
            target_name_or_path=target.config._name_or_path,
            **cls.config_class.Options.checked(options, target_config).model_dump(),
        )
        cls.complete_config(config, target)
        # In fp32 at least, to be trained.
        drafter = cls(config).to(target.device, torch.promote_types(target.dtype, torch.float32)).attach(target)
        with torch.no_grad():
            drafter.initialize_from_target(target)
        return drafter

    @classmethod
    def complete_config(cls, config: DrafterConfig, target: PreTrainedModel) -> None:
        """Note down in the config what can only be read off the target."""

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Start from the target's own weights where that helps."""

    def prepare(self, dataset: Dataset) -> None:
        """Look at the tokens that it will be trained on (`input_ids`, `loss_mask`), once, before the first step."""

    @property
    def draft_vocabulary(self) -> DraftedShare | None:
        """What it can draft of the data that it was prepared with; None: every token, or it was not prepared."""
        return None

    @property
    def draft_vocabulary_names(self) -> set[str]:
        """Of its state, what only makes sense together: which tokens are drafted, and heads of its own for these."""
        return set()

    @property
    def draft_vocabulary_rows(self) -> set[str]:
        """What makes sense with these tokens only, but need not come along: it starts as if it were not there."""
        return set()

    def read_draft_vocabulary(self) -> None:
        """Follow a change of the tokens that are drafted, as after loading other ones."""

    def freeze(self) -> Self:
        """Trained: from now on it only drafts, in eval mode and without gradients."""
        return self.eval().requires_grad_(False)
