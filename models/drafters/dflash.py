"""DFlash: a block of masks, denoised in one forward before a context of the target's features (arXiv 2602.06036).

A group is a block: the newest token x_t, the anchor, and `block_size` - 1 masks, all embedded by the target. Their
layers are Qwen 3's, for every target: engines know no others. The context is c_s = hidden_norm(fc(features of x_s)) of
all s < t; every layer makes keys and values of c by its own projections, at c's positions, and no row of c goes through
a layer. Inside a block every row sees every row (`causal`: none after it). The mask and ParallelSpec's, for K = 2:

    ParallelSpec, [x_t, m1, m2]             a block of DFlash, context c of features h, rows [x_t, m1, m2]
           x<=t  m1  m2                            h<t   x_t  m1  m2
    x_t     1     0   0                     x_t     1     1    1   1
    m1      1     1   0                     m1      1     1    1   1
    m2      1     1   1                     m2      1     1    1   1

On the grid depth 0 at position t is h_{t-1}, the feature that predicted x_t, so that "features before t" is the causal
attention that depth 0 has anyway: group attention with queries of the last depths only.

Which row predicts which token: a mask at position t+k is denoised, so its row predicts x_{t+k} itself, and the anchor's
row, whose token is known, predicts nothing: `block_size` - 1 tokens are drafted. With `sample_from_anchor` a row
predicts the token after its own position, as language models do, the anchor's row x_{t+1}: `block_size` tokens.
Engines draft in these two ways too, with as many rows as training had: a row left out would change all others.

Every position that has a label is an anchor (published: 512 at random in a sequence); `anchor_ratio` drops some.
A block is computed whole or not at all, with its rows after the end of an answer, which have no label but are seen.
A sequence's first token has no feature before it and is no anchor in training.

The published loss of a block is cross entropy weighted with exp(-(k-1)/gamma) for the k-th drafted token, gamma = 4, 5
and 7 for blocks of 8, 10 and 16: `depth_weights`, whose powers they are, is exp(-1/gamma), 0.78, 0.82 or 0.87.

Names and layout are the published ones, which vLLM and SGLang load. Where we decide or differ: each depth's loss is a
mean over its own labels and the weights are normalised; the position before an answer, whose token carries no loss
itself, is an anchor too; layers start from the target's (`init`), where the published start at random; and all losses
of the project are there. `first_token` has no counterpart: no engine has a row for it either.

Shapes: B batch, S sequence, G depths, N rows, C context rows, D hidden, F features, Dh head size; in decoding L layers,
P prompt, n features that are new, R = block_size rows, V columns of the logits.
"""

import copy
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import rotate_half

from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.group_wise import GroupWiseDrafter, MaskTokenId, OneForwardOptions, layers_or
from draftsmith.models.base.options import DepthWeights, Init, Loss, MaskResidual, NumLayers, Rope
from draftsmith.models.decoding.cached_layers import CachedDecoder
from draftsmith.models.decoding.decoders import DrafterDecoder, StepwiseDecoder
from draftsmith.models.decoding.kv_cache import hidden_columns
from draftsmith.models.groups.attention import GroupAttention
from draftsmith.models.groups.layout import IGNORED_LABEL, Groups, previous_features
from draftsmith.recipes.schema import MOST_DEPTHS

# Target types whose layers have the parts of Qwen 3's, with the same names and meaning.
LIKE_QWEN3 = ("llama", "mistral", "qwen2", "qwen3")
PUBLISHED_FEATURE_LAYERS = 5
SampleFromAnchor = Annotated[
    bool,
    Field(
        description="true: a row predicts the token after its position, so that a block drafts `block_size` tokens; "
        "false: it predicts the token at its position, so that a block drafts one token less"
    ),
]


def default_feature_layers(num_layers: int) -> list[int]:
    """Return up to five of L layers, evenly from the second to the third-last; with few layers, to the second-last."""
    last = num_layers - (2 if num_layers >= 2 * PUBLISHED_FEATURE_LAYERS else 1)
    first = min(2, last)
    count = min(PUBLISHED_FEATURE_LAYERS, last - first + 1)
    return sorted({round(first + i * (last - first) / max(count - 1, 1)) for i in range(count)})


class DFlashConfig(DrafterConfig):
    model_type = MODEL_TYPE_PREFIX + "dflash"
    layers = "qwen3"
    first_token = False

    class Options(OneForwardOptions):
        """Options of `drafter.kind: dflash`: the keys of `drafter.options` in a recipe."""

        block_size: int = Field(
            6, ge=2, le=MOST_DEPTHS, description="positions in a block, with the newest token's (published: 7 to 16)"
        )
        num_layers: NumLayers = 3
        sample_from_anchor: SampleFromAnchor = False
        causal: bool = Field(
            False,
            description="inside a block a row attends only to itself and the rows before it (vLLM supports this, "
            "SGLang does not)",
        )
        feature_layers: Annotated[list[int] | None, layers_or(default_feature_layers)] = Field(
            None,
            validate_default=True,
            description="target layers whose hidden states are the context, ascending; k = after k layers. By "
            "default up to five, evenly from the second to the third-last, as published",
        )
        rope: Rope = None
        mask_token_id: MaskTokenId = Field(None, validate_default=True)
        mask_residual: MaskResidual = False
        anchor_ratio: float = Field(
            1.0,
            gt=0,
            le=1,
            description="share of the positions at which a block is trained, chosen at random, for memory; 1: all",
        )
        loss: Loss = "ce"
        depth_weights: DepthWeights = 0.78
        init: Init = "target"

        @property
        def num_depths(self) -> int:
            return self.block_size - (not self.sample_from_anchor)

        @property
        def rows_of_draft(self) -> int:
            return self.block_size

        @property
        def kept_shares(self) -> list[float]:
            return [self.anchor_ratio] * self.num_depths


class DFlashDrafter(GroupWiseDrafter):
    """DFlash's drafter q: one forward over a block of masks drafts all depths."""

    config_class = DFlashConfig

    def build(self, config: DrafterConfig) -> None:
        super().build(config)
        self.hidden_norm, hidden_size = copy.deepcopy(self.norm), self.layers_config.hidden_size
        self.fc = nn.Linear(len(config.feature_layers) * hidden_size, hidden_size, bias=False)

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Initialise with `init: target`: context c near the mean of the features, layers from the target's.

        The target's layers are spread evenly from first to last, if they are like Qwen 3's apart from q/k norms: a
        block enters as embeddings and leaves as features.
        """
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

    def active_rows(self, labels_bgs: Tensor) -> Tensor:
        """Return a bool mask [B, 1 + block_size, S] of the rows to compute: whole blocks, and context before them."""
        blocks_bs = labels_bgs[:, 0] != IGNORED_LABEL
        if self.training and self.config.anchor_ratio < 1:
            drawn_bs = torch.rand(blocks_bs.shape, generator=self.generator, device=blocks_bs.device)
            blocks_bs = blocks_bs & (drawn_bs < self.config.anchor_ratio)
        context_bs = blocks_bs.flip(-1).cumsum(-1).flip(-1) > 0
        return torch.cat([context_bs[:, None], blocks_bs[:, None].expand(-1, self.config.block_size, -1)], dim=1)

    def hidden_states(self, groups: Groups, features: Tensor) -> Tensor:
        """Return [N, D]: hidden states of blocks' rows before the final norm, and the context c in context rows."""
        of_context, of_blocks = groups.rows_of_depths(1, groups.shape[1] - 1)
        context_c, block_n = of_context[0], of_blocks[0]
        # The context's row at token t is h_{t-1}, at its own position; row k of a block is k after its anchor.
        positions_n = groups.position_n - 1
        read_pf = previous_features(features, groups.position_ids).flatten(0, 1)
        context = self.context_of(read_pf.index_select(0, groups.token_n[context_c])).unsqueeze(0)
        rotary = self.rotary_of(context, positions_n[context_c].unsqueeze(0))
        ours = self.config
        attention = GroupAttention(ours.attention, groups, of_context, ours.causal, window=self.sliding_window)
        for index, keys_values in enumerate(zip(*ContextLayers(self.layers)(context, rotary), strict=True)):
            attention.add(index, *keys_values)
        attention.resume(of_blocks)
        newest_nd = self.embedded(groups.input_ids.flatten()[groups.token_n[block_n]])
        is_mask_n = groups.row_n[block_n] > 1
        masks_nd = self.mask_inputs()[:1] + newest_nd if self.config.mask_residual else self.mask_inputs()[:1]
        hidden = torch.where(is_mask_n[:, None], masks_nd, newest_nd).unsqueeze(0)
        rotary = self.rotary_of(hidden, positions_n[block_n].unsqueeze(0))
        hidden_nd = self.run_layers(hidden, rotary, attention)[0]
        rows_nd = hidden_nd.new_empty(len(groups.index_n), hidden_nd.shape[-1])
        return rows_nd.index_copy(0, block_n, hidden_nd).index_copy(0, context_c, context[0].to(hidden_nd.dtype))

    # ---- shared by training and decoding ----

    def context_of(self, features: Tensor) -> Tensor:
        """Map the target's features [..., F] to the context c [..., D], which every layer reads."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def embedded(self, input_ids: Tensor) -> Tensor:
        """Return the target's embeddings [..., D] of tokens [...]."""
        return self.attached.embedding(input_ids).to(self.fc.weight.dtype)

    def block_inputs(self, newest_ids: Tensor, masks_kd: Tensor) -> Tensor:
        """Return the inputs [..., block_size, D] of blocks: their newest tokens [...], then masks (`mask_inputs()`)."""
        newest = self.embedded(newest_ids).unsqueeze(-2)
        masks = masks_kd + newest if self.config.mask_residual else masks_kd.expand(*newest.shape[:-2], -1, -1)
        return torch.cat([newest, masks], dim=-2)

    def mask_inputs(self) -> Tensor:
        """Return the mask token's embedding, repeated for each mask of a block: [block_size - 1, D]."""
        mask_id = torch.full((1,), self.config.mask_token_id, device=self.fc.weight.device)
        return self.embedded(mask_id).expand(self.config.block_size - 1, -1)

    def block_outputs(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute what a decoder reads of the layers' outputs [G, D]: here fp32 logits [G, V'] of the draft tokens."""
        return (self.logits_of(hidden).float(),)

    def decoder(self, max_length_tokens: int) -> DrafterDecoder | StepwiseDecoder:
        return self.with_markov_head(BlockDecoder(self, max_length_tokens))


@torch.no_grad()
def start_layer_from(layer: Any, source: Any) -> None:
    """Copy the weights of `source`, a layer of the target, into `layer`.

    If the target has no q/k norms, their weights start as the spread of its queries and keys for inputs of random
    directions, so that attention scores keep their size.
    """
    mine, theirs = layer.state_dict(), source.state_dict()
    for name, value in theirs.items():
        if name in mine:
            mine[name].copy_(value)
    read_d = theirs["input_layernorm.weight"]
    for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        if f"self_attn.{norm}.weight" not in theirs:
            weight_hd = (theirs[f"self_attn.{projection}.weight"] * read_d).unflatten(0, (-1, layer.self_attn.head_dim))
            mine[f"self_attn.{norm}.weight"].copy_(weight_hd.pow(2).sum(-1).mean(0).sqrt())


class ContextLayers:
    """Projection of the context to the keys and values of all layers in one product, faster than one per layer.

    Built in each training step, as it copies the layers' current weights, which have no biases.
    """

    def __init__(self, layers: Any) -> None:
        attention = [layer.self_attn for layer in layers]
        parts = [(each.k_proj.weight, each.v_proj.weight) for each in attention]
        self._weight = torch.cat([weight for both in parts for weight in both])
        self._norms = torch.stack([each.k_norm.weight for each in attention])[:, None, None, None]
        self._eps, self._shape = attention[0].k_norm.variance_epsilon, (len(attention), 2, -1, attention[0].head_dim)

    def __call__(self, context: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Map c [B, n, D], with RoPE's cos and sin [B, n, Dh], to rotated keys and values [L, B, Hkv, n, Dh]."""
        keys_values = F.linear(context, self._weight).unflatten(-1, self._shape).permute(2, 3, 0, 4, 1, 5)
        keys, values = keys_values.unbind(1)
        keys = F.rms_norm(keys, keys.shape[-1:], eps=self._eps) * self._norms
        cos, sin = (part.unsqueeze(1) for part in rotary)
        return keys * cos + rotate_half(keys) * sin, values


# ---- decoding ----


class BlockDecoder(CachedDecoder):
    """A `DrafterDecoder` for blocks. Its cache keeps the keys and values of the context alone.

    Features of new committed tokens become keys and values of each layer, appended to the cache; then one forward over
    the rows of a block drafts all depths. A block's own keys and values follow the context's: the next round overwrites
    them.
    """

    def __init__(self, drafter: DFlashDrafter, max_length_tokens: int) -> None:
        config, rows = drafter.config, drafter.config.block_size
        super().__init__(drafter, max_length_tokens, extra_rows=rows, skipped=0)
        self.columns = drafter.columns
        self._masks_kd, self._causal_block = drafter.mask_inputs().detach(), config.causal
        seen_rr = torch.ones(rows, rows, dtype=torch.int64, device=self._device)
        self._seen_rr = seen_rr.tril() if config.causal else seen_rr
        self._first_row = int(not config.sample_from_anchor)  # the anchor's row may predict nothing
        self._to_keys_values = ContextLayers(drafter.layers)

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
        self._begin_sequence(prompt_ids, features[:-1])

    def draft(self) -> Tensor:
        """Return fp32 logits [G, V'] of depths 1..G after the newest committed token, from one forward over R rows."""
        return self.outputs()[0]

    def outputs(self) -> tuple[Tensor, ...]:
        """Read the queued tokens, run the next block, and return its `block_outputs`."""
        ids, features = self._take_pending()
        if self._has_graph(len(features)):
            outputs: tuple[Tensor, ...] = self._run_graph(ids[-1:], features)
            self._cache.length += len(features)
            return outputs
        block = self._drafter.block_inputs(ids[-1:], self._masks_kd)[0]
        if new := len(features):
            context = self._drafter.context_of(features).unsqueeze(0)
            rotary = self._rotary_of(context, slice(self._cache.length, self._cache.length + new))
            self._cache.append(*self._to_keys_values(context, rotary))
        first, end = self._cache.length, self._cache.length + len(block)
        if self._is_one_call(len(block)):
            rotary = self._rotary_of(block, slice(first, end))
            hidden, _ = self._call(block, rotary, first, len(block), sees_later=not self._causal_block)
        else:
            columns = self._column_s[:end]
            hidden_rs = hidden_columns(columns, columns[first:], first, self._seen_rr, self._window)
            hidden = self._run_rows(block, first, slice(first, end), hidden_rs)
        return self._drafter.block_outputs(hidden[self._first_row :])

    def _run_static(self, ids: Tensor, features: Tensor, place: Tensor) -> Any:
        """Run a round as `outputs` does; it is compiled."""
        drafter, columns, begin, count = self._drafter, self._column_s, place[0], place[1]
        context, rows = drafter.context_of(features), columns[: len(features)]
        places = torch.where(rows < count, begin + rows, columns[-1])
        keys_values = self._to_keys_values(context[None], self._rotary_of(context, places))
        for held, new in zip(self._cache.layers, zip(*keys_values, strict=True), strict=True):
            for part, states in zip(held, new, strict=True):
                part.index_copy_(2, places, states)
        block = drafter.block_inputs(ids[:1], self._masks_kd)[0]
        places = begin + count + columns[: len(block)]
        hidden_rs = hidden_columns(columns, places, begin + count, self._seen_rr, self._window)
        hidden = self._run_rows(block, places, places, hidden_rs)
        return drafter.block_outputs(hidden[self._first_row :])


DRAFTER = DFlashDrafter
