"""ParallelSpec's parallel drafter, Medusa flavour (arXiv 2410.05589, section 4).

One decoder layer of the target's own kind reads the newest token and K trainable [MASK] vectors and predicts, in one
forward, the next K+1 tokens. Trained with group attention (`groups/attention.py`) over the rows that carry a label
(`groups/rows.py`), decoded with plain causal attention over its own KV cache (`decoding/cached.py`).

Where we decide what the paper leaves open:
* `inputs`: the paper does not say whether this flavour reads the target's hidden states. `embedding` = e(x_t);
  `hidden` = h_{t-1}, the feature that predicted x_t; `both` = a linear map of the two, each normalised.
* The loss of depth j+1 is averaged over its own labels, then weighted with lambda_j / sum(lambda).

Shapes: B batch, S sequence, G = K+1 streams, K masks, N present rows, D hidden, E input width of a layer, F features,
V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX, Drafter, DrafterConfig
from draftsmith.models.base.options import layer_numbers, normalized_weights, number, one_of, whole_number
from draftsmith.models.decoding.batch import BatchParallelDecoder
from draftsmith.models.decoding.cached import ParallelDecoder
from draftsmith.models.decoding.protocols import DrafterDecoder, SequenceDecoder, StepwiseDecoder
from draftsmith.models.groups.alignment import IGNORED_LABEL, depth_labels, previous_features
from draftsmith.models.groups.attention import BACKENDS
from draftsmith.models.groups.layers import Rotary, build_target_layers, layers_config
from draftsmith.models.groups.rows import GroupRows
from draftsmith.models.losses import LOSSES, TEACHER_LOSSES, DrafterOutput, depth_loss
from draftsmith.models.target.features import FINAL_FEATURES

INPUTS = ("embedding", "hidden", "both")
INITS = ("target", "random")


class ParallelDrafterConfig(DrafterConfig):
    """Options of the parallel drafter, the keys of `drafter.options` in a recipe.

    Args:
        num_masks: K; a round drafts K+1 tokens.
        num_layers: Decoder layers of the target's kind.
        inputs: What stream 0 reads: `embedding`, `hidden` or `both`.
        attention: Training backend: `folded`, `dense` or `flex`.
        loss: A name in `losses.LOSSES`; `ce` needs no teacher.
        depth_weights: lambda_j, K+1 numbers; or one number d for lambda_j = d**j (Medusa's 0.8).
        keep_ratio: Train [MASK]_j at a random keep_ratio**j of its positions (P-EAGLE's conditional drop); 1 keeps all.
        mask_residual: Add the newest token's input to each of its masks (not in the paper).
        feature_layers: Layers of the target whose hidden states are the feature, side by side: k = after k layers, -1 =
            after the final norm. EAGLE-3's idea; [-1] is what the LM head reads.
        init: Start the layers and the norm from the target's last ones (`target`) or at random (`random`).
    """

    model_type = MODEL_TYPE_PREFIX + "parallel"

    def __init__(
        self,
        target_config: dict[str, Any] | None = None,
        target_name_or_path: str = "",
        num_masks: int = 4,
        num_layers: int = 1,
        inputs: str = "both",
        attention: str = "folded",
        loss: str = "ce",
        depth_weights: float | list[float] = 0.8,
        keep_ratio: float = 1.0,
        mask_residual: bool = False,
        init: str = "target",
        feature_layers: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(target_config=target_config, target_name_or_path=target_name_or_path, **kwargs)
        chosen = [FINAL_FEATURES] if feature_layers is None else feature_layers
        self.feature_layers = layer_numbers(chosen, self.target_config.get("num_hidden_layers", 1), FINAL_FEATURES)
        self.num_masks = whole_number("num_masks", num_masks, at_least=0)
        self.num_layers = whole_number("num_layers", num_layers, at_least=1)
        self.inputs = one_of("inputs", inputs, INPUTS)
        self.attention = one_of("attention", attention, BACKENDS)
        self.loss = one_of("loss", loss, tuple(LOSSES))
        self.keep_ratio = number("keep_ratio", keep_ratio, above=0, at_most=1)
        self.init = one_of("init", init, INITS)
        self.mask_residual = one_of("mask_residual", mask_residual, (True, False))
        self.depth_weights = depth_weights
        self.resolved_depth_weights()

    @property
    def num_depths(self) -> int:
        """G, the tokens drafted in one forward."""
        return self.num_masks + 1

    def resolved_depth_weights(self) -> list[float]:
        """lambda_0..lambda_K, normalised to sum 1."""
        return normalized_weights("depth_weights", self.depth_weights, self.num_depths)


class ParallelDrafter(Drafter):
    """The drafter q; see the module's docstring.

    Other group-wise drafters are subclasses. They replace what a row reads (`real_inputs`, `mask_inputs`), the layers
    (`build`, `run_layers`) or the loss (`label_loss`), never the groups.
    """

    config_class: type[DrafterConfig] = ParallelDrafterConfig
    base_model_prefix = "drafter"
    _no_split_modules: list[str] = []  # noqa: RUF012

    def __init__(self, config: ParallelDrafterConfig) -> None:
        super().__init__(config)
        self._rotary: Rotary | None = None
        self.build(config)
        self.post_init()

    def build(self, config: ParallelDrafterConfig) -> None:
        """Make the parameters."""
        self.layers_config = layers_config(config.target_config, config.num_layers)
        built = build_target_layers(self.layers_config)
        hidden_size = self.layers_config.hidden_size
        self.layers, self.norm = built.layers, built.norm
        self.masks = nn.Parameter(torch.randn(config.num_masks, hidden_size))
        if config.inputs != "embedding":
            parts = len(config.feature_layers)
            self.feature_norm = nn.RMSNorm(hidden_size, eps=1e-6)
            self.fuse = nn.Linear(hidden_size * (parts + (config.inputs == "both")), hidden_size, bias=False)
        if config.inputs == "both":
            self.embedding_norm = nn.RMSNorm(hidden_size, eps=1e-6)

    @property
    def needs_teacher(self) -> bool:
        return self.config.loss in TEACHER_LOSSES

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.config.feature_layers)

    def attach(self, target: PreTrainedModel) -> "ParallelDrafter":
        super().attach(target)
        self._rotary = Rotary(target, self.layers_config)
        return self

    @torch.no_grad()
    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Masks near the mean embedding; with `init: target` also the target's last layers and a fusion that adds."""
        self.to(torch.promote_types(target.dtype, torch.float32))
        embedding_vd = target.get_input_embeddings()(torch.arange(target.config.vocab_size, device=target.device))
        embedding_vd = embedding_vd.to(self.masks.dtype)
        self.masks.normal_(0.0, embedding_vd.std().item()).add_(embedding_vd.mean(0))
        if self.config.inputs != "embedding":
            self.masks.div_(self.masks.pow(2).mean(-1, keepdim=True).sqrt())
            self.fuse.weight.normal_(0.0, self.fuse.in_features**-0.5 / 4)
            for block in self.fuse.weight.split(self.fuse.out_features, dim=1):
                block.diagonal().add_(1.0)
        if self.config.init == "target":
            source = target.base_model
            for layer, source_layer in zip(self.layers, source.layers[-len(self.layers) :], strict=True):
                layer.load_state_dict(source_layer.state_dict())
            self.norm.load_state_dict(source.norm.state_dict())

    # ---- training: all groups of a sequence at once ----

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        loss_mask: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        teacher_features: Tensor | None = None,
    ) -> DrafterOutput:
        """The training loss.

        Args:
            input_ids: [B, S], padded on the right if at all: then causal order alone keeps padding out.
            features: [B, S, F] of the target, AT each token.
            loss_mask: [B, S], 1 at tokens that may be predicted.
            attention_mask: Not needed: padding carries no label and nothing real sees it.
            position_ids: [B, S], 0..S-1 by default; packed documents each have their own, from 0 on, and at their
                first token a `loss_mask` of 0.
            teacher_features: [B, S, D] that the LM head reads, for losses that compare with the target's distribution.
        """
        labels_bgs = depth_labels(input_ids, loss_mask, self.config.num_depths)
        rows = GroupRows.that_matter(labels_bgs, self.config.keep_ratio if self.training else 1.0)
        hidden_nd = self.rows_hidden(rows, input_ids, features, position_ids)
        labels_n = labels_bgs.flatten()[rows.index_n]
        labelled = labels_n != IGNORED_LABEL
        depth_n = rows.stream_n[labelled]
        teacher_nd = None
        if teacher_features is not None:
            # h_{t+j} is the feature that predicts the label x_{t+1+j} of depth index j.
            teacher_nd = teacher_features[rows.batch_n[labelled], rows.position_n[labelled] + depth_n]
        return self.label_loss(hidden_nd[labelled], depth_n, labels_n[labelled], teacher_nd)

    def label_loss(
        self, hidden_nd: Tensor, depth_n: Tensor, labels_n: Tensor, teacher_nd: Tensor | None
    ) -> DrafterOutput:
        """The loss of N labelled rows: their last hidden states, depth indices, labels and the target's features."""
        lm_head = self.attached.lm_head
        weights_g = torch.tensor(self.config.resolved_depth_weights(), device=hidden_nd.device)
        return depth_loss(
            self.norm(hidden_nd),
            depth_n,
            labels_n,
            lm_head,
            weights_g,
            loss=self.config.loss,
            teacher_nd=teacher_nd,
            teacher_head=lm_head,
        )

    def rows_hidden(
        self, rows: GroupRows, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        """[N, D] of the present rows, before the final norm. Features are those AT each token."""
        real_bse = self.real_inputs(input_ids, previous_features(features, position_ids))
        newest_ne = real_bse[rows.batch_n, rows.position_n]
        is_mask_n = rows.stream_n > 0
        masks_ke = self.mask_inputs()
        of_masks_ne = masks_ke[(rows.stream_n - 1).clamp_min(0)] if len(masks_ke) else newest_ne
        if self.config.mask_residual:
            of_masks_ne = of_masks_ne + newest_ne
        hidden = torch.where(is_mask_n[:, None], of_masks_ne, newest_ne).unsqueeze(0)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        else:
            rows = rows.in_documents(position_ids)
        positions_n = position_ids.expand_as(input_ids)[rows.batch_n, rows.position_n] + rows.stream_n
        rotary = self.rotary_of(hidden, positions_n.unsqueeze(0))
        return self.run_layers(hidden, rotary, group_rows=rows, group_backend=self.config.attention)[0]

    def stream_hidden(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[B, G, S, D] of all streams, before the final norm."""
        batch, length = input_ids.shape
        rows = GroupRows.full(batch, self.config.num_depths, length, input_ids.device)
        return self.rows_hidden(rows, input_ids, features, position_ids).unflatten(0, rows.shape)

    def group_logits(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.logits_of(self.stream_hidden(input_ids, features, position_ids))

    # ---- shared by training and decoding ----

    def real_inputs(self, input_ids: Tensor, previous_features: Tensor) -> Tensor:
        """[..., E] inputs of stream 0 from x_t [...] and h_{t-1} [..., F]."""
        dtype = self.masks.dtype
        if self.config.inputs == "embedding":
            return self.attached.embedding(input_ids).to(dtype)
        # Each layer's own part is normalised by itself: residual streams grow from layer to layer.
        parts = previous_features.to(dtype).unflatten(-1, (len(self.config.feature_layers), -1))
        read = self.feature_norm(parts).flatten(-2)
        if self.config.inputs == "both":
            read = torch.cat([self.embedding_norm(self.attached.embedding(input_ids).to(dtype)), read], dim=-1)
        return self.fuse(read)

    def mask_inputs(self) -> Tensor:
        """[K, E] inputs of [MASK]_1..K."""
        return self.masks

    def run_layers(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], **attention: Any) -> Tensor:
        """[1, N, E] to [1, N, D]; `attention` says how the layers attend, see `groups/layers.py`."""
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary, **attention)
        return hidden

    def logits_of(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        lm_head = self.attached.lm_head
        return lm_head(self.norm(hidden).to(lm_head.weight.dtype))

    def rotary_of(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1, N, Dh] at positions [1, N]."""
        if self._rotary is None:
            raise ValueError("the drafter has no target: call drafter.attach(target) first")
        return self._rotary(hidden, position_ids)

    def decoder(self, max_length_tokens: int) -> DrafterDecoder | StepwiseDecoder:
        return ParallelDecoder(self, max_length_tokens)

    def batch_decoders(self, max_length_tokens: int, batch_size: int) -> Sequence[SequenceDecoder]:
        return BatchParallelDecoder(self, max_length_tokens, batch_size).rows


DRAFTER = ParallelDrafter
