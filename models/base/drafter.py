"""What every drafter q is: a `PreTrainedModel` that borrows the target's embedding and LM head, and its options.

A kind of drafter is a file of `models/drafters/` with an attribute `DRAFTER`; `drafter.kind` in a recipe is its name.
What a depth predicts, and from what, is the same for all of them (`models/groups/layout.py`), and so is what its logits
and losses are read off (`draft_head.py`).

The LM head is the target's, frozen, or heads of the drafter's own, which start as the target's and are trained. With
`draft_vocab_size` it has V' rows. Which tokens these are is counted in the training data and part of the checkpoint, in
vLLM's layout: `d2t` [V'] are offsets, the token of row i being i + d2t[i]; `t2d` [V] says of each token whether the
head has it. Rows of the target's head are gathered when the drafter is attached, and in no checkpoint.

`drafter.options` of a recipe are checked by pydantic like the rest of it. A kind's own are the `Options` of its config
class, which writes them flat into `config.json`. What must fit the target is compared with the target's config, which
is pydantic's validation context here.

Shapes: B batch, S sequence, G depths, D hidden, F features (`feature_layers` times D), V vocabulary, V' drafted tokens.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import torch
from datasets import Dataset
from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.errors import UserError
from draftsmith.models.base.draft_head import DraftedShare, DraftHead, MarkovHead, supervised_token_counts
from draftsmith.models.base.weights import Auxiliary, Credit, Part, depth_shares, sum_losses, weigh_by_depth
from draftsmith.models.decoding.decoders import ALL_TOKENS, DrafterDecoder, StepwiseDecoder, TokenColumns
from draftsmith.models.groups.attention import Backend
from draftsmith.models.groups.layers import SUPPORTED_MODEL_TYPES, of_kind
from draftsmith.models.groups.layout import IGNORED_LABEL, Groups, depth_labels
from draftsmith.models.loss import (
    LOSSES,
    DrafterOutput,
    HeadLoss,
    LossName,
    as_tensor_like,
    has_teacher,
    head_loss,
    loss_weights,
    mass_inside,
)
from draftsmith.models.target.features import FINAL_FEATURES, target_features
from draftsmith.models.target.view import embedding_width, target_values
from draftsmith.models.target_logits import PLAIN, LogitShape, logit_shape
from draftsmith.recipes.loading import explain
from draftsmith.recipes.schema import MOST_DEPTHS, MOST_LAYERS, Section

MODEL_TYPE_PREFIX = "draftsmith-"
# What a drafter's target must have in common with the one that it was made for.
MATCHED_KEYS = ("model_type", "hidden_size", "vocab_size")


def one_message(message: str) -> WrapValidator:
    """Give this sentence of a value of several possible types, in place of pydantic's own about each of them."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(message) from None

    return WrapValidator(check)


def _within_the_vocabulary(size: int | None, info: ValidationInfo) -> int | None:
    vocabulary = (info.context or {}).get("vocab_size")
    if size is not None and vocabulary is not None and size > vocabulary:
        raise ValueError(f"must be at most the target's vocabulary of {vocabulary} (leave it out to draft all tokens)")
    return size


Attention = Annotated[Backend, Field(description="training backend, see `models/groups/attention.py`")]
DepthWeights = Annotated[
    PositiveFloat | Annotated[list[PositiveFloat], Field(max_length=MOST_DEPTHS)],
    one_message("must be one positive number, or a list of one for each depth"),
    Field(description="lambda of each depth, from the first; or one number d for d**0, d**1, ..."),
]
DraftDepth = Annotated[
    int, Field(ge=1, le=MOST_DEPTHS, description="the longest path that is drafted, one forward a level")
]
Loss = Annotated[
    LossName | Annotated[dict[LossName, PositiveFloat], Field(min_length=1)],
    one_message(f"must be {', '.join(LOSSES)}, or some of these with a weight each, as in `{{ce: 0.1, tv: 1.8}}`"),
    Field(description="see `models/loss.py`; `ce` needs no teacher; `{ce: 0.1, tv: 1.8}` for a weighted sum"),
]
DraftVocabSize = Annotated[
    PositiveInt | None,
    AfterValidator(_within_the_vocabulary),
    Field(
        description="draft this many of the target's tokens only, the most frequent of the answers that are trained on "
        "(`models/base/draft_head.py`); all by default"
    ),
]
NumLayers = Annotated[int, Field(ge=1, le=MOST_LAYERS, description="decoder layers")]
MaskResidual = Annotated[
    bool, Field(description="add the newest token's input to each of its masks (not in the paper)")
]
FirstToken = Annotated[
    bool,
    Field(
        description="a row for the first token of a conversation, which no feature predicted; vLLM and SGLang have "
        "none, so false for a drafter that they serve"
    ),
]
Init = Annotated[
    Literal["target", "random"], Field(description="start the layers and the norm from the target's, or at random")
]


def _kind_of_layers(kind: str | None, info: ValidationInfo) -> str:
    model_type = (info.context or {}).get("model_type", SUPPORTED_MODEL_TYPES[0])
    own = model_type in SUPPORTED_MODEL_TYPES
    if kind == "target" and not own:
        raise ValueError(f"layers of the target's own kind, {model_type}, are not supported: llama or qwen3")
    return kind or ("target" if own else "llama")


# None by default, which is validated.
Layers = Annotated[
    Literal["target", "llama", "qwen3"] | None,
    AfterValidator(_kind_of_layers),
    Field(
        description="whose kind of decoder layers these are: the target's own, which may start as its; or, with its "
        "width, heads and RoPE, Llama's or Qwen 3's (q/k norms), for targets of experts or of other attention, and for "
        "engines that run no others. By default the target's where these are supported, else llama"
    ),
]


def _flat_rope(rope: dict[str, Any] | None) -> dict[str, Any] | None:
    if rope is None:
        return None
    theta, kind = rope.get("rope_theta"), rope.get("rope_type", "default")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ValueError("must have a positive rope_theta, as in `{rope_theta: 10000}`")
    if kind not in ("default", *ROPE_INIT_FUNCTIONS):
        raise ValueError(f"has rope_type {kind}: use one of default, {', '.join(ROPE_INIT_FUNCTIONS)}")
    return {**rope, "rope_type": kind, "rope_theta": float(theta)}


Rope = Annotated[
    dict[str, Any] | None,
    AfterValidator(_flat_rope),
    Field(
        description="RoPE of the drafter's layers where it is not the target's, in transformers' form: "
        "`{rope_theta: 10000}`, as EAGLE-3's own code trains"
    ),
]


class DrafterOptions(Section):
    """`drafter.options` that every kind has. One depth is trained; deeper ones are drafted with the same weights."""

    loss: Loss = "kl"
    draft_vocab_size: DraftVocabSize = None
    teacher_mass: bool = Field(
        True,
        description="with `draft_vocab_size`, weigh a row's losses to the teacher by the probability that the teacher "
        "gives the draft vocabulary; takes a product with the target's whole head, a tenth of a step on a CPU",
    )

    @classmethod
    def checked(cls, values: dict[str, Any], target_config: dict[str, Any]) -> Self:
        """Check options; return them typed, with the defaults that depend on the target.

        Raises:
            UserError: An option is unknown, or has a wrong value.
        """
        try:
            return cls.model_validate(values, context=target_config)
        except ValidationError as error:
            raise UserError(explain(cls, error, "drafter.options")) from None

    @property
    def num_depths(self) -> int:
        """Return G, the number of depths that are trained."""
        return 1

    def depth_shares(self, progress_frac: float = 1.0) -> list[float]:
        """Share of each depth in the loss, sum 1, when so much of the training is done."""
        return [1.0]

    @property
    def kept_shares(self) -> list[float] | None:
        """Share of each depth's rows that training keeps, if it drops some at random."""
        return None

    @property
    def credit(self) -> Credit | None:
        """Return how rows count by what their group does, or None where they are weighed by their depth alone."""
        return None


class DepthOptions(DrafterOptions):
    """Options of kinds that train several depths, whose number they define."""

    depth_weights: DepthWeights = 0.8
    depth_ramp: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the training in which depth 2, 3, ... come in; 0: all from the first step",
    )
    dpace_alpha: float | None = Field(
        None,
        gt=0,
        le=1,
        description="D-PACE in place of `depth_weights`: a row counts as far as the drafter is sure of those above it, "
        "smoothed with this alpha (the paper's is 0.5); see `models/base/draft_head.py`",
    )
    until_first_error: bool = Field(
        False, description="no loss after the first row of a group whose most likely token is wrong (2607.01893)"
    )

    @property
    def credit(self) -> Credit | None:
        credit = self.dpace_alpha, self.until_first_error
        return None if credit == (None, False) else credit

    def depth_shares(self, progress_frac: float = 1.0) -> list[float]:
        given = self.depth_weights
        weights = given if isinstance(given, list) else [given**j for j in range(self.num_depths)]
        return depth_shares(weights, self.depth_ramp, progress_frac)

    @model_validator(mode="after")
    def _one_way_of_coming_in(self) -> Self:
        if self.dpace_alpha is not None and self.depth_ramp > 0:
            raise ValueError("`dpace_alpha` lets deeper depths in by itself: leave `depth_ramp` at 0 with it")
        return self

    @model_validator(mode="after")
    def _one_weight_a_depth(self) -> Self:
        if len(self.depth_shares()) != self.num_depths:
            raise ValueError(
                f"`depth_weights` must be one positive number or {self.num_depths} of them (one for each depth), not "
                f"{self.depth_weights}"
            )
        return self


def ascending_layers(layers: list[int], info: ValidationInfo, final: int | None = None) -> list[int]:
    """Check that these are layers of the target; `final` may stand at the end for its last norm."""
    inner = layers[:-1] if layers and layers[-1] == final else layers
    num_layers = (info.context or {}).get("num_hidden_layers", 1)
    if not layers or inner != sorted(set(inner)) or not all(0 <= layer < num_layers for layer in inner):
        end = "" if final is None else f" (and {final} at the end for the final hidden states)"
        raise ValueError(f"must be a list of ascending layer numbers from 0 to {num_layers - 1}{end}")
    return layers


class DrafterConfig(PreTrainedConfig):
    """What all drafters record: the target that they were made for, and their kind's options.

    Args:
        target_config: What `target_values` gives, so that a drafter can be built without its target.
        target_name_or_path: Where that target came from, for humans.
        kwargs: Keys of `Options`, all of which become attributes. Those that it does not know are kept as they are.
    """

    model_type = "draftsmith"
    has_no_defaults_at_init = True
    Options: ClassVar[type[DrafterOptions]] = DrafterOptions

    target_config: dict[str, Any] = field(default_factory=dict)
    target_name_or_path: str = ""
    # What the target makes of its LM head's product, see `models/target_logits.py`.
    target_logit_scale: float = 1.0
    target_logit_cap: float | None = None
    # Whose kind its decoder layers are of, see `of_kind`; an option of most kinds that have some.
    layers = "target"

    def __post_init__(self, **kwargs: Any) -> None:
        given = {key: kwargs.pop(key) for key in self.Options.model_fields if key in kwargs}
        super().__post_init__(**kwargs)
        for key, value in self.Options.checked(given, self.target_config):
            setattr(self, key, value)

    @property
    def hidden_size(self) -> int:
        """Return D of the target. DeepSpeed's `auto` sizes are computed from it."""
        return self.target_config.get("hidden_size", 0)

    @property
    def has_own_heads(self) -> bool:
        """Whether its logits come from LM heads that it trains itself, not from the target's."""
        return False

    @property
    def target_logits(self) -> LogitShape:
        """Return what the target makes of its LM head's product."""
        return LogitShape(self.target_logit_scale, self.target_logit_cap)

    @property
    def layers_of(self) -> dict[str, Any]:
        """Return the config that its decoder layers are made from, see `of_kind`: with its own RoPE if it has one."""
        layers_of, rope = of_kind(self.layers, self.target_config), getattr(self, "rope", None)
        return layers_of if rope is None else {**layers_of, "rope_parameters": dict(rope)}

    @property
    def options(self) -> DrafterOptions:
        """Return the attributes that are options as the kind's own model of them."""
        return self.Options.model_construct(**{key: getattr(self, key) for key in self.Options.model_fields})

    @property
    def num_depths(self) -> int:
        """Return G, the number of depths that are trained."""
        return self.options.num_depths


@dataclass
class Attached:
    """The target and what is borrowed from it. A plain object: torch takes nothing in it for a part of the drafter."""

    target: PreTrainedModel
    embedding: nn.Module
    lm_head: nn.Module
    shape: LogitShape  # what the target makes of its head's product


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
    # Why its weights cannot be split (FSDP2, ZeRO-3); None if they can.
    split_obstacle: str | None = None
    # Optimiser steps done, and as a share of all of them; the trainer keeps both up to date.
    training_step, training_progress_frac = 0, 1.0
    # What training draws at random (noise, rows to keep) comes from here; from torch's own generator by default.
    generator: torch.Generator | None = None
    d2t: Tensor
    t2d: Tensor
    reduced_head: nn.Linear
    markov_head: MarkovHead | None
    _token_counts_v: Tensor | None = None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.build(config)
        self.post_init()
        vocabulary, drafted = config.target_config.get("vocab_size", 0), config.draft_vocab_size
        self._reduced = drafted is not None
        if self._reduced:  # the lowest ids until the data are counted
            self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(vocabulary) < drafted)
        rank = getattr(config, "markov_rank", 0)
        self.markov_head = MarkovHead(vocabulary, drafted or vocabulary, rank) if rank else None

    def build(self, config: DrafterConfig) -> None:
        """Make the drafter's own parameters and modules."""

    def get_input_embeddings(self) -> None:
        """Return none: a drafter borrows the target's."""

    def get_output_embeddings(self) -> None:
        """Return none: no head of a drafter is tied to embeddings."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Return the layers of the target whose features it reads, concatenated in this order: ids of `FeatureTap`."""
        return tuple(getattr(self.config, "feature_layers", None) or (FINAL_FEATURES,))

    @property
    def reads_first_token(self) -> bool:
        """Whether a sequence's first token, which no feature predicted, has a row."""
        return getattr(self.config, "first_token", True)

    @property
    def layers_read(self) -> tuple[int, ...]:
        """Return the layers that a training step reads: `feature_layers`, and the final one if the loss needs it."""
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
        return has_teacher(self.config.loss)

    @property
    def trains_target(self) -> bool:
        """Whether the current step also trains weights of this drafter inside the target (see `target_change`).

        Training then hands it features that carry a gradient, and `teacher_features` of the target as it was.
        """
        return False

    @property
    def target_change(self) -> str | None:
        """Say for the report in a sentence, if attaching this drafter changes what the target says."""
        return None

    @contextmanager
    def original_target(self) -> Iterator[None]:
        """Make a context in which the target is as it was before the drafter changed it."""
        yield

    @property
    def depth_shares(self) -> list[float]:
        """Share of each depth in the loss at this point of the training; what it ends with where nothing is trained."""
        return self.config.options.depth_shares(self.training_progress_frac if self.training else 1.0)

    def learning_rate_factors(self) -> dict[str, float]:
        """Return factors on the recipe's learning rate, by the beginning of the parameters' names."""
        return {}

    def attach(self, target: PreTrainedModel) -> Self:
        """Borrow the target's frozen embedding and LM head. They are neither parameters of this model nor saved."""
        self.refuse_other_target(target)
        head, shape = target.get_output_embeddings(), logit_shape(target)
        self._attached = Attached(target, target.get_input_embeddings(), head, shape)
        self.read_draft_vocabulary()
        return self

    def refuse_other_target(self, target: PreTrainedModel) -> None:
        """
        Raises:
            UserError: The drafter was made for a target of another kind or size.
        """
        expected, found = self.config.target_config, target_values(target.config)
        for key in MATCHED_KEYS:
            if expected.get(key) != found.get(key):
                raise UserError(
                    f"this drafter was made for a target with {key} {expected.get(key)} "
                    f"({self.config.target_name_or_path}), not {found.get(key)}: use it with that target, "
                    "or train a drafter for this one"
                )

    @property
    def attached(self) -> Attached:
        if self._attached is None:
            raise ValueError("the drafter has no target: call drafter.attach(target) first")
        return self._attached

    # ---- the draft head ----

    @property
    def own_heads(self) -> list[nn.Linear]:
        """Return linear layers [V', D] that it trains itself, for depths 1, 2, ... or one for all; none by default."""
        return []

    @property
    def borrowed_head(self) -> nn.Linear:
        """Return the target's frozen head, or the rows of it that are drafted: a linear layer [V', D]."""
        return self.reduced_head if self._reduced and not self.own_heads else cast(nn.Linear, self.attached.lm_head)

    def head_linear(self, depth: int = 0) -> nn.Linear:
        """Return the linear layer [V', D] that gives the logits of this depth, counted from 0."""
        heads = self.own_heads
        return heads[min(depth, len(heads) - 1)] if heads else self.borrowed_head

    @property
    def head_shape(self) -> LogitShape:
        """Return what is made of a head's product: the target's for its head, nothing for own heads."""
        return PLAIN if self.own_heads else self.attached.shape

    def head_logits(self, normed: Tensor, depth: int = 0) -> Tensor:
        """Map [..., D] to logits [..., V'] of this depth, without the Markov head's part."""
        linear = self.head_linear(depth)
        return self.head_shape(linear(normed.to(linear.weight.dtype)))

    def draft_head(self, depth: int = 0) -> DraftHead:
        """Return what the rows of this depth, counted from 0, are trained through."""
        heads = self.own_heads
        # Borrowed rows are the teacher's too; an own head's teacher is restricted to its columns.
        return DraftHead(
            linear=self.head_linear(depth),
            loss=loss_weights(self.config.loss),
            teacher=cast(nn.Linear, self.attached.lm_head) if heads else self.borrowed_head,
            teacher_columns=self.draft_ids if heads else None,
            t2d=self.t2d if self._reduced else None,
            markov=self.markov_head,
            shape=self.head_shape,
            teacher_shape=self.attached.shape,
        )

    @property
    def draft_ids(self) -> Tensor | None:
        """[V'] the target's ids of the head's rows, ascending; None if it has all of them."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device) if self._reduced else None

    @property
    def columns(self) -> TokenColumns:
        """Return the tokens that its decoders' logits are of."""
        return TokenColumns(self.draft_ids, len(self.t2d)) if self._reduced else ALL_TOKENS

    def over_all_tokens(self, logits: Tensor) -> Tensor:
        """Widen [..., V'] to [..., V], with -inf for tokens that are not drafted."""
        return self.columns.widened(logits, float("-inf"))

    @torch.no_grad()
    def initialize_own_heads(self) -> None:
        """Copy the target's rows into the drafter's own heads, scaled as the target scales what they give."""
        source, ids = cast(nn.Linear, self.attached.lm_head).weight, self.draft_ids
        for head in self.own_heads:
            head.weight.copy_(source if ids is None else source[ids]).mul_(self.attached.shape.scale)

    @torch.no_grad()
    def read_draft_vocabulary(self) -> None:
        """Gather the target's rows, if these are what is read, for the tokens that are drafted now."""
        if self.draft_ids is None or self.own_heads:
            return
        source = cast(nn.Linear, self.attached.lm_head)
        ids = self.draft_ids.to(source.weight.device)
        head = nn.Linear(source.in_features, len(ids), bias=source.bias is not None, device="meta")
        # Buffers that are not saved: part of the model wherever it goes, but nothing to train or to store.
        for name, whole in list(source.named_parameters()):
            delattr(head, name)
            head.register_buffer(name, whole.detach()[ids], persistent=False)
        self.reduced_head = head

    def prepare(self, dataset: Dataset) -> None:
        """Look at the tokens that it will be trained on (`input_ids`, `loss_mask`), once, before the first step.

        With a draft vocabulary the supervised ones are counted, and the most frequent ones taken.
        """
        if self._reduced:
            self._token_counts_v = supervised_token_counts(dataset, len(self.t2d))
            self.choose_draft_tokens(self._token_counts_v)

    @torch.no_grad()
    def choose_draft_tokens(self, token_counts_v: Tensor) -> None:
        """Take the most frequent tokens, the lower id among equals, and the target's rows for them."""
        chosen = token_counts_v.sort(descending=True, stable=True).indices[: len(self.d2t)].sort().values
        self.d2t.copy_(chosen - torch.arange(len(chosen)))
        self.t2d.zero_()[chosen] = True
        self.initialize_own_heads()
        self.read_draft_vocabulary()

    def extend_draft_tokens(self, t2d: Tensor) -> None:
        """Take the tokens that were counted, and after them those of another draft vocabulary, [V] booleans."""
        if self._token_counts_v is not None:
            self.choose_draft_tokens(2 * self._token_counts_v + t2d.cpu())

    @property
    def draft_vocabulary(self) -> DraftedShare | None:
        """Return the share of the data that it can draft; None if it drafts every token, or was not prepared."""
        counts_v = self._token_counts_v
        if counts_v is None:
            return None
        share = float(counts_v[self.t2d.cpu()].sum() / counts_v.sum().clamp(min=1))
        return DraftedShare(len(self.d2t), len(counts_v), int((counts_v > 0).sum()), share)

    @property
    def draft_vocabulary_names(self) -> set[str]:
        """Names in its state that only make sense together: which tokens are drafted, and own heads for these."""
        if not self._reduced:
            return set()
        heads = {f"{name}.weight" for name, module in self.named_modules() if any(module is h for h in self.own_heads)}
        return {"d2t", "t2d"} | heads

    @property
    def draft_vocabulary_rows(self) -> set[str]:
        """Names of trained tensors that have a row for each drafted token: own heads, and the Markov head's W2."""
        markov = set() if self.markov_head is None else {"markov_head.markov_w2.weight"}
        return markov | (self.draft_vocabulary_names - {"d2t", "t2d"})

    # ---- training and decoding ----

    def groups(self, input_ids: Tensor, loss_mask: Tensor, position_ids: Tensor | None = None) -> Groups:
        """Return the groups of a batch: its labels, and the rows that are computed for them."""
        labels_bgs = depth_labels(input_ids, loss_mask, self.config.num_depths)
        return Groups.of(input_ids, labels_bgs, position_ids=position_ids)

    def label_counts(self, groups: Groups) -> Tensor:
        """Return what the loss of a batch is divided by, [2, G]: its labels of each depth, and those that the loss
        through the head reads.

        They add up over the parts of a batch, on however many processes. Where rows are dropped at random it is the
        number expected, which all parts can know before the first of them is computed.
        """
        has_label_bgs = is_read_bgs = groups.labels_bgs != IGNORED_LABEL
        if self._reduced and not has_teacher(self.config.loss):
            is_read_bgs = has_label_bgs & self.t2d[groups.labels_bgs.clamp(min=0)]
        counts_2g = torch.stack([has_label_bgs, is_read_bgs]).sum((1, 3)).float()
        shares = self.config.options.kept_shares if self.training else None
        return counts_2g if shares is None else counts_2g * as_tensor_like(shares, counts_2g)

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        teacher_features: Tensor | None = None,
        label_counts: Tensor | None = None,
        groups: Groups | None = None,
    ) -> DrafterOutput:
        """Return the training loss of all groups of a batch.

        The loss of a row is that through the head, plus the kind's auxiliary loss. Each is a mean over the rows of its
        depth, these weighted with the depth's share; with D-PACE a sum over rows, weighted by their group's confidence,
        over the number of groups.

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
            groups: Those of `groups(input_ids, loss_mask, position_ids)`, where they are known already.
        """
        groups = self.groups(input_ids, loss_mask, position_ids) if groups is None else groups
        features_pd, mass_p = self._teacher(groups, features, teacher_features)
        hidden_nd = self.hidden_states(groups, features)
        credit, shares_g = self.config.options.credit, as_tensor_like(self.depth_shares, hidden_nd)
        parts = list[Part]()
        for head, place_m, normed_md in self.head_inputs(groups, hidden_nd):
            depth_m, label_m, before_m = groups.labels(place_m)
            rows_m = head.rows_of(label_m)  # of the head
            counts_g = None if label_counts is None else label_counts[1]
            weights_m = weigh_by_depth(shares_g, depth_m, head.mask_of(rows_m, shares_g.dtype), counts_g)
            result = head_loss(
                normed_md,
                head.linear,
                rows_m,
                weights_m if credit is None else None,
                head.loss,
                head.teacher_of(features_pd, before_m, mass_p),
                None if head.markov is None else head.markov.factors(groups.input_ids.flatten()[before_m]),
                head.shape,
                is_reduced=head.t2d is not None,
                needs_acceptance=head.needs_acceptance,
            )
            auxiliary = self.auxiliary_loss(groups, hidden_nd, normed_md, place_m, head, result, features_pd)
            parts.append((place_m, rows_m, result, head.weight, weights_m, auxiliary))
        return sum_losses(groups, parts, shares_g, label_counts, credit)

    def hidden_states(self, groups: Groups, features: Tensor) -> Tensor:
        """Return the hidden states of all rows of the groups [N, D], or of what the heads read in their place.

        Args:
            groups: With the tokens and positions.
            features: [B, S, F] of the target, AT each token; `previous_features` gives those that a group may read.
        """
        raise NotImplementedError

    def head_inputs(self, groups: Groups, hidden_nd: Tensor) -> Iterable[tuple[DraftHead, Tensor, Tensor]]:
        """Yield each LM head, the places of the labelled rows that it reads among the N, and its inputs [M, D]."""
        raise NotImplementedError

    def auxiliary_loss(
        self,
        groups: Groups,
        hidden_nd: Tensor,
        normed_md: Tensor,
        place_m: Tensor,
        head: DraftHead,
        result: HeadLoss,
        features_pd: Tensor | None,
    ) -> Auxiliary | None:
        """Return a loss that a kind adds to that through a head; by default none.

        Args:
            hidden_nd: As `hidden_states` gives them.
            normed_md: What the head read, of the rows at `place_m` among the N.
            result: The losses through the head.
            features_pd: [P, D] that the target's head reads, if there is a teacher.
        """
        return None

    def _teacher(
        self, groups: Groups, features: Tensor, teacher_features: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return [P, D] that the target's head reads, and [P] its probability of the draft vocabulary; None for 1."""
        compares = has_teacher(self.config.loss)
        if teacher_features is None and compares:
            if self.feature_layers != (FINAL_FEATURES,):
                raise ValueError("the loss needs the target's final features: pass `teacher_features`")
            teacher_features = features
        if teacher_features is None:
            return None, None
        features_pd, mass_p = teacher_features.flatten(0, 1), None
        if self._reduced and compares and self.config.teacher_mass:
            # A deeper depth's label is also the label of depth 1 of a later group.
            has_label_p = (groups.labels_bgs[:, 0] != IGNORED_LABEL).flatten()
            mass_p = mass_inside(features_pd, self.attached.lm_head, self.t2d, has_label_p, self.attached.shape)
        return features_pd, mass_p

    def decoder(self, max_length_tokens: int) -> DrafterDecoder | StepwiseDecoder:
        """Make a decoder for sequences of at most this many tokens, prompt included."""
        raise NotImplementedError

    def group_logits(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[B, G, S, V] that training compares with labels, of every group: for tests and small vocabularies.

        Where a depth reads drafted tokens it is given the true ones. -inf for tokens outside a reduced vocabulary.
        """
        raise NotImplementedError

    @classmethod
    def from_target(cls, target: PreTrainedModel, options: dict[str, Any]) -> Self:
        """Make a new, untrained drafter for this target, attached to it.

        Args:
            options: `drafter.options` of the recipe, keys of the config's `Options`.

        Raises:
            UserError: An option is unknown or has a wrong value, or the architecture is not supported.
        """
        config, shape = cls.config_for(target.config, options), logit_shape(target)
        if not shape.is_plain:
            config.target_logit_scale, config.target_logit_cap = shape.scale, shape.cap
        cls.complete_config(config, target)
        # In fp32 at least, to be trained.
        drafter = cls(config).to(target.device, torch.promote_types(target.dtype, torch.float32)).attach(target)
        with torch.no_grad():
            drafter.initialize_from_target(target)
        return drafter

    @classmethod
    def config_for(cls, target_config: PreTrainedConfig, options: dict[str, Any]) -> DrafterConfig:
        """Make the config of a drafter for a target of this config, which no weights are needed for.

        Raises:
            UserError: As `from_target`.
        """
        values = target_values(target_config)
        width, layers_width = embedding_width(values), values["hidden_size"]
        if width != layers_width:
            raise UserError(
                f"the target's embedding is {width} wide and its layers {layers_width} ({values['model_type']}), and "
                "drafters here have one width for both: use another target"
            )
        return cls.config_class(
            target_config=values,
            target_name_or_path=target_config._name_or_path,
            **cls.config_class.Options.checked(options, values).model_dump(),
        )

    @classmethod
    def check_target(cls, target_config: PreTrainedConfig, options: dict[str, Any]) -> None:
        """Raise what `from_target` would raise of a target's config and options, before any weight is loaded.

        Raises:
            UserError: As `from_target`.
        """
        config = cls.config_for(target_config, options)
        with torch.device("meta"):
            cls(config)

    @classmethod
    def complete_config(cls, config: DrafterConfig, target: PreTrainedModel) -> None:
        """Note down in the config what can only be read off the target."""

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Start from the target's own weights where that helps."""

    def freeze(self) -> Self:
        """Trained: from now on it only drafts, in eval mode and without gradients."""
        return self.eval().requires_grad_(False)
