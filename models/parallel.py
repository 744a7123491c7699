"""ParallelSpec's parallel drafter, Medusa flavour (arXiv 2410.05589, section 4).

One decoder layer of the target's own kind reads the newest token and K trainable [MASK] vectors and predicts, in one
forward, the next K+1 tokens. Trained with group attention (`group_attention.py`), decoded with plain causal attention
over its own KV cache: one forward a round both ingests the newly committed tokens and drafts.

Where we decide what the paper leaves open:
* `inputs`: the paper does not say whether this flavour reads the target's hidden states. `embedding` = e(x_t);
  `hidden` = h_{t-1}, the feature that predicted x_t; `both` = a linear map of the two, each normalised.
* The cross entropy of depth j+1 is averaged over its own labels, then weighted with lambda_j / sum(lambda).

Shapes: B batch, S sequence, G = K+1 streams, K masks, D hidden, V vocabulary, P prompt, n newly committed, R = n+K.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.drafter import (
    IGNORED_LABEL,
    MODEL_TYPE_PREFIX,
    Drafter,
    DrafterConfig,
    DrafterOutput,
    depth_labels,
)
from draftsmith.models.group_attention import BACKENDS
from draftsmith.models.label_loss import frozen_head_cross_entropy
from draftsmith.models.target_layers import STATIC_ROPE_TYPES, CachedAttention, build_target_layers, layers_config
from draftsmith.recipes.errors import UserError

INPUTS = ("embedding", "hidden", "both")
INITS = ("target", "random")
# Pending tokens up to this many use masks that were made beforehand.
SMALL_STEP_TOKENS = 16


class ParallelDrafterConfig(DrafterConfig):
    """Options of the parallel drafter, the keys of `drafter.options` in a recipe.

    Args:
        num_masks: K; a round drafts K+1 tokens.
        num_layers: Decoder layers of the target's kind.
        inputs: What stream 0 reads: `embedding`, `hidden` or `both`.
        attention: Training backend: `folded`, `dense` or `flex`.
        depth_weights: lambda_j, K+1 numbers; or one number d for lambda_j = d**j (Medusa's 0.8).
        mask_residual: Add the newest token's input to each of its masks (not in the paper).
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
        depth_weights: float | list[float] = 0.8,
        mask_residual: bool = False,
        init: str = "target",
        **kwargs: Any,
    ) -> None:
        super().__init__(target_config=target_config, target_name_or_path=target_name_or_path, **kwargs)
        self.num_masks = _whole_number("num_masks", num_masks, at_least=0)
        self.num_layers = _whole_number("num_layers", num_layers, at_least=1)
        self.inputs = _one_of("inputs", inputs, INPUTS)
        self.attention = _one_of("attention", attention, BACKENDS)
        self.init = _one_of("init", init, INITS)
        self.mask_residual = _one_of("mask_residual", mask_residual, (True, False))
        self.depth_weights = depth_weights
        self.resolved_depth_weights()

    def resolved_depth_weights(self) -> list[float]:
        """lambda_0..lambda_K, normalised to sum 1."""
        num_depths, value = self.num_masks + 1, self.depth_weights
        weights = [value**j for j in range(num_depths)] if isinstance(value, int | float) else value
        if not isinstance(weights, list) or len(weights) != num_depths or not all(_positive(w) for w in weights):
            raise UserError(
                f"key `drafter.options.depth_weights` must be one positive number or {num_depths} of them "
                f"(num_masks + 1), not {value!r}"
            )
        return [weight / sum(weights) for weight in weights]


class ParallelDrafter(Drafter):
    """The drafter q; see the module's docstring."""

    config_class = ParallelDrafterConfig
    base_model_prefix = "drafter"
    _no_split_modules: list[str] = []  # noqa: RUF012

    def __init__(self, config: ParallelDrafterConfig) -> None:
        super().__init__(config)
        self._layers_config = layers_config(config.target_config, config.num_layers)
        built = build_target_layers(self._layers_config)
        hidden_size = self._layers_config.hidden_size
        self.layers, self.norm = built.layers, built.norm
        self.masks = nn.Parameter(torch.randn(config.num_masks, hidden_size))
        if config.inputs != "embedding":
            self.feature_norm = nn.RMSNorm(hidden_size, eps=1e-6)
            self.fuse = nn.Linear(hidden_size * (2 if config.inputs == "both" else 1), hidden_size, bias=False)
        if config.inputs == "both":
            self.embedding_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self._rotary: nn.Module | None = None
        self.post_init()

    def attach(self, target: PreTrainedModel) -> "ParallelDrafter":
        super().attach(target)
        # RoPE has no weights. One of our own, as some kinds remember the longest position; hidden from torch.
        rotary = type(target.base_model.rotary_emb)(config=self._layers_config).to(target.device)
        self.__dict__["_rotary"] = rotary
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
    ) -> DrafterOutput:
        """The training loss.

        Args:
            input_ids: [B, S], padded on the right if at all: then causal order alone keeps padding out.
            features: [B, S, D] of the target, AT each token.
            loss_mask: [B, S], 1 on assistant tokens.
            attention_mask: [B, S]; not needed, see `input_ids`.
            position_ids: [B, S]; 0..S-1 by default.
        """
        num_depths = self.config.num_masks + 1
        hidden_bgsd = self.stream_hidden(input_ids, features, position_ids)
        labels_bgs = depth_labels(input_ids, loss_mask, num_depths)
        labelled = (labels_bgs != IGNORED_LABEL).nonzero(as_tuple=True)
        depth_n = labelled[1]
        count_g = torch.bincount(depth_n, minlength=num_depths)
        weight_g = torch.tensor(self.config.resolved_depth_weights(), device=hidden_bgsd.device)
        weights_n = (weight_g / count_g.clamp(min=1))[depth_n]
        loss, losses_n, correct_n = frozen_head_cross_entropy(
            self.norm(hidden_bgsd[labelled]), self.attached.lm_head, labels_bgs[labelled], weights_n
        )
        sums_g = losses_n.new_zeros(num_depths)
        return DrafterOutput(
            loss=loss,
            depth_loss_sum=sums_g.index_add(0, depth_n, losses_n),
            depth_correct=sums_g.index_add(0, depth_n, correct_n.to(sums_g.dtype)),
            depth_count=count_g,
        )

    def stream_hidden(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[B, G, S, D] of all streams, before the final norm. Features are those AT each token."""
        batch, length = input_ids.shape
        num_masks, num_streams = self.config.num_masks, self.config.num_masks + 1
        # h_{t-1}, the feature that predicted x_t; zeros for the first token.
        previous_bsd = torch.cat([torch.zeros_like(features[:, :1]), features[:, :-1]], dim=1)
        real_bsd = self._real_inputs(input_ids, previous_bsd)
        masks = self.masks.to(real_bsd.dtype)[:, None].expand(batch, num_masks, length, -1)
        if self.config.mask_residual:
            masks = masks + real_bsd.unsqueeze(1)
        hidden = torch.cat([real_bsd.unsqueeze(1), masks], dim=1).flatten(1, 2)
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).unsqueeze(0)
        streams = torch.arange(num_streams, device=input_ids.device)
        rotary = self._rotary_of(hidden, (position_ids[:, None] + streams[:, None]).flatten(1, 2))
        for layer in self.layers:
            hidden = layer(
                hidden, position_embeddings=rotary, num_streams=num_streams, group_backend=self.config.attention
            )
        return hidden.unflatten(1, (num_streams, length))

    def group_logits(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[B, G, S, V] of every group: for tests and small vocabularies."""
        return self.logits_of(self.stream_hidden(input_ids, features, position_ids))

    # ---- shared by training and decoding ----

    def logits_of(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        lm_head = self.attached.lm_head
        return lm_head(self.norm(hidden).to(lm_head.weight.dtype))

    def _real_inputs(self, input_ids: Tensor, previous_features: Tensor) -> Tensor:
        """[..., D] inputs of stream 0 from x_t [...] and h_{t-1} [..., D]."""
        dtype = self.masks.dtype
        if self.config.inputs == "hidden":
            return self.fuse(self.feature_norm(previous_features.to(dtype)))
        embedded = self.attached.embedding(input_ids).to(dtype)
        if self.config.inputs == "embedding":
            return embedded
        return self.fuse(
            torch.cat([self.embedding_norm(embedded), self.feature_norm(previous_features.to(dtype))], dim=-1)
        )

    def _rotary_of(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        rotary = self.__dict__["_rotary"]
        if rotary is None:
            raise ValueError("the drafter has no target: call drafter.attach(target) first")
        return rotary(hidden, position_ids)

    def decoder(self, max_length_tokens: int) -> "ParallelDecoder":
        return ParallelDecoder(self, max_length_tokens)


class ParallelDecoder:
    """One sequence at a time; see `draftsmith.models.drafter.DrafterDecoder`.

    Nothing is ever rolled back: committed tokens are final, and the masks' keys and values are overwritten.
    """

    def __init__(self, drafter: ParallelDrafter, max_length_tokens: int) -> None:
        config = drafter.config
        self._drafter, self._num_masks = drafter, config.num_masks
        self._max_length_tokens, self._device = max_length_tokens, drafter.masks.device
        rows = SMALL_STEP_TOKENS + config.num_masks
        capacity = max_length_tokens + config.num_masks
        self._cache = CachedAttention(drafter._layers_config, capacity, rows, self._device, drafter.masks.dtype)
        self._masks_kd, self._mask_residual = drafter.masks.detach(), config.mask_residual
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._position_offset = 0
        self._rotary_table: tuple[Tensor, Tensor] | None = None

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        """Begin a sequence whose first token has position id `position_offset`. ids [P], features [P, D] AT them."""
        self._cache.length = 0
        self._position_offset = position_offset
        previous = torch.cat([torch.zeros_like(features[:1]), features[:-1]])
        self._pending = [(prompt_ids, previous)]
        self._rotary_table = self._make_rotary_table()

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        """Queue final tokens [n] with the features [n, D] that predicted them."""
        if len(committed_ids):
            self._pending.append((committed_ids, features))

    @torch.inference_mode()
    def draft(self) -> Tensor:
        """fp32 logits [G, V] of depths 1..G after the newest committed token."""
        if not self._pending:
            raise ValueError("draft() needs a new token: call start() or observe() first")
        drafter, cache, num_masks = self._drafter, self._cache, self._num_masks
        ids, features = (
            self._pending[0] if len(self._pending) == 1 else map(torch.cat, zip(*self._pending, strict=True))
        )
        num_new = len(ids)
        begin, num_rows = cache.length, num_new + num_masks
        if begin + num_new > self._max_length_tokens:
            raise ValueError(
                f"{begin + num_new} tokens, but decoder(max_length_tokens={self._max_length_tokens}): make it larger"
            )
        real_nd = drafter._real_inputs(ids, features)
        masks_kd = self._masks_kd + real_nd[-1:] if self._mask_residual else self._masks_kd
        hidden = torch.cat([real_nd, masks_kd]).unsqueeze(0)
        rotary = self._rotary_of(hidden, begin, begin + num_rows)
        cache.begin_step(num_rows)
        for layer in drafter.layers:
            hidden = layer(hidden, position_embeddings=rotary, cached_attention=cache)
        cache.length += num_new
        self._pending = []
        return drafter.logits_of(hidden[0, num_new - 1 :]).float()

    def _make_rotary_table(self) -> tuple[Tensor, Tensor] | None:
        """cos and sin of all positions, where they depend on the position only."""
        rope = getattr(self._drafter._layers_config, "rope_parameters", None) or {}
        if rope.get("rope_type", "default") not in STATIC_ROPE_TYPES:
            return None
        positions = torch.arange(self._cache.capacity, device=self._device).unsqueeze(0) + self._position_offset
        return self._drafter._rotary_of(self._masks_kd, positions)

    def _rotary_of(self, hidden: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        if self._rotary_table is not None:
            cos, sin = self._rotary_table
            return cos[:, begin:end], sin[:, begin:end]
        positions = torch.arange(begin, end, device=self._device).unsqueeze(0) + self._position_offset
        return self._drafter._rotary_of(hidden, positions)


def _whole_number(key: str, value: Any, at_least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise UserError(f"key `drafter.options.{key}` must be a whole number of at least {at_least}, not {value!r}")
    return value


def _one_of(key: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise UserError(f"key `drafter.options.{key}` must be one of {', '.join(map(str, allowed))}, not {value!r}")
    return value


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


DRAFTER = ParallelDrafter
