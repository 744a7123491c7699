"""ParallelSpec's drafter (arXiv 2410.05589, Medusa flavour) inside vLLM, with all that its own decoder has.

vLLM loads it, unpatched, as a draft model of `method: eagle3`; `vllm_plugin.py` registers it, and `vllm_layout.py`
writes its checkpoints. Written for vLLM 0.32, whose files are named by their path in the package.

**Rows.** With `parallel_drafting: true` all rows of a request come in one forward, one request after the other, and
attend causally (`v1/spec_decode/utils.py`, copy_and_expand_eagle_inputs):

    accepted tokens | newest token | mask id, K times | rejected drafts, as padding

each with the target's hidden states of the position before it. The newest token's row and those of its masks give the
drafts. vLLM has one id for all masks, so a mask's number is its distance from the last row before it that is none:

    row of a token x_t    fuse([norm(e(x_t)); norm(h_{t-1}) of each feature layer]), see `drafters/parallel.py`
    row of [MASK]_j       masks[j], plus the row of the newest token with `mask_residual`

`fuse` is linear, so it is split: the features' part is `combine_hidden_states`, which vLLM calls on the target's states
before it copies rows around; the embedding's part is added here. The mask id is the size of the vocabulary, which no
text contains.

**Without `parallel_drafting`** (vLLM's V2 runner has no other way) the same rows come one forward at a time, and vLLM
feeds a row's hidden state back into the next: here [row of the newest token; number of the next mask]. For this the
checkpoint's `hidden_size` is wider than the layers, by one column a head, since it must be a multiple of the heads.

**Features.** vLLM captures a layer's output before the final norm: a feature after that norm needs a copy of it.
**Markov head.** W1 of a row's token travels as further columns of the hidden state, up to `compute_logits`.

What differs from draftsmith's decoder: vLLM has no row for a conversation's first token (`first_token: false` trains it
so), and gives the last row of each chunk of a long prompt a wrong next token (`v1/spec_decode/llm_base_proposer.py`,
prepare_next_token_ids_padded), which costs that row's keys, not the answer.

Shapes: N rows, D width of layers, W hidden_size > D, C captured layers, F features read, V' drafted tokens, r rank.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    get_draft_quant_config,
    maybe_prefix,
    process_eagle_weight,
)

FUSION_EPS = 1e-6  # of the norms before `fuse`, in `drafters/parallel.py`
# vLLM's layers hold queries, keys and values in one matrix, and the MLP's first two.
STACKED = WeightsMapper(
    orig_to_new_stacked={
        ".q_proj": (".qkv_proj", "q"),
        ".k_proj": (".qkv_proj", "k"),
        ".v_proj": (".qkv_proj", "v"),
        ".gate_proj": (".gate_up_proj", 0),
        ".up_proj": (".gate_up_proj", 1),
    }
)
# The target's own unless the checkpoint has them.
BORROWED = {"model.embed_tokens.weight", "lm_head.weight"}


class _LlamaLayer(LlamaDecoderLayer):
    def get_quant_config(self, vllm_config: VllmConfig) -> Any:
        return get_draft_quant_config(vllm_config)


def make_layer(config: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
    """Make a decoder layer of Llama's (also Qwen 2's) or Qwen 3's kind."""
    if config.layer_kind != "qwen3":
        return _LlamaLayer(vllm_config, prefix=prefix, config=config)
    layer_types = getattr(config, "layer_types", None)
    window = config.sliding_window if layer_types and layer_types[0] == "sliding_attention" else None
    quantization = get_draft_quant_config(vllm_config)
    return Qwen3DecoderLayer(config, vllm_config.cache_config, quantization, prefix, per_layer_sliding_window=window)


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "hidden_states": 0})
class ParallelLayers(nn.Module):
    """Inputs, layers and norm of the drafter: the part that vLLM compiles. Parameters have the checkpoint's names."""

    def __init__(self, *, vllm_config: VllmConfig, first_layer: int, prefix: str = "") -> None:
        super().__init__()
        speculative = vllm_config.speculative_config
        config = self.config = speculative.draft_model_config.hf_config
        self.in_one_forward = bool(speculative.parallel_drafting)
        width = self.width = config.layer_width
        layer_config = copy.copy(config)
        layer_config.hidden_size = width
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, width, prefix=maybe_prefix(prefix, "embed_tokens")
        )
        self.layers = nn.ModuleList(
            make_layer(layer_config, get_current_vllm_config(), maybe_prefix(prefix, f"layers.{first_layer + i}"))
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.masks = nn.Parameter(torch.zeros(config.num_masks, width), requires_grad=False)
        if config.inputs == "both":
            self.embedding_norm = nn.Parameter(torch.ones(width), requires_grad=False)
            self.fuse_embedding = ReplicatedLinear(width, width, bias=False, return_bias=False)
        if config.markov_rank:
            self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
            self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Run all rows; return normed states [N, D or D + r] for the LM head, and states [N, W] that vLLM feeds back.

        Args:
            input_ids: Tokens and mask ids [N].
            hidden_states: Results [N, W] of `combine_hidden_states`, or the states that vLLM feeds back.
        """
        inputs = hidden_states[:, : self.width]
        if self.in_one_forward:
            is_mask_n = input_ids == self.config.pard_token
            rows_n = torch.arange(len(is_mask_n), device=is_mask_n.device)
            # The last row up to each that is no mask, and the distance to that row.
            token_row_n = torch.cummax(rows_n.masked_fill(is_mask_n, 0), dim=0).values
            number_n = rows_n - token_row_n
            input_ids = input_ids.masked_fill(is_mask_n, 0)
        else:
            number_n = hidden_states[:, self.width].to(torch.int64)
            is_mask_n = number_n > 0
        if self.config.inputs != "hidden":
            embedded = self.embed_tokens(input_ids)
            if self.config.inputs == "both":
                embedded = functional.rms_norm(embedded, (self.width,), self.embedding_norm, FUSION_EPS)
                embedded = self.fuse_embedding(embedded)
            inputs = inputs + embedded.masked_fill(is_mask_n.unsqueeze(1), 0)
        newest = inputs.index_select(0, token_row_n) if self.in_one_forward else inputs
        masks = functional.embedding((number_n - 1).clamp(0, self.config.num_masks - 1), self.masks)
        if self.config.mask_residual:
            masks = masks + newest
        hidden, residual = torch.where(is_mask_n.unsqueeze(1), masks, inputs), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        if self.config.markov_rank:
            hidden = torch.cat([hidden, self.markov_w1(input_ids)], dim=-1)
        if self.in_one_forward:
            return hidden, hidden
        number = functional.pad((number_n + 1).unsqueeze(1), (0, hidden_states.shape[1] - self.width - 1))
        return hidden, torch.cat([inputs, number.to(inputs.dtype)], dim=-1)


class VllmParallelDrafter(Eagle3LlamaForCausalLM):
    """The draft model. It is of EAGLE-3's class since vLLM's proposer asks for one (`llm_base_proposer.py`).

    Raises:
        ValueError: More tokens are to be drafted than the number of masks + 1, or the target is another one than
            the drafter was trained for.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)  # not EAGLE-3's own layers
        speculative = vllm_config.speculative_config
        config = self.config = speculative.draft_model_config.hf_config
        check_fits(config, vllm_config.model_config.hf_text_config, speculative.num_speculative_tokens)
        # vLLM numbers the drafter's layers after the target's.
        num_target_layers = config.target_layer_count = vllm_config.model_config.get_total_num_hidden_layers()
        self.model = ParallelLayers(
            vllm_config=vllm_config, first_layer=num_target_layers, prefix=maybe_prefix(prefix, "model")
        )
        self.width, dtype = config.layer_width, vllm_config.model_config.dtype
        self.drafts_at_once = speculative.num_speculative_tokens if speculative.parallel_drafting else 1
        if config.features:
            width_read = self.width * len(config.features)
            self.feature_norm = nn.Parameter(torch.ones(self.width, dtype=dtype), requires_grad=False)
            self.fuse_features = ReplicatedLinear(
                width_read, self.width, bias=False, params_dtype=dtype, return_bias=False
            )
        if any(is_normed for _, is_normed in config.features):
            self.target_norm = RMSNorm(self.width, eps=config.target_norm_eps)
        self.lm_head = ParallelLMHead(
            config.draft_vocab_size,
            self.width,
            quant_config=get_draft_quant_config(vllm_config),
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(config.draft_vocab_size, scale=getattr(config, "logit_scale", 1.0))
        self.draft_id_to_target_id = None
        if config.draft_vocab_size != config.vocab_size:
            offsets = torch.zeros(config.draft_vocab_size, dtype=torch.long)
            self.draft_id_to_target_id = nn.Parameter(offsets, requires_grad=False)
        # vLLM copies this into mask rows, where `forward` does not read it.
        width_captured = config.num_aux_hidden_states * self.width
        self.register_buffer("mask_hidden", torch.zeros(1, width_captured, dtype=dtype), persistent=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the layers on the rows of a batch; arguments and results as in `ParallelLayers.forward`.

        Raises:
            ValueError: The target gives embeddings in place of token ids, as models with images do.
        """
        if input_ids is None:
            raise ValueError("draftsmith's parallel drafter reads token ids, and this target gives it embeddings only")
        return self.model(input_ids, positions, hidden_states)

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Map captured layers [..., C * D] to the features' part of the fused inputs [..., W], zeros beyond D."""
        *rows, _ = hidden_states.shape
        spare = self.config.hidden_size - self.width
        if not self.config.features:
            return hidden_states.new_zeros(*rows, self.width + spare)
        captured = hidden_states.reshape(-1, self.config.num_aux_hidden_states, self.width)
        parts = []
        for place, is_normed in self.config.features:
            part = captured[:, place].contiguous()
            parts.append(self.target_norm(part) if is_normed else part)
        normed = functional.rms_norm(torch.stack(parts, dim=1), (self.width,), self.feature_norm, FUSION_EPS)
        return functional.pad(self.fuse_features(normed.flatten(1)), (0, spare)).reshape(*rows, self.width + spare)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Map normed states [N, D or D + r] to logits of the target's vocabulary, -inf for tokens never drafted.

        With a Markov head the logits of a depth depend on the token drafted before it, here greedily; rows of a request
        lie one after the other.
        """
        if not self.config.markov_rank:
            return super().compute_logits(hidden_states)
        logits = self.logits_processor(self.lm_head, hidden_states[:, : self.width].contiguous())
        if logits is None:  # another rank gathers them
            return None
        if len(logits) % self.drafts_at_once == 0:
            depths = logits.float().unflatten(0, (-1, self.drafts_at_once)).unbind(1)
            previous_w1, biased = hidden_states[:: self.drafts_at_once, self.width :], []
            for logits_of_depth in depths:
                biased.append(logits_of_depth + self.model.markov_w2(previous_w1).float())
                previous_w1 = self.model.markov_w1(self._target_ids(biased[-1].argmax(-1)))
            logits = torch.stack(biased, dim=1).flatten(0, 1)
        if self.draft_id_to_target_id is None:
            return logits
        wide = logits.new_full((len(logits), self.config.vocab_size), float("-inf"))
        wide[:, self._target_ids(torch.arange(logits.shape[1], device=logits.device))] = logits
        return wide

    def _target_ids(self, columns: Tensor) -> Tensor:
        offsets = self.draft_id_to_target_id
        return columns if offsets is None else columns + offsets[columns]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint of `vllm_layout.py`.

        Raises:
            ValueError: A tensor is missing, or the number of masks is not the config's.
        """
        expected = {name for name, _ in self.named_parameters()}
        inner = {name.split(".")[1] for name in expected if name.startswith("model.")}
        tensors = {}
        for name, tensor in weights:
            if name == "t2d" or (name == "d2t" and self.draft_id_to_target_id is None):  # all tokens are drafted
                continue
            ours = "draft_id_to_target_id" if name == "d2t" else name
            ours = f"model.{ours}" if ours.split(".")[0] in inner else ours
            if name == "masks" and len(tensor) != self.config.num_masks:
                raise ValueError(
                    f"the drafter's checkpoint has {len(tensor)} masks and its config.json says num_masks "
                    f"{self.config.num_masks}: export it again by `draftsmith export`"
                )
            tensors[ours] = tensor
            process_eagle_weight(self, ours)
        loaded = AutoWeightsLoader(self).load_weights(tensors.items(), mapper=STACKED)
        if missing := sorted(expected - loaded - BORROWED):
            raise ValueError(
                f"the drafter's checkpoint lacks {', '.join(missing)}: export it again by `draftsmith export`"
            )
        return loaded


def check_fits(config: Any, target_config: Any, num_drafted: int) -> None:
    """Check that the drafter was trained for this target, and has enough masks for `num_drafted` tokens.

    Raises:
        ValueError: The target is another one, or the drafter has too few masks.
    """
    if num_drafted > config.num_masks + 1:
        raise ValueError(
            f"num_speculative_tokens is {num_drafted}, and this drafter has {config.num_masks} masks: set it to at "
            f"most {config.num_masks + 1}"
        )
    for key, expected in config.target.items():
        found = getattr(target_config, key, None)
        if found != expected:
            raise ValueError(
                f"this drafter was trained for a target with {key} {expected}, and the served one has {found}: serve "
                "that target, or train a drafter for this one"
            )
