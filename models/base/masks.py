"""Group-wise drafters whose depths come from one forward: K trainable [MASK]s follow the newest token.

With `markov_rank` the drafts of a depth depend on the token before all the same (`markov_head.py`).

Shapes: B batch, S sequence, G = K+1 streams, K masks, N present rows, E input width of a layer, D hidden, V vocabulary,
V' of them drafted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import DrafterConfig
from draftsmith.models.base.group_wise import GroupWiseDrafter, GroupWiseOptions
from draftsmith.models.base.markov_head import MarkovHead
from draftsmith.models.base.options import DepthOptions, InParts
from draftsmith.models.decoding.batch import BatchParallelDecoder
from draftsmith.models.decoding.cached import ParallelDecoder
from draftsmith.models.decoding.markov import MarkovDecoder
from draftsmith.models.decoding.protocols import DrafterDecoder, SequenceDecoder, StepwiseDecoder
from draftsmith.models.groups.parts import PartRows
from draftsmith.models.groups.rows import GroupRows, kept_shares
from draftsmith.models.head_loss import LowRankLogits
from draftsmith.models.losses import numbers_beside


class MaskOptions(GroupWiseOptions, DepthOptions):
    """Of all kinds with masks."""

    num_masks: int = Field(4, ge=0, description="K; a round drafts K+1 tokens")
    keep_ratio: float = Field(
        1.0, gt=0, le=1, description="train [MASK]_j at a random keep_ratio**j of its positions (P-EAGLE); 1 keeps all"
    )
    keep_ratio_min: float = Field(0.0, ge=0, le=1, description="but at no smaller share of them than this")
    in_parts: InParts = False
    markov_rank: int = Field(
        0,
        ge=0,
        description="rank of a Markov head, by which a depth's drafts depend on the token before (DSpark; 256 for a "
        "target of 8B), at the price of a product of this width for each drafted token; 0: none. Not in the papers of "
        "these kinds, and no engine serves them with it",
    )

    @property
    def num_depths(self) -> int:
        return self.num_masks + 1


class MaskedDrafter(GroupWiseDrafter):
    """A kind says what its masks read, and whether the newest token's input is added to it."""

    markov_head: MarkovHead | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.markov_head = None
        if config.markov_rank:
            vocabulary = config.target_config["vocab_size"]
            self.markov_head = MarkovHead(vocabulary, config.draft_vocab_size or vocabulary, config.markov_rank)

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

    # ---- the token before ----

    def token_bias(self, previous_n: Tensor | None) -> LowRankLogits | None:
        if self.markov_head is None:
            return None
        if previous_n is None:
            raise ValueError("a Markov head reads the tokens before the labels: pass previous_n")
        return self.markov_head.factors(previous_n)

    @property
    def draft_vocabulary_rows(self) -> set[str]:
        return set() if self.markov_head is None else {"markov_head.markov_w2.weight"}

    def group_logits(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits_bgsv = super().group_logits(input_ids, features, position_ids)
        if self.markov_head is None:
            return logits_bgsv
        num_depths, length = logits_bgsv.shape[1:3]
        # Behind the last token there is none: groups that would read it repeat the last, and mean nothing.
        ahead_g, place_s = (torch.arange(count, device=input_ids.device) for count in (num_depths, length))
        place_gs = (ahead_g[:, None] + place_s).clamp(max=length - 1)
        bias = self.markov_head(input_ids[:, place_gs])
        return logits_bgsv + self.columns.widened(bias.to(logits_bgsv.dtype), 0.0)

    # ---- decoding ----

    def decoder(self, max_length_tokens: int) -> DrafterDecoder | StepwiseDecoder:
        return self._with_markov_head(ParallelDecoder(self, max_length_tokens))

    def batch_decoders(self, max_length_tokens: int, batch_size: int) -> Sequence[SequenceDecoder]:
        rows = BatchParallelDecoder(self, max_length_tokens, batch_size).rows
        return [self._with_markov_head(row) for row in rows]

    def _with_markov_head(self, decoder: DrafterDecoder) -> DrafterDecoder | StepwiseDecoder:
        head = self.markov_head
        if head is None:
            return decoder
        return MarkovDecoder(decoder, lambda tokens: head(tokens).float(), self.config.num_depths, self.device)


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
