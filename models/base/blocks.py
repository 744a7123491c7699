"""Drafters of blocks that are denoised before a context of the target's features (DFlash, arXiv 2602.06036).

A group is a block: the newest token x_t, the anchor, and `block_size` - 1 masks, all embedded by the target. Their
layers are Qwen 3's, for every target: engines know no others. The context is c_s = hidden_norm(fc(features of x_s)) of
all s < t; every layer makes keys and values of c by its own projections, at c's positions, and no row of c goes through
a layer. Inside a block every row sees every row (`causal`: none behind it): `groups/context.py` has the mask beside
ParallelSpec's.

Which row predicts which token: a mask at position t+k is denoised, so its row predicts x_{t+k} itself, and the anchor's
row, whose token is known, predicts nothing: `block_size` - 1 tokens are drafted. With `sample_from_anchor` a row
predicts the token behind its own position, as language models do, the anchor's row x_{t+1}: `block_size` tokens.
Engines draft in these two ways too, with as many rows as training had: a row left out would change all others.

Every position that has a label is an anchor (published: 512 at random in a sequence); `anchor_ratio` drops some.
A block is computed whole or not at all, with its rows behind the end of an answer, which have no label but are seen.
A sequence's first token has no feature before it and is no anchor in training.

Shapes: B batch, S sequence, G depths, N rows, C context rows, D hidden, F features, Dh head size.
"""

import copy
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field, ValidationInfo
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

from draftsmith.models.base.drafter import DrafterConfig
from draftsmith.models.base.masks import MaskTokenId
from draftsmith.models.base.one_forward import OneForwardDrafter, OneForwardOptions
from draftsmith.models.base.options import DepthWeights, Init, MaskResidual, NumLayers, ascending_layers
from draftsmith.models.decoding.blocks import BlockDecoder
from draftsmith.models.decoding.protocols import DrafterDecoder
from draftsmith.models.groups.alignment import IGNORED_LABEL, previous_features
from draftsmith.models.groups.context import ContextAttention
from draftsmith.models.groups.layers import Rotary, build_target_layers, qwen3_layers_config
from draftsmith.models.groups.rows import GroupRows

# Whose layers have the parts of Qwen 3's, by the same names and with the same meaning.
LIKE_QWEN3 = ("llama", "mistral", "qwen2", "qwen3")
PUBLISHED_FEATURE_LAYERS = 5


def _layers_or_default(layers: list[int] | None, info: ValidationInfo) -> list[int]:
    if layers is None:
        return default_feature_layers((info.context or {}).get("num_hidden_layers", 1))
    return ascending_layers(layers, info)


class BlockOptions(OneForwardOptions):
    """Of all such kinds."""

    block_size: int = Field(6, ge=2, description="rows of a block, the newest token's included (published: 7 to 16)")
    num_layers: NumLayers = 3
    sample_from_anchor: bool = Field(
        False,
        description="a row predicts the token behind its own position, so that a block drafts `block_size` tokens; "
        "otherwise the one at it, and a block drafts one less",
    )
    causal: bool = Field(False, description="inside a block a row sees none behind it (vLLM has this, SGLang has not)")
    feature_layers: Annotated[list[int] | None, AfterValidator(_layers_or_default)] = Field(
        None,
        validate_default=True,
        description="layers of the target whose residual streams make the context, ascending; k = after k layers. By "
        "default up to five, evenly from the second to the last but two, as published",
    )
    mask_token_id: MaskTokenId = Field(None, validate_default=True)
    mask_residual: MaskResidual = False
    anchor_ratio: float = Field(
        1.0, gt=0, le=1, description="train the blocks of a random share of the positions, for memory; 1 trains all"
    )
    depth_weights: DepthWeights = 0.78
    init: Init = "target"

    @property
    def num_depths(self) -> int:
        return self.block_size - (not self.sample_from_anchor)


def default_feature_layers(num_layers: int) -> list[int]:
    """Evenly from after the second to before the last two of L layers; of few layers up to before the last."""
    last = num_layers - (2 if num_layers >= 2 * PUBLISHED_FEATURE_LAYERS else 1)
    first = min(2, last)
    count = min(PUBLISHED_FEATURE_LAYERS, last - first + 1)
    return sorted({round(first + i * (last - first) / max(count - 1, 1)) for i in range(count)})


class BlockDrafter(OneForwardDrafter):
    """Parameters, rows and decoders of all such kinds."""

    def build(self, config: DrafterConfig) -> None:
        self.layers_config = qwen3_layers_config(config.target_config, config.num_layers)
        built, hidden_size = build_target_layers(self.layers_config), self.layers_config.hidden_size
        self.layers, self.norm, self.hidden_norm = built.layers, built.norm, copy.deepcopy(built.norm)
        self.fc = nn.Linear(len(config.feature_layers) * hidden_size, hidden_size, bias=False)

    def make_rotary(self, target: PreTrainedModel) -> Rotary:
        return Rotary(Qwen3RotaryEmbedding, self.layers_config, target.device)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.config.feature_layers)

    @property
    def reads_first_token(self) -> bool:
        return False

    @property
    def first_stream(self) -> int:
        """Behind the context's stream, and the anchor's where that predicts nothing."""
        return 1 if self.config.sample_from_anchor else 2

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """With `init: target` c near the mean of the features, and layers from the target's first to its last, evenly,
        where these are Qwen 3's but for its q/k norms: a block begins as embeddings and ends before the LM head."""
        self.fc.weight.normal_(0.0, self.fc.in_features**-0.5 / 4)
        if self.config.init != "target" or target.config.model_type not in LIKE_QWEN3:
            return
        for block in self.fc.weight.split(self.fc.out_features, dim=1):
            block.diagonal().add_(1.0 / len(self.config.feature_layers))
        source = target.base_model
        last = len(source.layers) - 1
        for place, layer in enumerate(self.layers, start=1):
            share = (place - 1) / (len(self.layers) - 1) if len(self.layers) > 1 else 1.0
            start_layer_from(layer, source.layers[round(share * last)])
        self.hidden_norm.load_state_dict(source.layers[-1].input_layernorm.state_dict())
        self.norm.load_state_dict(source.norm.state_dict())

    # ---- training ----

    def present(self, labels_bgs: Tensor) -> Tensor:
        """[B, 1 + block_size, S] bool: whole blocks, and the context before the last of them."""
        blocks_bs = labels_bgs[:, 0] != IGNORED_LABEL
        if self.training and self.config.anchor_ratio < 1:
            drawn_bs = torch.rand(blocks_bs.shape, generator=self.generator, device=blocks_bs.device)
            blocks_bs = blocks_bs & (drawn_bs < self.config.anchor_ratio)
        context_bs = blocks_bs.flip(-1).cumsum(-1).flip(-1) > 0
        return torch.cat([context_bs[:, None], blocks_bs[:, None].expand(-1, self.config.block_size, -1)], dim=1)

    def label_counts(self, input_ids: Tensor, loss_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        counts_2g = super().label_counts(input_ids, loss_mask, position_ids)
        return counts_2g * self.config.anchor_ratio if self.training else counts_2g

    def rows_of(self, present_bgs: Tensor, labels_bgs: Tensor, position_ids: Tensor | None) -> GroupRows:
        labels_bgs = F.pad(labels_bgs, (0, 0, self.first_stream, 0), value=IGNORED_LABEL)
        one_behind_the_other = self.lays_out(present_bgs)
        return GroupRows.of(
            present_bgs, labels_bgs, position_ids, self.reads_first_token, one_behind_the_other, whole_groups=True
        )

    def rows_hidden(
        self, rows: GroupRows, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        """[N, D] of the rows of blocks, before the final norm; zeros for those of the context."""
        (context_c, context_grid), (block_n, block_grid) = rows.first_and_others()
        # The context's row at token t is h_{t-1}, at its own position; row k of a block stands k behind its anchor.
        positions_n = self.positions(rows, position_ids) - 1
        read_pf = previous_features(self.features_read(features), position_ids).flatten(0, 1)
        context = self.context_of(read_pf.index_select(0, rows.token_n[context_c])).unsqueeze(0)
        rotary = self.rotary_of(context, positions_n[context_c].unsqueeze(0))
        keys_values = self.context_keys_values(context, rotary)
        newest_nd, is_mask_n = self.embedded(input_ids.flatten()[rows.token_n[block_n]]), rows.stream_n[block_n] > 1
        masks_nd = self.mask_inputs()[:1] + newest_nd if self.config.mask_residual else self.mask_inputs()[:1]
        hidden = torch.where(is_mask_n[:, None], masks_nd, newest_nd).unsqueeze(0)
        rotary = self.rotary_of(hidden, positions_n[block_n].unsqueeze(0))
        config = self.config
        attention = ContextAttention(context_grid, block_grid, keys_values, config.attention, config.causal)
        hidden_nd = self.run_layers(hidden, rotary, cached_attention=attention)[0]
        return hidden_nd.new_zeros(len(rows.index_n), hidden_nd.shape[-1]).index_copy(0, block_n, hidden_nd)

    def context_keys_values(self, context: Tensor, rotary: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Of each layer, [1, Hkv, C, Dh] twice, from c [1, C, D] and cos and sin [1, C, Dh]; keys are rotated."""
        cos, sin = (part.unsqueeze(1) for part in rotary)
        found = []
        for layer in self.layers:
            attention: Any = layer.self_attn
            shape = (*context.shape[:-1], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(context).view(shape)).transpose(1, 2)
            values = attention.v_proj(context).view(shape).transpose(1, 2)
            found.append((keys * cos + rotate_half(keys) * sin, values))
        return found

    # ---- shared by training and decoding ----

    def context_of(self, features: Tensor) -> Tensor:
        """[..., F] to c [..., D]."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def embedded(self, input_ids: Tensor) -> Tensor:
        """[..., D] of tokens [...]."""
        return self.attached.embedding(input_ids).to(self.fc.weight.dtype)

    def block_inputs(self, newest_ids: Tensor, masks_kd: Tensor) -> Tensor:
        """[..., block_size, D] of blocks behind these tokens [...], given `mask_inputs`."""
        newest = self.embedded(newest_ids).unsqueeze(-2)
        masks = masks_kd + newest if self.config.mask_residual else masks_kd.expand(*newest.shape[:-2], -1, -1)
        return torch.cat([newest, masks], dim=-2)

    def mask_inputs(self) -> Tensor:
        """[block_size - 1, D], the same row each time."""
        mask_id = torch.full((1,), self.config.mask_token_id, device=self.fc.weight.device)
        return self.embedded(mask_id).expand(self.config.block_size - 1, -1)

    # ---- decoding ----

    def one_forward_decoder(self, max_length_tokens: int) -> DrafterDecoder:
        return BlockDecoder(self, max_length_tokens)


@torch.no_grad()
def start_layer_from(layer: Any, source: Any) -> None:
    """Take over the weights of a layer of the target. Where that has no q/k norms, ours start with the spread that
    queries and keys have there for features without a direction of their own, so that scores keep their size."""
    mine, theirs = layer.state_dict(), source.state_dict()
    for name, value in theirs.items():
        if name in mine:
            mine[name].copy_(value)
    read_d = theirs["input_layernorm.weight"]
    for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        if f"self_attn.{norm}.weight" not in theirs:
            weight_hd = (theirs[f"self_attn.{projection}.weight"] * read_d).unflatten(0, (-1, layer.self_attn.head_dim))
            mine[f"self_attn.{norm}.weight"].copy_(weight_hd.pow(2).sum(-1).mean(0).sqrt())
