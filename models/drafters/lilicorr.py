"""LiLiCorr: a small transformer scores which candidates of a DFlash block go together (arXiv 2608.20530).

Shape, context and blocks are those of `dflash.py`, with DFlash 2's convolutions where `conv_kernel_size` is not 0. What
is added was read in NVIDIA/Model-Optimizer (modelopt/torch/speculative/plugins/modeling_lilicorr.py and hf_lilicorr.py,
which trains it, pull request 2342) and vLLM (model_executor/models/lilicorr.py).

**Lattice.** The K most likely tokens of each of a block's G rows are the nodes. A node starts as

    n = token_proj(e[token]) + pass_hidden_proj(h) + feature_mlp(z) + slot_embedding + rank_embedding

with h its row's final-normed state and z the feature_norm of log q, q, log q - max log q, k/(K-1) and [k = 0], k its
rank. Layers of attention without a mask, where only a bias by the nodes' distance in rows says where they are, and an
MLP, both after a norm, make u of it. With a, the context's newest c (`context_proj`), which no layer changes, and
f = silu(factor_input_proj([u, a, u * a])), its factors are

    out = out_head(f), in = in_head(f), and of the newest committed token out = anchor_out_head(a),

all of length 1. The score of j after i, of the row before, is logit_scale * <out_i, in_j>, and q of a path's next token
is the softmax of it over the K candidates, as engines walk (all other tokens have probability 0). Trees are grown along
paths, still from one forward. If the previous token is not among its row's candidates, as in text that was not drafted
from it, the candidates' own log q replace the scores.

**Loss.** That of DFlash on the logits, and of the scores after the true token before, of a row up to which all of its
block's labels are among the candidates:

    lattice_ce_weight * CE + lattice_margin_weight * relu(lattice_margin - (s_label - max of the others'))
        + lattice_penalty_weight * sum_k softmax(s)_k * relu(t_label - t_k),    t: the target's logits

The published weights are 0.25, 0 and 0.25; a second variant has 0.125, 0.125 and 0.25. Gradients reach the rows through
h and log q. Where we decide or differ: a depth's loss is a mean over all its labels, not over those that count, and
depths have their shares (`depth_weights`), as all losses here; blocks that an answer's end cuts short are trained too,
up to their last label. The accuracies that training shows are those of what is drafted after the true token before.

Shapes: N rows with a label, R of all blocks, A blocks, G depths, K candidates, D hidden, H the lattice's width, r of a
factor, V' columns of the logits.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Self

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field, ValidationInfo, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.drafter import AuxiliaryLoss, HeadRows
from draftsmith.models.drafters.dflash import DFlashConfig
from draftsmith.models.drafters.dflash2 import (
    CandidateDrafter,
    CandidateOptions,
    logits_at,
    within_the_vocabulary,
)
from draftsmith.models.groups.layout import Groups
from draftsmith.models.loss import chunk_rows, softmax_dtype
from draftsmith.models.target_logits import LogitShape
from draftsmith.recipes.schema import MOST_DEPTHS, MOST_LAYERS

# Most elements of candidates' embeddings in memory; blocks beyond them are computed in parts, twice.
ELEMENTS_AT_ONCE = 1 << 27
NUM_FEATURES = 5  # of a candidate
ANY_TOKEN = -1


def _width_of_the_lattice(width: int | None, info: ValidationInfo) -> int:
    heads = info.data.get("lattice_heads", 1)
    if width is None:
        width = max((info.context or {}).get("hidden_size", 4 * heads) // 4 // heads, 1) * heads
    if width % heads:
        raise ValueError(f"must be a multiple of `lattice_heads`, {heads}")
    return width


def _width_of_a_factor(width: int | None, info: ValidationInfo) -> int:
    return width or info.data.get("lattice_hidden_size") or 1


class LiLiCorrConfig(DFlashConfig):
    model_type = MODEL_TYPE_PREFIX + "lilicorr"

    class Options(CandidateOptions):
        """The keys of `drafter.options` in a recipe."""

        conv_kernel_size: int = Field(
            2,
            ge=0,
            le=MOST_DEPTHS,
            description="taps of DFlash2's convolution: number of rows of the block that a row reads, itself "
            "included; 0: no convolutions",
        )
        lattice_top_k: Annotated[int, AfterValidator(within_the_vocabulary)] = Field(
            8,
            ge=1,
            validate_default=True,
            description="number of candidates per row (published: 8; engines need a power of two up to 16)",
        )
        lattice_heads: int = Field(8, ge=1, description="attention heads of the lattice")
        lattice_hidden_size: Annotated[int | None, AfterValidator(_width_of_the_lattice)] = Field(
            None,
            ge=1,
            validate_default=True,
            description="hidden size of the lattice; by default a quarter of the target's (published: 1,024 for 4,096)",
        )
        lattice_factor_dim: Annotated[int | None, AfterValidator(_width_of_a_factor)] = Field(
            None,
            ge=1,
            validate_default=True,
            description="size of the factors `in` and `out`; by default the lattice's hidden size, as published",
        )
        lattice_layers: int = Field(2, ge=1, le=MOST_LAYERS, description="number of layers of the lattice")
        lattice_mlp_ratio: float = Field(
            2.0, gt=0, description="width of the lattice's MLPs, relative to its hidden size"
        )
        lattice_logit_scale: float = Field(
            8.0, gt=0, description="factor from the cosine of two factors to the score of a pair of candidates"
        )
        lattice_vector_eps: float = Field(
            1e-4, gt=0, lt=0.5, description="smallest length by which a factor is divided when it is normalised"
        )
        lattice_ce_weight: float = Field(
            0.25, ge=0, description="weight of the cross entropy over a position's candidate tokens"
        )
        lattice_margin_weight: float = Field(
            0.0, ge=0, description="weight of the hinge loss between the label and the best other candidate"
        )
        lattice_margin: float = Field(
            2.0,
            gt=0,
            description="margin of the hinge loss: by how much the label's score should exceed the best other "
            "candidate's",
        )
        lattice_penalty_weight: float = Field(
            0.25,
            ge=0,
            description="weight of the target's logit gap between the label and the candidates, averaged with "
            "the candidates' probabilities",
        )

        @model_validator(mode="after")
        def _something_to_learn(self) -> Self:
            if not (self.lattice_ce_weight or self.lattice_margin_weight or self.lattice_penalty_weight):
                raise ValueError(
                    "one of `lattice_ce_weight`, `lattice_margin_weight` and `lattice_penalty_weight` must be above 0"
                )
            return self


class Mlp(nn.Module):
    """Two linear maps with SiLU between them."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(inputs, inner), nn.Linear(inner, outputs)

    def forward(self, read: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return self.down_proj(F.silu(self.up_proj(read)))


class LatticeLayer(nn.Module):
    """Attention among all nodes of a block, and an MLP; with the published names."""

    def __init__(self, width: int, heads: int, mlp_width: int, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = Qwen3RMSNorm(width, eps=eps), Qwen3RMSNorm(width, eps=eps)
        # Its parameters alone: it makes a copy of the bias for each block and head.
        self.attn = nn.MultiheadAttention(width, heads)
        self.mlp = Mlp(width, mlp_width, width)

    def forward(self, nodes: Tensor, bias: Tensor) -> Tensor:
        """Map nodes [A, L, H] to [A, L, H], with the bias [heads, L, L]."""
        attn = self.attn
        read = F.linear(self.attn_norm(nodes), attn.in_proj_weight, attn.in_proj_bias)
        q, k, v = read.unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        nodes = nodes + attn.out_proj(attended.transpose(1, 2).flatten(2).contiguous())
        return nodes + self.mlp(self.mlp_norm(nodes))


class Lattice(nn.Module):
    """Scores of a block's transitions, with the published names."""

    def __init__(self, hidden_size: int, eps: float, config: DrafterConfig) -> None:
        super().__init__()
        width, heads, factor = config.lattice_hidden_size, config.lattice_heads, config.lattice_factor_dim
        depths, self._size = config.num_depths, config.block_size
        self._scale, self._eps = config.lattice_logit_scale, config.lattice_vector_eps
        self.token_proj = nn.Identity() if width == hidden_size else nn.Linear(hidden_size, width)
        self.pass_hidden_proj, self.context_proj = nn.Linear(hidden_size, width), nn.Linear(hidden_size, width)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(NUM_FEATURES), Mlp(NUM_FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, depths, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, config.lattice_top_k, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * self._size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        mlp_width = int(config.lattice_mlp_ratio * width)
        self.layers = nn.ModuleList(LatticeLayer(width, heads, mlp_width, eps) for _ in range(config.lattice_layers))
        self.output_norm, self.anchor_norm = Qwen3RMSNorm(width, eps=eps), Qwen3RMSNorm(width, eps=eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head = nn.Linear(width, factor), nn.Linear(width, factor)
        self.anchor_out_head = nn.Linear(width, factor)

    @torch.no_grad()
    def start(self) -> None:
        """Draw all matrices with a standard deviation of 1 / sqrt(number of inputs); biases are 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, module.in_features**-0.5)
                module.bias.zero_()
            elif isinstance(module, nn.MultiheadAttention):
                module.in_proj_weight.normal_(0.0, module.embed_dim**-0.5)
                module.in_proj_bias.zero_()

    def forward(self, embedded: Tensor, log_q: Tensor, normed: Tensor, context: Tensor) -> Tensor:
        """Return scores [A, G, K, K], fp32 at least, of a row's candidates (last dimension) after each one before.

        The first row's are after the newest committed token, K times the same.

        Args:
            embedded: [A, G, K, D] of the candidates, the most likely first.
            log_q: [A, G, K] of these.
            normed: [A, G, D] final-normed rows.
            context: [A, D] each block's newest c; zeros without a context.
        """
        depths, top_k = log_q.shape[1:]
        rank = torch.arange(top_k, device=log_q.device, dtype=log_q.dtype)
        parts = [log_q, log_q.exp(), log_q - log_q[..., :1], rank / max(top_k - 1, 1), rank == 0]
        features = torch.stack([each.expand_as(log_q).to(normed.dtype) for each in parts], dim=-1)
        nodes = (
            self.token_proj(embedded)
            + self.pass_hidden_proj(normed).unsqueeze(-2)
            + self.feature_mlp(self.feature_norm(features))
        )
        nodes = (nodes + self.slot_embedding[0] + self.rank_embedding[0]).flatten(1, 2)
        slot = torch.arange(depths, device=log_q.device).repeat_interleave(top_k)
        apart = slot[:, None] - slot
        bias = self.relative_slot_bias[:, apart + self._size - 1] + self.same_slot_bias[:, None, None] * (apart == 0)
        for layer in self.layers:
            nodes = layer(nodes, bias)
        nodes = self.output_norm(nodes).unflatten(1, (depths, top_k))
        # A projection's bias is no anchor.
        anchor = self.anchor_norm(self.context_proj(context) * (context != 0).any(-1, keepdim=True))
        anchors = anchor[:, None, None].expand_as(nodes)
        read = F.silu(self.factor_input_proj(torch.cat([nodes, anchors, nodes * anchors], dim=-1)))
        out, into, first = (
            F.normalize(factor, dim=-1, eps=self._eps)
            for factor in (self.out_head(read), self.in_head(read), self.anchor_out_head(anchor))
        )
        before = torch.cat([first[:, None, None].expand_as(out[:, :1]), out[:, :-1]], dim=1)
        cosines = before @ into.transpose(-1, -2)
        return self._scale * cosines.to(softmax_dtype(cosines.dtype))


class LiLiCorrDrafter(CandidateDrafter):
    """The drafter q; see the module's docstring."""

    config_class = LiLiCorrConfig

    def build(self, config: DrafterConfig) -> None:
        super().build(config)
        # All other random draws stay as they are without the lattice.
        with torch.random.fork_rng(devices=[]):
            self.lilicorr = Lattice(self.layers_config.hidden_size, self.layers_config.rms_norm_eps, config)

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        super().initialize_from_target(target)
        self.lilicorr.start()

    @property
    def needs_teacher(self) -> bool:
        return super().needs_teacher or self.config.lattice_penalty_weight > 0

    # ---- training ----

    def auxiliary_loss(
        self, rows: HeadRows, groups: Groups, hidden_nd: Tensor, features_pd: Tensor | None
    ) -> AuxiliaryLoss:
        """Return the lattice's loss of the rows of the loss through the LM head, and whether its choice is right."""
        config, linear, shape = self.config, rows.linear, self.vocab.shape
        normed_agd, context_ad, slot_m = self.blocks(groups, hidden_nd, rows.place_m)
        log_q_rk, columns_rk = _TopLogProbabilities.apply(
            normed_agd.flatten(0, 1), linear.weight, linear.bias, config.lattice_top_k, shape
        )
        columns_agk, log_q_agk = (rk.unflatten(0, normed_agd.shape[:2]) for rk in (columns_rk, log_q_rk))
        scored = self._rows(columns_agk, log_q_agk, normed_agd, context_ad)
        columns_mk, *_ = of_labels = [row.flatten(0, 1)[slot_m] for row in scored]
        scores_mk = self.scores_after(of_labels, rows.tokens_m)
        is_label_mk = columns_mk == rows.column_m[:, None]
        is_inside_m, rank_m = is_label_mk.any(-1), is_label_mk.int().argmax(-1)
        correct_m = is_inside_m & (scores_mk.argmax(-1) == rank_m)
        is_inside_r = is_inside_m.new_zeros(len(columns_rk)).index_copy(0, slot_m, is_inside_m)
        counts_m = is_inside_r.view(columns_agk.shape[:2]).cumprod(1).flatten()[slot_m]
        losses_m = config.lattice_ce_weight * F.cross_entropy(scores_mk, rank_m, reduction="none")
        if config.lattice_margin_weight and config.lattice_top_k > 1:
            others_mk = scores_mk.scatter(1, rank_m[:, None], float("-inf"))
            ahead_m = scores_mk.gather(1, rank_m[:, None]).squeeze(1) - others_mk.amax(1)
            losses_m = losses_m + config.lattice_margin_weight * F.relu(config.lattice_margin - ahead_m)
        if config.lattice_penalty_weight and features_pd is not None:
            logits_mk = shape(logits_at(features_pd.index_select(0, rows.before_m), linear, columns_mk))
            gaps_mk = F.relu(logits_mk.gather(1, rank_m[:, None]) - logits_mk)
            losses_m = losses_m + config.lattice_penalty_weight * (scores_mk.softmax(-1) * gaps_mk).sum(-1)
        return AuxiliaryLoss(losses_m * counts_m, rows.mask_m, correct_m)

    # ---- shared by training and decoding ----

    def _scores(self, columns_agk: Tensor, log_q_agk: Tensor, normed_agd: Tensor, context_ad: Tensor) -> Tensor:
        """Return the lattice's scores [A, G, K, K], in parts if the candidates' embeddings are too large."""

        def scores(columns: Tensor, *inputs: Tensor) -> Tensor:
            return self.lilicorr(self.embedded(self.tokens_of(columns)), *inputs)

        inputs = columns_agk, log_q_agk, normed_agd, context_ad
        at_once = max(1, ELEMENTS_AT_ONCE // (columns_agk[0].numel() * normed_agd.shape[-1]))
        if len(columns_agk) <= at_once:
            return scores(*inputs)
        parts = zip(*(each.split(at_once) for each in inputs), strict=True)
        return torch.cat([checkpoint(scores, *part, use_reentrant=False) for part in parts])

    def saved_values(self, num_rows: int, num_labels: int) -> int:
        config = self.config
        # Of a candidate: its embedding, what its layers read and give, and its attention to all nodes of its block.
        attention = 5 * config.lattice_heads * config.num_depths * config.lattice_top_k
        of_candidate = config.hidden_size + 18 * config.lattice_layers * config.lattice_hidden_size + attention
        rows_at_once = ELEMENTS_AT_ONCE // (config.lattice_top_k * config.hidden_size)
        lattice = min(num_labels, rows_at_once) * config.lattice_top_k * of_candidate
        return super().saved_values(num_rows, num_labels) + lattice

    def _rows(
        self, columns_agk: Tensor, log_q_agk: Tensor, normed_agd: Tensor, context_ad: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the inputs of `scores_after` for blocks: columns, log q, scores and previous tokens."""
        scores_agkk = self._scores(columns_agk, log_q_agk, normed_agd, context_ad)
        tokens_agk = self.tokens_of(columns_agk)
        before_agk = torch.cat([torch.full_like(tokens_agk[:, :1], ANY_TOKEN), tokens_agk[:, :-1]], dim=1)
        return columns_agk, log_q_agk, scores_agkk, before_agk

    def score_inputs(self, normed: Tensor, context: Tensor) -> tuple[Tensor, ...]:
        logits = self.vocab.logits(normed)
        log_q, columns = logits.log_softmax(-1, dtype=softmax_dtype(logits.dtype)).topk(self.config.lattice_top_k)
        columns_agk, log_q_agk, normed_agd = (each.reshape(-1, *each.shape[-2:]) for each in (columns, log_q, normed))
        rows = self._rows(columns_agk, log_q_agk, normed_agd, context.reshape(-1, context.shape[-1]))
        return tuple(row.view(*normed.shape[:-1], *row.shape[2:]) for row in rows)

    def scores_after(self, rows: Sequence[Tensor], before_n: Tensor) -> Tensor:
        _, log_q_nk, scores_nkk, tokens_nk = rows
        is_before_nk = (tokens_nk == before_n[:, None]) | (tokens_nk == ANY_TOKEN)
        place_n = is_before_nk.int().argmax(-1)
        chosen_nk = scores_nkk.gather(1, place_n[:, None, None].expand(-1, 1, scores_nkk.shape[-1])).squeeze(1)
        return chosen_nk.where(is_before_nk.any(-1, keepdim=True), log_q_nk)


class _TopLogProbabilities(torch.autograd.Function):
    """The K largest log q of each row and their columns, over the whole head. Neither direction has a tensor [R, V'].

    The head is frozen: the gradient of a row needs the mean row of the head under q, which the forward keeps; of a head
    whose product is scaled or capped, every row of it times the slope there.
    """

    @staticmethod
    def forward(
        ctx: Any, normed_rd: Tensor, weight_vd: Tensor, bias_v: Tensor | None, top_k: int, shape: LogitShape
    ) -> tuple[Tensor, Tensor]:
        """Return log q [R, K] in fp32 at least, and columns [R, K]."""
        vocabulary, hidden_size = weight_vd.shape
        chunk = chunk_rows(vocabulary, hidden_size, device_type=normed_rd.device.type)
        values, columns, means, slopes = [], [], [], []
        for rows in normed_rd.split(chunk):
            logits = shape.apply_(F.linear(rows.to(weight_vd.dtype), weight_vd, bias_v))
            log_q = logits.log_softmax(-1, dtype=softmax_dtype(logits.dtype))
            top = log_q.topk(top_k, dim=-1)
            values.append(top.values)
            columns.append(top.indices)
            means.append((log_q.exp_().to(weight_vd.dtype) * shape.slope(logits)) @ weight_vd)
            slopes.append(torch.ones_like(top.values) * shape.slope(logits.gather(1, top.indices)))
        columns_rk = torch.cat(columns)
        ctx.save_for_backward(columns_rk, weight_vd, torch.cat(means), torch.cat(slopes))
        ctx.dtype = normed_rd.dtype
        ctx.mark_non_differentiable(columns_rk)
        return torch.cat(values), columns_rk

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        columns_rk, weight_vd, mean_rd, slope_rk = ctx.saved_tensors
        weights_rk = grad_outputs[0].to(weight_vd.dtype)
        sloped_rk = (grad_outputs[0] * slope_rk).to(weight_vd.dtype)
        grad_rd = F.embedding_bag(columns_rk, weight_vd.detach(), mode="sum", per_sample_weights=sloped_rk)
        return (grad_rd - weights_rk.sum(1, keepdim=True) * mean_rd).to(ctx.dtype), None, None, None, None


DRAFTER = LiLiCorrDrafter
