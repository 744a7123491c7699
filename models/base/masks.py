"""Group-wise drafters whose depths come from one forward: K trainable [MASK]s follow the newest token.

Shapes: B batch, S sequence, G = K+1 streams, K masks, N present rows, E input width of a layer, D hidden, V vocabulary.
"""

from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field, ValidationInfo
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.base.one_forward import OneForwardDrafter, OneForwardOptions
from draftsmith.models.base.options import InParts
from draftsmith.models.decoding.cached import ParallelDecoder
from draftsmith.models.decoding.protocols import DrafterDecoder
from draftsmith.models.groups.parts import PartRows
from draftsmith.models.groups.rows import GroupRows, kept_shares
from draftsmith.models.losses import numbers_beside


class MaskOptions(OneForwardOptions):
    """Of all kinds with masks."""

    num_masks: int = Field(4, ge=0, description="K; a round drafts K+1 tokens")
    keep_ratio: float = Field(
        1.0, gt=0, le=1, description="train [MASK]_j at a random keep_ratio**j of its positions (P-EAGLE); 1 keeps all"
    )
    keep_ratio_min: float = Field(0.0, ge=0, le=1, description="but at no smaller share of them than this")
    in_parts: InParts = False

    @property
    def num_depths(self) -> int:
        return self.num_masks + 1


class MaskedDrafter(OneForwardDrafter):
    """A kind says what its masks read, and whether the newest token's input is added to it."""

    @property
    def mask_residual(self) -> bool:
        """Whether a mask reads its group's newest token too: its input is added."""
        return False

    def mask_inputs(self) -> Tensor:
        """[K, E] inputs of [MASK]_1..K."""
        raise NotImplementedError

    def present(self, labels_bgs: Tensor) -> Tensor:
        if not self.training:
            return super().present(labels_bgs)
        config = self.config
        return GroupRows.present(labels_bgs, config.keep_ratio, config.keep_ratio_min, self.generator)

    def label_counts(self, input_ids: Tensor, loss_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        counts_2g = super().label_counts(input_ids, loss_mask, position_ids)
        if not self.training or self.config.keep_ratio == 1.0:
            return counts_2g
        shares = kept_shares(self.config.num_depths, self.config.keep_ratio, self.config.keep_ratio_min)
        return counts_2g * numbers_beside(counts_2g, shares)

    def rows_inputs(self, stream_n: Tensor, newest_ne: Tensor) -> Tensor:
        if self.config.num_masks == 0:
            return newest_ne
        of_masks_ne = self.mask_inputs()[(stream_n - 1).clamp_min(0)]
        if self.mask_residual:
            of_masks_ne = of_masks_ne + newest_ne
        return torch.where((stream_n > 0)[:, None], of_masks_ne, newest_ne)

    def part_hidden(self, part: PartRows, state_ne: Tensor, ids_p: Tensor) -> Tensor:
        hidden = self.rows_inputs(part.stream_n, state_ne.index_select(0, part.real_n)).unsqueeze(0)
        part.attention.begin_stream(part.grid)
        rotary = self.rotary_of(hidden, part.position_n.unsqueeze(0))
        return self.run_layers(hidden, rotary, cached_attention=part.attention)[0]

    # ---- decoding ----

    def one_forward_decoder(self, max_length_tokens: int) -> DrafterDecoder:
        return ParallelDecoder(self, max_length_tokens)


def rarest_token(target_config: dict[str, Any]) -> int:
    """The token that no text has: the target's padding token, or the last one of its vocabulary."""
    last, padding = target_config.get("vocab_size", 1) - 1, target_config.get("pad_token_id")
    return padding if padding is not None and 0 <= padding <= last else last


def embeddings_of(target: PreTrainedModel) -> Tensor:
    """[V, D] of all its tokens, scaled where the target scales them."""
    return target.get_input_embeddings()(torch.arange(target.config.vocab_size, device=target.device))


def draw_near_mean_embedding(masks_kd: Tensor, target: PreTrainedModel) -> None:
    """Fill with normal values around the target's mean embedding, as wide as all its embeddings lie apart."""
    embedding_vd = embeddings_of(target).to(masks_kd.dtype)
    masks_kd.normal_(0.0, embedding_vd.std().item()).add_(embedding_vd.mean(0))


def _mask_token(token: int | None, info: ValidationInfo) -> int:
    last = (info.context or {}).get("vocab_size", 1) - 1
    if token is None:
        return rarest_token(info.context or {})
    if not 0 <= token <= last:
        raise ValueError(f"must be a token id from 0 to {last}")
    return token


# By default None, validated.
MaskTokenId = Annotated[
    int | None,
    AfterValidator(_mask_token),
    Field(
        description="the token that every [MASK] reads, best one that no text has; by default the target's padding "
        "token, or the last one of its vocabulary"
    ),
]
