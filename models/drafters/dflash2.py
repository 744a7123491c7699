"""DFlash 2: DFlash's block with a convolution over its rows, and a selector of paths (inco.ai/blog/dflash2).

Shape, context and blocks are those of `dflash.py`. There is no paper: what is added was read in vLLM (pull request
52816, model_executor/models/qwen3_dflash2.py) and speculators (pull request 1006), which trains it.

**Convolution.** Rows of a block see each other through attention alone, and the last ones decay. Before and after each
attention and each MLP, a row reads those before it in its block, with kernels that depend on the row:

    conv(x)_i = sum_tap (base[tap] + delta_i[tap]) * x_{i - tap},    delta_i = W x_i, one number for a group of channels

`delta` of both sides come from one projection of what the layer's norm gives. The first tap of `base` starts at 1, all
else at 0: a drafter starts as DFlash. The context has no convolution.

**Selector.** The rows of a block do not depend on each other's tokens. The selector therefore scores each row's K most
likely tokens given the previous token, with a term of low rank that the row's final-normed state gates:

    score(a -> b) = logit(b) + <A[a] * (H h), B[b]>

and q of a path's next token is the softmax of it over the K candidates, exactly as engines walk (all other tokens have
probability 0). Trees are grown along paths, as with a Markov head, still from one forward of the layers. B starts as
zeros, so that a drafter starts as it would without, and A with rows of about length 1 (published drafters came so far
without their training code; speculators draws both with 0.02).

**Loss.** That of DFlash on the logits, and `selector_weight` times the cross entropy of the selector over the K
candidates after the true token before; where the label is not among them it takes the place of the last (metrics.py of
speculators' dflash2). Its gradient reaches the rows through both terms of the score. The accuracies that training shows
are those of the token that is drafted after the true one before it.

Shapes: N rows, A blocks, R = block_size rows of each, D hidden, c channels of a group, G depths, K candidates, r rank,
V vocabulary, V' columns of the logits, W tree nodes of a call.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field, ValidationInfo
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.drafter import label_all_groups
from draftsmith.models.base.options import one_message
from draftsmith.models.decoding.decoders import PathDecoder
from draftsmith.models.drafters.dflash import BlockDecoder, DFlashConfig, DFlashDrafter
from draftsmith.models.loss import AuxiliaryLoss, HeadBlock, softmax_dtype
from draftsmith.recipes.schema import MOST_DEPTHS


def _divides_the_hidden_size(size: int, info: ValidationInfo) -> int:
    hidden_size = (info.context or {}).get("hidden_size", size)
    if hidden_size % size:
        raise ValueError(f"must divide the target's hidden size, {hidden_size}")
    return size


def _within_the_vocabulary(count: int, info: ValidationInfo) -> int:
    vocabulary, drafted = (info.context or {}).get("vocab_size", count), info.data.get("draft_vocab_size")
    if count > vocabulary:
        raise ValueError(f"must be at most the target's vocabulary of {vocabulary}")
    if drafted is not None and count > drafted:
        raise ValueError(f"must be at most `draft_vocab_size`, {drafted}")
    return count


class DFlash2Config(DFlashConfig):
    model_type = MODEL_TYPE_PREFIX + "dflash2"

    class Options(DFlashConfig.Options):
        """Options of `drafter.kind: dflash2`: the keys of `drafter.options` in a recipe."""

        markov_rank: Annotated[Literal[0], one_message("must be 0: the selector reads the previous token")] = Field(
            0, description="always 0: the selector reads the previous token instead"
        )
        conv_kernel_size: int = Field(
            2,
            ge=1,
            le=MOST_DEPTHS,
            description="taps of the convolution: number of rows of the block that a row reads, itself included",
        )
        conv_group_size: Annotated[int, AfterValidator(_divides_the_hidden_size)] = Field(
            16,
            ge=1,
            description="number of channels in a group; the kernel's row-dependent part has one number per group and "
            "tap",
        )
        selector_rank: int = Field(256, ge=1, description="rank of the selector (published: 256)")
        selector_top_k: Annotated[int, AfterValidator(_within_the_vocabulary)] = Field(
            16,
            ge=1,
            validate_default=True,
            description="number of candidates per row among which the selector chooses (published: 16; llama.cpp "
            "needs k(k + 1) of at most the hidden size)",
        )
        selector_weight: float = Field(
            1.0, gt=0, description="weight of the selector's loss, relative to 1 for the loss of the drafts"
        )


class GroupedConvolution(nn.Module):
    """The convolutions over a block's rows before and after one sublayer (attention or MLP)."""

    def __init__(self, hidden_size: int, block_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self._block_size, self._taps, self._group_size = block_size, min(taps, block_size), group_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group_size), bias=False)

    def before(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve normed rows [1, N, D]; return the sublayer's input [1, N, D], and `deltas` for `after`."""
        deltas = self.kernel_projection(hidden).unflatten(-1, (2, len(self.base_kernel[0]), -1))
        return self._convolved(hidden, deltas[..., 0, :, :], 0), deltas[..., 1, :, :]

    def after(self, hidden: Tensor, deltas: Tensor) -> Tensor:
        """Convolve the sublayer's output [1, N, D] along N, with the base kernel plus the rows' `deltas`."""
        return self._convolved(hidden, deltas, 1)

    def _convolved(self, hidden: Tensor, deltas: Tensor, side: int) -> Tensor:
        """Convolve rows in order of depth: row i of all blocks, then row i + 1 of all."""
        rows = hidden.unflatten(-1, (-1, self._group_size))
        base = self.base_kernel[side].to(hidden.dtype).unflatten(-1, (-1, self._group_size))
        deltas, blocks = deltas.unsqueeze(-1), rows.shape[1] // self._block_size
        # The two parts of the kernel separately: the backward would keep their sum, which is as large as the rows.
        total = torch.addcmul(base[0] * rows, deltas[:, :, 0], rows)
        for tap in range(1, self._taps):
            shifted = F.pad(rows[:, : rows.shape[1] - tap * blocks], (0, 0, 0, 0, tap * blocks, 0))
            total = torch.addcmul(torch.addcmul(total, base[tap], shifted), deltas[:, :, tap], shifted)
        return total.flatten(-2)


class ConvolvedLayer(Qwen3DecoderLayer):
    """Qwen 3's decoder layer with convolutions before and after attention and MLP."""

    def __init__(self, config: Any, layer_idx: int, options: DrafterConfig) -> None:
        super().__init__(config, layer_idx)
        shape = config.hidden_size, options.block_size, options.conv_kernel_size, options.conv_group_size
        self.attention_conv, self.mlp_conv = GroupedConvolution(*shape), GroupedConvolution(*shape)

    def forward(self, hidden_states: Tensor, **attention: Any) -> Tensor:
        """Map the rows' hidden states [1, N, D] to the layer's output [1, N, D]."""
        read, deltas = self.attention_conv.before(self.input_layernorm(hidden_states))
        attended, _ = self.self_attn(hidden_states=read, attention_mask=None, **attention)
        hidden_states = hidden_states + self.attention_conv.after(attended, deltas)
        read, deltas = self.mlp_conv.before(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.mlp_conv.after(self.mlp(read), deltas)


class CandidateSelector(nn.Module):
    """The selector's parameters A, B and H (see the module's head), under their published names."""

    def __init__(self, hidden_size: int, vocabulary: int, rank: int) -> None:
        super().__init__()
        # All other random draws stay as they are without the selector.
        with torch.random.fork_rng(devices=[]):
            self.predecessor_codebook = nn.Parameter(torch.randn(vocabulary, rank) * rank**-0.5)
            self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        self.successor_codebook = nn.Parameter(torch.zeros(vocabulary, rank))

    def gates(self, normed: Tensor) -> Tensor:
        """Map rows h after the final norm [..., D] to the selector's gates H h [..., r]."""
        return self.hidden_projection(normed.to(self.hidden_projection.weight.dtype))

    def edges(self, gates_nr: Tensor, before_n: Tensor, candidates_nk: Tensor) -> Tensor:
        """Return the scores [N, K], fp32 at least, that previous tokens [N] add to the logits of K candidates."""
        context_nr = F.embedding(before_n, self.predecessor_codebook) * gates_nr
        successors_nkr = F.embedding(candidates_nk, self.successor_codebook)
        return torch.einsum("nr,nkr->nk", context_nr, successors_nkr).to(softmax_dtype(gates_nr.dtype))


class DFlash2Drafter(DFlashDrafter):
    """DFlash 2's drafter q: DFlash's block with convolutions, and a selector of paths."""

    config_class = DFlash2Config

    def build(self, config: DrafterConfig) -> None:
        super().build(config)
        convolved = nn.ModuleList()
        for index, layer in enumerate(self.layers):
            convolved.append(ConvolvedLayer(self.layers_config, index, config))
            convolved[-1].load_state_dict(layer.state_dict(), strict=False)
        self.layers = convolved
        shape = self.layers_config.hidden_size, config.target_config.get("vocab_size", 0), config.selector_rank
        self.candidate_selector = CandidateSelector(*shape)
        self.auxiliary_modules = ["candidate_selector"]

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        for module in self.layers.modules():
            if isinstance(module, GroupedConvolution):  # starts as the identity
                module.base_kernel.zero_()[:, 0] = 1.0
                module.kernel_projection.weight.zero_()
        super().initialize_from_target(target)

    # ---- training ----

    def auxiliary_loss(self, block: HeadBlock, features_pd: Tensor | None) -> AuxiliaryLoss:
        """Return the selector's loss of a block of labelled rows, and whether the selector chooses the label."""
        rows, gates_mr = block.rows, self.candidate_selector.gates(block.hidden_md)
        known_m, labels_m = rows.label_m >= 0, rows.label_m.clamp(min=0)
        columns_mk = block.logits_mv.detach().topk(self.config.selector_top_k).indices
        missing_m = (columns_mk != labels_m[:, None]).all(-1)
        columns_mk[:, -1] = torch.where(missing_m, labels_m, columns_mk[:, -1])
        rank_m = (columns_mk == labels_m[:, None]).int().argmax(-1)
        logits_mk = block.logits_mv.gather(1, columns_mk).to(block.log_q_mv.dtype)
        scores_mk = self.scores_after((columns_mk, logits_mk, gates_mr), rows.token_m)
        losses_m = F.cross_entropy(scores_mk, rank_m, reduction="none") * known_m
        correct_m = (scores_mk.argmax(-1) == rank_m) & ~missing_m & known_m
        return AuxiliaryLoss(self.config.selector_weight * losses_m, rows.weight_m, correct_m)

    def group_logits(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        groups, features = label_all_groups(self, input_ids, features, position_ids)
        ((_, place_m, normed_md),) = self.head_inputs(groups, self.hidden_states(groups, features))
        _, _, before_m = groups.labels(place_m)
        logits_mv = self.path_logits(self.candidates(normed_md), groups.input_ids.flatten()[before_m])
        return groups.on_grid(place_m, self.columns.widened(logits_mv, float("-inf")), float("-inf"))[
            :, :, : input_ids.shape[1]
        ]

    # ---- shared by training and decoding ----

    def candidates(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the K likeliest columns and their logits [..., K], and gates [..., r], of normed rows [..., D]."""
        values, columns = self.head_logits(normed).topk(self.config.selector_top_k)
        return columns, values.to(softmax_dtype(values.dtype)), self.candidate_selector.gates(normed)

    def scores_after(self, rows: Sequence[Tensor], before_n: Tensor) -> Tensor:
        """Return fp32 scores [N, K] of N rows' candidates after previous tokens [N]; `rows` comes from `candidates`."""
        columns_nk, values_nk, gates_nr = rows
        tokens_nk = columns_nk if self.draft_ids is None else self.draft_ids[columns_nk]
        return values_nk + self.candidate_selector.edges(gates_nr, before_n, tokens_nk)

    def path_logits(self, rows: Sequence[Tensor], before_n: Tensor) -> Tensor:
        """Return the scores of `scores_after` as logits [N, V'], -inf except at the candidates."""
        scores_nk = self.scores_after(rows, before_n)
        shape = len(scores_nk), self.head().out_features
        return scores_nk.new_full(shape, float("-inf")).scatter(1, rows[0], scores_nk)

    def block_outputs(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.candidates(self.norm(hidden))

    def decoder(self, max_length_tokens: int) -> "CandidateDecoder":
        return CandidateDecoder(BlockDecoder(self, max_length_tokens), self)


class CandidateDecoder(PathDecoder):
    """A `StepwiseDecoder` over a block's forward; its logits are the candidates' scores after the previous token."""

    def _draft(self) -> None:
        self._rows = self._decoder.outputs()

    def _after(self, tokens_w: Tensor, depths_w: Tensor | slice) -> Tensor:
        logits: Tensor = self._drafter.path_logits([row[depths_w] for row in self._rows], tokens_w)
        return logits


DRAFTER = DFlash2Drafter
