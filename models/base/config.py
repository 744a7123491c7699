"""A drafter's config: the target that it was made for, and its kind's options, flat in `config.json`."""

from dataclasses import field
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.models.base.options import DrafterOptions
from draftsmith.models.groups.layers import of_kind
from draftsmith.models.target.view import EMBEDDING_WIDTHS, target_values
from draftsmith.models.target_logits import LogitShape

MODEL_TYPE_PREFIX = "draftsmith-"
# Config values in which a target must equal the one that the drafter was made for.
MATCHED_KEYS = ("model_type", "hidden_size", "vocab_size")


class DrafterConfig(PreTrainedConfig):
    """Config of a drafter: the target that it was made for, and its kind's options.

    Args:
        target_config: Result of `target_values`, so that a drafter can be built without its target.
        target_name_or_path: Name or path of that target, for messages.
        kwargs: Keys of `Options`, which become attributes. Unknown keys are stored unchanged.
    """

    model_type = "draftsmith"
    has_no_defaults_at_init = True
    Options: ClassVar[type[DrafterOptions]] = DrafterOptions

    target_config: dict[str, Any] = field(default_factory=dict)
    target_name_or_path: str = ""
    # Shape of the target's logits, see `models/target_logits.py`.
    target_logit_scale: float = 1.0
    target_logit_cap: float | None = None
    # Options of most kinds: whose kind its decoder layers are of, see `of_kind`, and `FirstToken`.
    layers = "target"
    first_token = True
    # Kind in the name of a Hub repository, if other than `drafter.kind`: engines detect the method by that name.
    published_as: ClassVar[str | None] = None
    # Why no engine can have it, and what to train instead; empty where some format has a place for it.
    not_exported: ClassVar[str] = ""

    def __post_init__(self, **kwargs: Any) -> None:
        given = {key: kwargs.pop(key) for key in self.Options.model_fields if key in kwargs}
        super().__post_init__(**kwargs)
        for key, value in self.Options.checked(given, self.target_config):
            setattr(self, key, value)

    @property
    def kind(self) -> str:
        """Return the kind of drafter, `drafter.kind` in a recipe."""
        return self.model_type.removeprefix(MODEL_TYPE_PREFIX)

    @property
    def hidden_size(self) -> int:
        """Return D, the target's hidden size."""
        return self.target_config.get("hidden_size", 0)

    @property
    def has_own_heads(self) -> bool:
        """Return True if the drafter has LM heads that it trains, and does not use the target's."""
        return False

    @property
    def target_logits(self) -> LogitShape:
        """Return the scale and cap of the target's logits."""
        return LogitShape(self.target_logit_scale, self.target_logit_cap)

    @property
    def layers_of(self) -> dict[str, Any]:
        """Return the config values of the drafter's decoder layers (`of_kind`), with the options that replace some."""
        layers_of = of_kind(self.layers, self.target_config)
        if (rope := getattr(self, "rope", None)) is not None:
            layers_of["rope_parameters"] = dict(rope)
        if (width := getattr(self, "intermediate_size", None)) is not None:
            layers_of["intermediate_size"] = width
        return layers_of

    @property
    def options(self) -> DrafterOptions:
        """Return the drafter's options as an object of its kind's `Options`."""
        return self.Options.model_construct(**{key: getattr(self, key) for key in self.Options.model_fields})

    @property
    def num_depths(self) -> int:
        """Return G, the number of depths that are trained."""
        return self.options.num_depths

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, options: dict[str, Any]) -> Self:
        """Make the config of a drafter from the target's config alone, without its weights.

        Raises:
            UserError: An option is unknown or has a wrong value, or the architecture is not supported.
        """
        values = target_values(target_config)
        layers_width = values["hidden_size"]
        width = next((values[key] for key in EMBEDDING_WIDTHS if isinstance(values.get(key), int)), layers_width)
        if width != layers_width:
            raise UserError(
                f"the target's embedding is {width} wide and its layers {layers_width} ({values['model_type']}), and "
                "drafters here have one width for both: use another target"
            )
        return cls(
            target_config=values,
            target_name_or_path=target_config._name_or_path,
            **cls.Options.checked(options, values).model_dump(),
        )

    def check_same_target(self, target: PreTrainedModel) -> None:
        """Check that a drafter of this config fits a target.

        Raises:
            UserError: The drafter was made for a target of another kind or size.
        """
        expected, found = self.target_config, target_values(target.config)
        for key in MATCHED_KEYS:
            if expected.get(key) != found.get(key):
                raise UserError(
                    f"this drafter was made for a target with {key} {expected.get(key)} "
                    f"({self.target_name_or_path}), not {found.get(key)}: use it with that target, "
                    "or train a drafter for this one"
                )
