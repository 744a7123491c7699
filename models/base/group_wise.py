"""Drafters made of decoder layers of the target's kind, trained on all groups of a sequence together (2410.05589, 4.1).

Depth 0 of a group reads the newest token and the target's feature before it. Further depths, if any, follow it: K
trainable [MASK]s, which all come from one forward, or the drafter's own output (EAGLE-3). Only the active rows are
computed, with group attention; when drafting, rows attend to the drafter's own KV cache instead.

Shapes: B batch, S sequence, G depths, K masks, N active rows, M of them labelled, D hidden, E input width of a layer, F
features, V vocabulary, V' of them drafted, W tree nodes of a call.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Self

import torch
from pydantic import AfterValidator, Field, ValidationInfo, model_validator
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.models.base.config import DrafterConfig
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.options import Attention, DepthOptions, DrafterOptions, SlidingWindow, ascending_layers
from draftsmith.models.decoding.decoders import (
    DrafterDecoder,
    MarkovDecoder,
    ParallelDecoder,
    StepwiseDecoder,
    TreeDecoder,
)
from draftsmith.models.groups.attention import GroupAttention
from draftsmith.models.groups.layers import Rotate, build_rotary, build_target_layers, layers_config
from draftsmith.models.groups.layout import Groups, previous_features
from draftsmith.models.kernels.cpu_layers import CpuLayers
from draftsmith.recipes.schema import MOST_DEPTHS


class GroupWiseOptions(DrafterOptions):
    """Options of drafters that are trained on groups, a token and the rows after it (`models/groups`)."""

    attention: Attention = "folded"
    sliding_window: SlidingWindow = None

    @property
    def rows_of_draft(self) -> int:
        """Return the length of a group or of a path of a draft tree, the longer one; a sliding window must hold it."""
        return max(self.num_depths, getattr(self, "draft_depth", None) or 0)

    @model_validator(mode="after")
    def _window_holds_a_draft(self) -> Self:
        if self.sliding_window is not None and self.sliding_window <= self.rows_of_draft:
            raise ValueError(f"`sliding_window` must be greater than {self.rows_of_draft}, the positions of a draft")
        return self


class OneForwardOptions(GroupWiseOptions, DepthOptions):
    """Options of drafters that draft all depths in one forward."""

    markov_rank: int = Field(
        0,
        ge=0,
        description="rank of a Markov head (DSpark), which makes a draft token's logits depend on the draft "
        "token before it, at the cost of one product of this width per draft token (DSpark's: 256 for a target "
        "of 8B); 0: none. Other kinds' papers do not have it, and no engine serves them with it",
    )


class MaskOptions(OneForwardOptions):
    """Options of drafters that read K [MASK]s after the newest token."""

    num_masks: int = Field(4, ge=0, le=MOST_DEPTHS, description="K, the number of [MASK]s; a round drafts K+1 tokens")
    keep_ratio: float = Field(
        1.0,
        gt=0,
        le=1,
        description="train [MASK]_j at a random share keep_ratio**j of the positions (P-EAGLE), to save memory; 1: "
        "at all positions",
    )
    keep_ratio_min: float = Field(
        0.0,
        ge=0,
        le=1,
        description="smallest share of positions at which a [MASK] is trained, whatever keep_ratio gives",
    )

    @property
    def num_depths(self) -> int:
        return self.num_masks + 1

    @property
    def kept_shares(self) -> list[float] | None:
        if self.keep_ratio == 1.0:
            return None
        return [max(self.keep_ratio**j, self.keep_ratio_min) for j in range(self.num_depths)]


def rarest_token(target_config: dict[str, Any]) -> int:
    """Return a token id that texts lack: padding, or the vocabulary's last id if padding is missing or ends answers."""
    last, padding = target_config.get("vocab_size", 1) - 1, target_config.get("pad_token_id")
    ends = target_config.get("eos_token_id")
    is_end = padding in (ends if isinstance(ends, list) else [ends])
    return last if padding is None or is_end or not 0 <= padding <= last else padding


def _mask_token(token: int | None, info: ValidationInfo) -> int:
    config = info.context or {}
    last = config.get("vocab_size", 1) - 1
    if token is None:
        return rarest_token(config)
    if not 0 <= token <= last:
        raise ValueError(f"must be a token id from 0 to {last}")
    return token


# None by default, which is validated.
MaskTokenId = Annotated[
    int | None,
    AfterValidator(_mask_token),
    Field(
        description="id of the token whose embedding every [MASK] reads, preferably one that is in no text; by default "
        "the padding token if it is no end token, or the vocabulary's last one"
    ),
]


def layers_or(default: Callable[[int], list[int]]) -> AfterValidator:
    """Build a validator of `feature_layers` that replaces None by `default(the target's number of layers)`."""

    def check(layers: list[int] | None, info: ValidationInfo) -> list[int]:
        if layers is None:
            return default((info.context or {}).get("num_hidden_layers", 1))
        return ascending_layers(layers, info)

    return AfterValidator(check)


class GroupWiseDrafter(Drafter):
    """Base of drafters that are trained on groups: a token, then K masks or its own drafts.

    A kind defines the layers' inputs (`real_inputs`, `mask_inputs`); it may replace the layers and add an
    `auxiliary_loss`.
    """

    layers: nn.ModuleList
    norm: nn.Module
    layers_config: PreTrainedConfig
    rotary_of: Rotate  # RoPE's cos and sin [1, N, Dh] of hidden states at positions [1, N]

    def build(self, config: DrafterConfig) -> None:
        self.layers_config = layers_config(config.layers_of, config.num_layers)
        self.layers, self.norm = build_target_layers(self.layers_config)

    def attach(self, target: PreTrainedModel) -> Self:
        self.rotary_of = build_rotary(self.config.layers, target, self.layers_config)
        return super().attach(target)

    @property
    def takes_target_layers(self) -> bool:
        """Return True if the drafter's layers start with the weights of some of the target's layers."""
        return self.config.init == "target" and self.config.layers == "target"

    # ---- training ----

    def hidden_states(self, groups: Groups, features: Tensor) -> Tensor:
        """Return the hidden states [N, D] of the N computed rows, before the final norm."""
        previous_bsf = previous_features(features, groups.position_ids)
        newest_ne = self.real_inputs(groups.input_ids, previous_bsf).flatten(0, 1).index_select(0, groups.token_n)
        masks_ke, hidden_ne = self.mask_inputs(), newest_ne
        if masks_ke is not None and len(masks_ke):
            of_masks_ne = masks_ke[(groups.row_n - 1).clamp_min(0)]
            if self.mask_residual:
                of_masks_ne = of_masks_ne + newest_ne
            hidden_ne = torch.where((groups.row_n > 0)[:, None], of_masks_ne, newest_ne)
        hidden = hidden_ne.unsqueeze(0)
        rotary = self.rotary_of(hidden, groups.position_n.unsqueeze(0))
        attention = GroupAttention(self.config.attention, groups, window=self.sliding_window)
        return self.run_layers(hidden, rotary, attention)[0]

    def head_inputs(self, groups: Groups, hidden_nd: Tensor) -> Iterable[tuple[nn.Linear, Tensor, Tensor]]:
        yield self.head(), groups.labelled_m, self.norm(hidden_nd.index_select(0, groups.labelled_m))

    # ---- shared by training and decoding ----

    def real_inputs(self, input_ids: Tensor, previous_features: Tensor) -> Tensor:
        """Compute the layers' inputs [..., E] from newest tokens x_t [...] and target features h_{t-1} [..., F]."""
        raise NotImplementedError

    def mask_inputs(self) -> Tensor | None:
        """Return the layers' inputs [K, E] for [MASK]_1..K, or None for kinds without masks."""
        return None

    @property
    def sliding_window(self) -> int | None:
        """Return the number of tokens that a query attends to, up to and including its own position; None: all."""
        return self.config.sliding_window

    @property
    def mask_residual(self) -> bool:
        """Return True if the newest token's input is added to the input of each mask of its group."""
        return getattr(self.config, "mask_residual", False)

    def drafted_inputs(self, input_ids: Tensor, feedback: Tensor) -> Tensor:
        """Compute the layers' next inputs [W, E], from draft tokens [W] and the outputs [W, D] that predicted them."""
        return self.real_inputs(input_ids, feedback)

    def run_layers(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attention: Any) -> Tensor:
        """Run the decoder layers on inputs [1, N, E]; return [1, N, D]. They call `attention.attend`."""
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary, row_attention=attention)
        return hidden

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Map the layers' outputs [..., D] to logits [..., V'], by the final norm and the LM head."""
        return self.head_logits(self.norm(hidden))

    # ---- decoding ----

    def cpu_layers(self) -> CpuLayers | None:
        """Return the layers as a `CpuLayers`, one C++ call on a CPU; None if that does not support them."""
        ours = type(self)
        if (ours.run_layers, ours.logits_of) != (GroupWiseDrafter.run_layers, GroupWiseDrafter.logits_of):
            return None
        head = self.head() if self.logit_shape.is_plain else None
        return CpuLayers.of(list(self.layers), self.norm, head, self.layers_config)

    def decoder(self, max_length_tokens: int) -> DrafterDecoder | StepwiseDecoder:
        """Make a decoder: with masks one forward drafts all depths, else a tree grows `draft_depth` levels deep."""
        if self.mask_inputs() is None:
            return TreeDecoder(self, max_length_tokens, self.config.draft_depth)
        return self.with_markov_head(ParallelDecoder(self, max_length_tokens))

    def with_markov_head(self, decoder: DrafterDecoder) -> DrafterDecoder | StepwiseDecoder:
        """Wrap a decoder so that the Markov head's bias is added to its logits; without such a head return it as is."""
        return decoder if self.markov_head is None else MarkovDecoder(decoder, self)


def embeddings_of(target: PreTrainedModel) -> Tensor:
    """Return the target's embeddings [V, D] of all tokens, with its scale of embeddings, if any."""
    return target.get_input_embeddings()(torch.arange(target.config.vocab_size, device=target.device))


def draw_near_mean_embedding(masks_kd: Tensor, target: PreTrainedModel) -> None:
    """Fill [K, D] with normal values: the target's mean embedding, and the standard deviation of all embeddings."""
    embedding_vd = embeddings_of(target).to(masks_kd.dtype)
    masks_kd.normal_(0.0, embedding_vd.std().item()).add_(embedding_vd.mean(0))
