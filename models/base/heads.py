"""Drafters with a head for each depth, which reads one state of the target and no others: Medusa and Hydra.

Shapes: B batch, S sequence, P = B*S tokens, G heads = depths, N labelled rows of a depth, D hidden, V' drafted tokens.
"""

from collections.abc import Callable, Iterator
from typing import Literal, cast

from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.draft_head import Batch, LabelledRows, training_loss
from draftsmith.models.base.drafter import DepthOptions, Drafter, DrafterConfig, Loss
from draftsmith.models.groups.rows import ActiveRows
from draftsmith.models.losses import TEACHER_LOSSES, DrafterOutput
from draftsmith.recipes.errors import UserError


class HeadOptions(DepthOptions):
    """Options of drafters that are heads on the target's last hidden state."""

    num_heads: int = Field(5, ge=1, description="G, the depths that are drafted")
    num_layers: int = Field(1, ge=1, description="residual blocks of a head")
    lm_heads: Literal["separate", "shared"] = Field(
        "separate",
        description="an LM head for each head, which starts as the target's (both papers); or the target's frozen one "
        "for all, which leaves only the blocks to train",
    )
    loss: Loss = "ce"

    @property
    def num_depths(self) -> int:
        return self.num_heads


class HeadsDrafter(Drafter):
    """LM heads, shared or not, and the loss through them. Own ones have V' rows each, with `draft_vocab_size`."""

    def add_lm_heads(self, config: DrafterConfig) -> None:
        """Make one LM head for each depth, unless they share the target's."""
        if config.lm_heads == "separate":
            hidden_size, vocabulary = (config.target_config[key] for key in ("hidden_size", "vocab_size"))
            rows = config.draft_vocab_size or vocabulary
            bias = getattr(config, "lm_head_bias", False)
            self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, rows, bias=bias) for _ in range(config.num_heads))
            for head in self.own_heads if bias else []:
                head.bias.requires_grad_(False).zero_()

    @property
    def own_heads(self) -> list[nn.Linear]:
        return [cast(nn.Linear, head) for head in self.lm_heads] if self.config.lm_heads == "separate" else []

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """LM heads start as the target's own.

        Raises:
            UserError: That has a bias, which LM heads of our own do not have.
        """
        if self.config.lm_heads == "separate":
            source = target.get_output_embeddings()
            if source.bias is not None:
                raise UserError(
                    f"the LM head of {type(target).__name__} has a bias, so LM heads of the drafter's own cannot start "
                    "as it: use drafter.options.lm_heads=shared"
                )
            self.initialize_own_heads()

    def loss_of_heads(
        self,
        labels_bgs: Tensor,
        rows: ActiveRows,
        input_ids: Tensor,
        features: Tensor,
        hidden_of: Callable[[int, Tensor], Tensor],
        counts_2g: Tensor | None = None,
    ) -> DrafterOutput:
        """The training loss.

        Args:
            labels_bgs: [B, G, S], -100 where there is none.
            rows: The active ones of these labels.
            features: [B, S, D] that the target's LM head reads, AT each token: the teacher's, where the loss has one.
            hidden_of: Head index j, and the places [N] of its rows' newest tokens among all B*S, to the rows' hidden
                states [N, D].
            counts_2g: The whole batch's `label_counts`.
        """

        def parts() -> Iterator[LabelledRows]:
            for j, place_n in enumerate(rows.labelled_by_depth()):
                token_n = rows.token_n[place_n]
                yield LabelledRows(self.draft_head(j), hidden_of(j, token_n), rows.depth_n[place_n], token_n)

        teacher_features = features if self.config.loss in TEACHER_LOSSES else None
        return training_loss(self, Batch(input_ids, labels_bgs, teacher_features, counts_2g), parts())
