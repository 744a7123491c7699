"""`drafter.options` of a recipe: what several kinds have in common, checked by pydantic like the rest of a recipe.

A kind's own are the `Options` of its config class, which writes them flat into `config.json`. What must fit the target
is compared with the target's config, which is pydantic's validation context here.
"""

from typing import Annotated, Any, Literal, Self

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

from draftsmith.models.base.depth_weights import depth_shares
from draftsmith.models.groups.attention import Backend
from draftsmith.models.losses import LossName
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loading import explain
from draftsmith.recipes.schema import Section


def one_message(message: str) -> WrapValidator:
    """For a value of several possible types: this sentence, in place of pydantic's own about each of them."""

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


def _not_with_flex(in_parts: bool, info: ValidationInfo) -> bool:
    if in_parts and info.data.get("attention") == "flex":
        raise ValueError(
            "cannot be true with `attention: flex`, which takes all masks at once: use `attention: folded`"
        )
    return in_parts


Attention = Annotated[Backend, Field(description="training backend, see `models/groups/attention.py`")]
DepthWeights = Annotated[
    PositiveFloat | list[PositiveFloat],
    one_message("must be one positive number, or a list of one for each depth"),
    Field(description="lambda of each depth, from the first; or one number d for d**0, d**1, ..."),
]
DraftDepth = Annotated[int, Field(ge=1, description="the longest path that is drafted, one forward a level")]
Loss = Annotated[LossName, Field(description="see `models/losses.py`; `ce` needs no teacher")]
DraftVocabSize = Annotated[
    PositiveInt | None,
    AfterValidator(_within_the_vocabulary),
    Field(
        description="draft this many of the target's tokens only, the most frequent of the answers that are trained on "
        "(`models/base/draft_vocabulary.py`); all by default"
    ),
]
NumLayers = Annotated[int, Field(ge=1, description="decoder layers of the target's kind")]
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
InParts = Annotated[
    bool,
    AfterValidator(_not_with_flex),
    Field(
        description="for long sequences: train the masks of a part of the positions at a time, forward and backward, "
        "so that memory does not grow with their number; the same gradients"
    ),
]
Init = Annotated[
    Literal["target", "random"], Field(description="start the layers and the norm from the target's, or at random")
]


class DrafterOptions(Section):
    """Base of all `Options`. One depth is trained; deeper ones, if any, are drafted with the same weights."""

    @classmethod
    def checked(cls, values: dict[str, Any], target_config: dict[str, Any]) -> Self:
        """Typed options, with the defaults that depend on the target.

        Raises:
            UserError: An option is unknown, or has a wrong value.
        """
        try:
            return cls.model_validate(values, context=target_config)
        except ValidationError as error:
            raise UserError(explain(cls, error, "drafter.options")) from None

    @property
    def num_depths(self) -> int:
        """G, the depths that are trained."""
        return 1

    def depth_shares(self, progress_frac: float = 1.0) -> list[float]:
        """Share of each depth in the loss, sum 1, when so much of the training is done."""
        return [1.0]

    @property
    def dpace(self) -> float | None:
        """D-PACE's alpha; None: rows are weighed by their depth alone."""
        return None


class DepthOptions(DrafterOptions):
    """Of kinds that train several depths; they say how many."""

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
        "smoothed with this alpha (the paper's is 0.5); see `models/base/depth_weights.py`",
    )

    @property
    def dpace(self) -> float | None:
        return self.dpace_alpha

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
