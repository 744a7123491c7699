"""`drafter.options` of a recipe: the keys that all kinds have, and those that some share.

pydantic checks them like the rest of the recipe. A kind's own are the `Options` of its config class. What must fit the
target is compared with the target's config, which is pydantic's validation context here.
"""

import sys
from typing import Annotated, Any, ClassVar, Literal, Self, TypeGuard

import torch
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    WrapValidator,
)
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.errors import UserError, reason
from draftsmith.models.groups.attention import Backend
from draftsmith.models.groups.layers import OTHER_KINDS, SUPPORTED_MODEL_TYPES
from draftsmith.models.loss import LOSSES, LossName
from draftsmith.recipes.loading import explain
from draftsmith.recipes.removed import drop_unset, removal_of
from draftsmith.recipes.schema import MOST_DEPTHS, MOST_LAYERS, Section


def one_message(message: str) -> WrapValidator:
    """Replace pydantic's messages, one for each possible type of a value, by this sentence."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(message) from None

    return WrapValidator(check)


def at_most(key: str, sentence: str) -> AfterValidator:
    """Build a check that a size, where it is given, is at most the target's config value `key`."""

    def check(size: int | None, info: ValidationInfo) -> int | None:
        most = (info.context or {}).get(key)
        if size is not None and most is not None and size > most:
            raise ValueError(sentence.format(most))
        return size

    return AfterValidator(check)


Attention = Annotated[Backend, Field(description="attention backend of training, see `models/groups/attention.py`")]
SlidingWindow = Annotated[
    PositiveInt | None,
    Field(
        description="number of tokens that a row attends to, up to and including its own position, as in transformers, "
        "and more than the positions of a draft; null: all (published for DFlash2: 2,048)"
    ),
]
DepthWeights = Annotated[
    PositiveFloat,
    one_message("must be one positive number d, for the weights d**0, d**1, ..."),
    Field(description="number d: the loss weights lambda of the depths are d**0, d**1, ..., from the first"),
]
DraftDepth = Annotated[
    int,
    Field(ge=1, le=MOST_DEPTHS, description="most draft tokens along one path; each needs one forward of the drafter"),
]


def _without_removed_losses(loss: Any) -> Any:
    for name in loss if isinstance(loss, dict) else [loss]:
        if removal := removal_of("drafter.options.loss", str(name)):
            raise ValueError(removal)
    return loss


Loss = Annotated[
    LossName | Annotated[dict[LossName, PositiveFloat], Field(min_length=1)],
    one_message(f"must be {', '.join(LOSSES)}, or some of these with a weight each, as in `{{ce: 0.1, tv: 1.8}}`"),
    BeforeValidator(_without_removed_losses),
    Field(
        description="loss between drafter and target, see `models/loss.py`; `ce` needs no logits of the target; "
        "`{ce: 0.1, tv: 1.8}` for a weighted sum"
    ),
]
DraftVocabSize = Annotated[
    PositiveInt | None,
    at_most("vocab_size", "must be at most the target's vocabulary of {} (leave it out to draft all tokens)"),
    Field(
        description="size of a reduced draft vocabulary: the most frequent tokens of the training answers "
        "(`models/base/draft_vocab.py`); by default the target's whole vocabulary"
    ),
]
NumLayers = Annotated[int, Field(ge=1, le=MOST_LAYERS, description="number of decoder layers")]
IntermediateSize = Annotated[
    PositiveInt | None,
    at_most("intermediate_size", "must be at most {}, the width of the target's MLPs"),
    Field(
        description="width of the layers' MLPs, by default that of the target's; with `init: target` a narrower one "
        "keeps the neurons of the largest output weights (not in the paper)"
    ),
]
MaskResidual = Annotated[
    bool, Field(description="add the newest token's input to each [MASK]'s input (not in the paper)")
]
FirstToken = Annotated[
    bool,
    Field(
        description="also compute a row for the first token of a conversation, for which there is no feature; "
        "vLLM and SGLang have no such row, so set false for a drafter of features that they serve"
    ),
]
Init = Annotated[
    Literal["target", "random"], Field(description="initial weights of layers and norm: the target's, or random ones")
]


def _kind_of_layers(kind: str | None, info: ValidationInfo) -> str:
    model_type = (info.context or {}).get("model_type", SUPPORTED_MODEL_TYPES[0])
    own = model_type in SUPPORTED_MODEL_TYPES
    if kind == "target" and not own:
        raise ValueError(f"layers of the target's own kind, {model_type}, are not supported: use llama or qwen3")
    return kind or ("target" if own else "llama")


# None by default, which is validated.
Layers = Annotated[
    Literal["target", "llama", "qwen3"] | None,
    AfterValidator(_kind_of_layers),
    Field(
        description="architecture of the decoder layers: `target`: the target's own, whose weights they can "
        "start from; `llama` or `qwen3` (q/k norms): with the target's width, heads and RoPE, for mixtures of "
        "experts, targets of other attention, and engines that run only these. By default `target` where it is "
        "supported, else `llama`"
    ),
]


def is_rope_theta(value: Any) -> TypeGuard[float]:
    """Return whether a value can be RoPE's base: a finite number above 0."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _flat_rope(rope: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
    if rope is None:
        return None
    target = info.context or {}
    theta, kind = rope.get("rope_theta"), rope.get("rope_type", "default")
    if not is_rope_theta(theta):
        raise ValueError("must have a positive, finite rope_theta, as in `{rope_theta: 10000}`")
    if kind not in ("default", *ROPE_INIT_FUNCTIONS):
        raise ValueError(f"has rope_type {kind}: use one of default, {', '.join(ROPE_INIT_FUNCTIONS)}")
    rope = {**rope, "rope_type": kind, "rope_theta": float(theta)}
    if target.get("num_attention_heads"):
        head_dim = target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"]
        try:
            with torch.device("cpu"):  # also where a drafter is built without memory
                rotary = OTHER_KINDS["llama"](config=LlamaConfig(head_dim=head_dim, rope_parameters=rope))
            if not (rotary.inv_freq * rotary.attention_scaling).isfinite().all():
                raise ValueError("its frequencies are infinite or NaN")
        except Exception as error:  # of any type: each kind of RoPE reads its own keys
            raise ValueError(
                f"is no RoPE of this target's heads, which have {head_dim} dimensions ({reason(error)})"
            ) from None
    return rope


Rope = Annotated[
    dict[str, Any] | None,
    AfterValidator(_flat_rope),
    Field(
        description="RoPE of the drafter's layers, if it is not the target's, in transformers' form, as "
        "`{rope_theta: 10000}`, which EAGLE-3's own code trains"
    ),
]


class DrafterOptions(Section):
    """Options that every kind has. By default one depth is trained; deeper ones are drafted with the same weights."""

    loss: Loss = "kl"
    draft_vocab_size: DraftVocabSize = None

    @classmethod
    def checked(cls, values: dict[str, Any], target_config: dict[str, Any]) -> Self:
        """Check options; return them typed, with the defaults that depend on the target.

        Raises:
            UserError: An option is unknown, or has a wrong value.
        """
        try:
            return cls.model_validate(drop_unset(values, "drafter.options"), context=target_config)
        except ValidationError as error:
            raise UserError(explain(cls, error, "drafter.options")) from None

    # Options that `serve --learn` sets.
    while_serving: ClassVar[dict[str, Any]] = {}

    @property
    def num_depths(self) -> int:
        """Return G, the number of depths that are trained."""
        return 1

    @property
    def depth_shares(self) -> list[float]:
        """Return the share of each depth in the loss, sum 1."""
        return [1.0]

    @property
    def kept_shares(self) -> list[float] | None:
        """Return the share of each depth's rows that training keeps, if it drops some at random."""
        return None


class DepthOptions(DrafterOptions):
    """Options of kinds that train several depths, whose number they define."""

    depth_weights: DepthWeights = 0.8
    # Set by `serve --learn`: drafts after a first error are never accepted.
    while_serving: ClassVar[dict[str, Any]] = {"until_first_error": True}
    until_first_error: bool = Field(
        False, description="no loss at the depths after the first wrong prediction of a group (2607.01893)"
    )

    @property
    def depth_shares(self) -> list[float]:
        weights = [self.depth_weights**j for j in range(self.num_depths)]
        return [weight / sum(weights) for weight in weights]


def ascending_layers(layers: list[int], info: ValidationInfo, final: int | None = None) -> list[int]:
    """Check that these are layers of the target; `final` may stand at the end for its last norm."""
    inner = layers[:-1] if layers and layers[-1] == final else layers
    num_layers = (info.context or {}).get("num_hidden_layers", 1)
    if not layers or inner != sorted(set(inner)) or not all(0 <= layer < num_layers for layer in inner):
        end = "" if final is None else f" (and {final} at the end for the final hidden states)"
        raise ValueError(f"must be a list of ascending layer numbers from 0 to {num_layers - 1}{end}")
    return layers
