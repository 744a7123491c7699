"""Group-wise drafters whose depths all come from one forward, and the Markov head that they may have.

With `markov_rank` the drafts of a depth depend on the token before all the same (`markov_head.py`).

Shapes: B batch, S sequence, G depths, N labelled rows, V vocabulary, V' of them drafted.
"""

import torch
from pydantic import Field
from torch import Tensor

from draftsmith.models.base.drafter import DrafterConfig
from draftsmith.models.base.group_wise import GroupWiseDrafter, GroupWiseOptions
from draftsmith.models.base.markov_head import MarkovHead
from draftsmith.models.base.options import DepthOptions
from draftsmith.models.decoding.markov import MarkovDecoder
from draftsmith.models.decoding.protocols import DrafterDecoder, StepwiseDecoder
from draftsmith.models.head_loss import LowRankLogits


class OneForwardOptions(GroupWiseOptions, DepthOptions):
    """Of all such kinds."""

    markov_rank: int = Field(
        0,
        ge=0,
        description="rank of a Markov head, by which a depth's drafts depend on the token before (DSpark; 256 for a "
        "target of 8B), at the price of a product of this width for each drafted token; 0: none. Not in the papers of "
        "the other kinds, and no engine serves those with it",
    )


class OneForwardDrafter(GroupWiseDrafter):
    """A kind has decoders of its own for the one forward; what a token before says of the next one is added here."""

    markov_head: MarkovHead | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.markov_head = None
        if config.markov_rank:
            vocabulary = config.target_config["vocab_size"]
            self.markov_head = MarkovHead(vocabulary, config.draft_vocab_size or vocabulary, config.markov_rank)

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

    def one_forward_decoder(self, max_length_tokens: int) -> DrafterDecoder:
        """Of the logits before what the token before adds."""
        raise NotImplementedError

    def decoder(self, max_length_tokens: int) -> DrafterDecoder | StepwiseDecoder:
        decoder, head = self.one_forward_decoder(max_length_tokens), self.markov_head
        if head is None:
            return decoder
        return MarkovDecoder(decoder, lambda tokens: head(tokens).float(), self.config.num_depths, self.device)
