"""Hydra's sequentially dependent heads (arXiv 2402.05109).

Head d of group t reads the target's feature h_{t-1} and the embeddings of x_t, x_{t+1}, ..., x_{t+d-1}, of which all
but x_t are drafted ones, and predicts x_{t+d}: Medusa's heads, told what the heads before them drafted. In training
the tokens are the true ones. Hydra++ is `prefix_attention: true`, `num_layers: 4`, `loss: kl`: a decoder layer over all
features up to h_{t-1} in h_{t-1}'s place, deeper heads, and the target's distribution as the label.

Where we deviate:
* `embedding_norm`: the embeddings are normalised first. Those of a pre-norm target are far smaller than its final
  features (25 times in the embedded one), so that the heads would take long to notice the drafted tokens.
* The blocks of a deep head have weights of their own; in the authors' code (zankner/Hydra, hydra/model/hydra_heads/
  mlp_head.py) all but the first are one block repeated.
* Every head starts as the target's own LM head on h_{t-1}. There only its weights do: the first block's projection past
  SiLU, the biases of the blocks, and a bias that its LM heads have and ours have not, start at torch's random values.
  Not measured here.
* The loss of head d is averaged over its own labels, then weighted with lambda_d / sum(lambda).

Shapes: B batch, G heads, S sequence, N packed rows, D hidden, V vocabulary. "State" is what the heads know of the
prefix: h_{t-1}, or what prefix attention makes of it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX, Drafter, DrafterConfig
from draftsmith.models.base.options import normalized_weights, one_of, whole_number
from draftsmith.models.decoding.hydra import HydraDecoder
from draftsmith.models.groups.alignment import IGNORED_LABEL, depth_labels, previous_features
from draftsmith.models.groups.attention import BACKENDS
from draftsmith.models.groups.layers import Rotary, build_target_layers, layers_config
from draftsmith.models.groups.rows import GroupRows
from draftsmith.models.losses import LOSSES, DrafterOutput, head_loss
from draftsmith.recipes.errors import UserError


class HydraConfig(DrafterConfig):
    """Options of the Hydra drafter, the keys of `drafter.options` in a recipe.

    Args:
        num_heads: G, the longest path that is drafted.
        num_layers: Residual blocks of a head; 1 in Hydra, 4 in Hydra++.
        lm_heads: `separate` gives every head an LM head of its own, which starts as the target's (as the paper does);
            `shared` leaves all with the target's frozen one.
        prefix_attention: Hydra++'s decoder layer over the prefix.
        embedding_norm: Normalise the embeddings that the heads read.
        attention: Training backend of that layer: `folded`, `dense` or `flex`.
        loss: A name in `losses.LOSSES`; `kl` is Hydra++'s teacher loss, `ce` needs no teacher.
        depth_weights: lambda_d, G numbers; or one number w for lambda_d = w**(d-1). 1 is the paper's plain sum.
    """

    model_type = MODEL_TYPE_PREFIX + "hydra"

    def __init__(
        self,
        target_config: dict[str, Any] | None = None,
        target_name_or_path: str = "",
        num_heads: int = 5,
        num_layers: int = 1,
        lm_heads: str = "separate",
        prefix_attention: bool = False,
        embedding_norm: bool = True,
        attention: str = "folded",
        loss: str = "ce",
        depth_weights: float | list[float] = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(target_config=target_config, target_name_or_path=target_name_or_path, **kwargs)
        self.num_heads = whole_number("num_heads", num_heads, at_least=1)
        self.num_layers = whole_number("num_layers", num_layers, at_least=1)
        self.lm_heads = one_of("lm_heads", lm_heads, ("separate", "shared"))
        self.prefix_attention = one_of("prefix_attention", prefix_attention, (True, False))
        self.embedding_norm = one_of("embedding_norm", embedding_norm, (True, False))
        self.attention = one_of("attention", attention, BACKENDS)
        self.loss = one_of("loss", loss, tuple(LOSSES))
        self.depth_weights = depth_weights
        self.resolved_depth_weights()

    @property
    def num_depths(self) -> int:
        """G: a head drafts one depth."""
        return self.num_heads

    def resolved_depth_weights(self) -> list[float]:
        """lambda_1..lambda_G, normalised to sum 1."""
        return normalized_weights("depth_weights", self.depth_weights, self.num_heads)


class ResidualBlock(nn.Module):
    """residual(x) + SiLU(linear(x)), `residual` being a projection where the input is wider than the output."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_size, out_size)
        self.residual = nn.Identity() if in_size == out_size else nn.Linear(in_size, out_size)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.residual(inputs) + nn.functional.silu(self.linear(inputs))

    def pass_on(self) -> None:
        """Start as the identity on the first `out_size` inputs."""
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        if isinstance(self.residual, nn.Linear):
            nn.init.eye_(self.residual.weight)
            nn.init.zeros_(self.residual.bias)


class PrefixAttention(nn.Module):
    """One decoder layer of the target's kind and a norm, over the features of a prefix."""

    def __init__(self, target_config: dict[str, Any]) -> None:
        super().__init__()
        self.layers_config = layers_config(target_config, num_layers=1)
        built = build_target_layers(self.layers_config)
        self.layer, self.norm = built.layers[0], built.norm
        self._rotary: Rotary | None = None

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def attach(self, target: PreTrainedModel) -> None:
        self._rotary = Rotary(target, self.layers_config)

    def rotary_of(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1, N, Dh] at positions [1, N]."""
        if self._rotary is None:
            raise ValueError("the drafter has no target: call drafter.attach(target) first")
        return self._rotary(hidden, position_ids)

    def run_layers(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], **attention: Any) -> Tensor:
        """[1, N, D] features to [1, N, D] states; `attention` as in `groups/layers.py`."""
        return self.norm(self.layer(hidden, position_embeddings=rotary, **attention))


class HydraDrafter(Drafter):
    """The drafter q; see the module's docstring."""

    config_class = HydraConfig
    base_model_prefix = "drafter"
    _no_split_modules: list[str] = []  # noqa: RUF012

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        target_config = config.target_config
        hidden_size, vocabulary = target_config["hidden_size"], target_config["vocab_size"]
        # Head index j reads the state and j+1 embeddings.
        self.heads = nn.ModuleList(
            nn.Sequential(
                ResidualBlock((j + 2) * hidden_size, hidden_size),
                *(ResidualBlock(hidden_size, hidden_size) for _ in range(config.num_layers - 1)),
            )
            for j in range(config.num_heads)
        )
        if config.lm_heads == "separate":
            self.lm_heads = nn.ModuleList(
                nn.Linear(hidden_size, vocabulary, bias=False) for _ in range(config.num_heads)
            )
        if config.embedding_norm:
            self.embedding_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.prefix = PrefixAttention(target_config) if config.prefix_attention else None
        self.post_init()

    def attach(self, target: PreTrainedModel) -> "HydraDrafter":
        super().attach(target)
        if self.prefix is not None:
            self.prefix.attach(target)
        return self

    @torch.no_grad()
    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Heads that hand h_{t-1} on to the target's LM head, as Medusa's do; prefix attention at random."""
        self.to(torch.promote_types(target.dtype, torch.float32))
        for module in self.modules():
            if isinstance(module, ResidualBlock):
                module.pass_on()
        if self.config.lm_heads == "separate":
            lm_head = self.attached.lm_head
            if getattr(lm_head, "bias", None) is not None:
                raise UserError(
                    f"the LM head of {type(target).__name__} has a bias, which LM heads of Hydra's own have not: set "
                    "drafter.options.lm_heads to shared"
                )
            for own in self.lm_heads:
                own.load_state_dict(lm_head.state_dict())

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
            input_ids: [B, S], padded on the right if at all.
            features: [B, S, D] of the target, AT each token; also the teacher's, where the loss has one.
            loss_mask: [B, S], 1 at tokens that may be predicted.
            attention_mask: Not needed: padding carries no label and nothing real sees it.
            position_ids: [B, S] for prefix attention, 0..S-1 by default.
            teacher_features: Not needed.
        """
        labels_bgs = depth_labels(input_ids, loss_mask, self.config.num_heads)
        rows = GroupRows.that_matter(labels_bgs[:, :1])
        states_bsd = self.states_of(rows, features, position_ids)
        embedded_bsd = self.embedded(input_ids)
        results = []
        for j, weight in enumerate(self.config.resolved_depth_weights()):
            row_n, position_n = (labels_bgs[:, j] != IGNORED_LABEL).nonzero(as_tuple=True)
            parts = [states_bsd[row_n, position_n], *(embedded_bsd[row_n, position_n + i] for i in range(j + 1))]
            result = head_loss(
                self.heads[j](torch.cat(parts, dim=-1)),
                self.lm_head_of(j),
                labels_bgs[row_n, j, position_n],
                states_bsd.new_full((len(row_n),), weight / max(len(row_n), 1)),
                loss=self.config.loss,
                teacher_nd=features[row_n, position_n + j],  # h_{t+j} predicts x_{t+1+j}
                teacher_head=self.attached.lm_head,
            )
            results.append(result)
        return DrafterOutput(
            loss=torch.stack([result.loss for result in results]).sum(),
            depth_loss_sum=torch.stack([result.cross_entropy_n.sum() for result in results]),
            depth_correct=torch.stack([result.correct_n.sum() for result in results]),
            depth_count=torch.tensor([len(result.correct_n) for result in results], device=input_ids.device),
        )

    def states_of(self, rows: GroupRows, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[B, S, D]: what the heads know of the prefix of group t, at t. Zeros outside `rows`, which has one stream."""
        previous_bsd = previous_features(features, position_ids).to(self.dtype)
        if self.prefix is None:
            return previous_bsd
        batch, length = previous_bsd.shape[:2]
        if position_ids is None:
            position_ids = torch.arange(length, device=features.device)
        rows = rows.in_documents(position_ids)
        positions_n = position_ids.expand(batch, length)[rows.batch_n, rows.position_n]
        hidden = previous_bsd[rows.batch_n, rows.position_n].unsqueeze(0)
        rotary = self.prefix.rotary_of(hidden, positions_n.unsqueeze(0))
        states_nd = self.prefix.run_layers(hidden, rotary, group_rows=rows, group_backend=self.config.attention)[0]
        grid = states_nd.new_zeros(batch * length, states_nd.shape[-1]).index_copy(0, rows.index_n, states_nd)
        return grid.view(batch, length, -1)

    def group_logits(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        batch, length = input_ids.shape
        rows = GroupRows.full(batch, 1, length, input_ids.device)
        embedded_bsd = self.embedded(input_ids)
        inputs, logits = self.states_of(rows, features, position_ids), []
        for j in range(self.config.num_heads):
            # Behind the last token there is none: groups that would read it repeat the last, and mean nothing.
            read_s = torch.arange(j, j + length, device=input_ids.device).clamp(max=length - 1)
            inputs = torch.cat([inputs, embedded_bsd[:, read_s]], dim=-1)
            logits.append(self.logits_of(inputs, j))
        return torch.stack(logits, dim=1)

    # ---- shared by training and decoding ----

    def embedded(self, input_ids: Tensor) -> Tensor:
        """[...] -> [..., D], as the heads read them."""
        embedded = self.attached.embedding(input_ids).to(self.dtype)
        return self.embedding_norm(embedded) if self.config.embedding_norm else embedded

    def lm_head_of(self, j: int) -> nn.Module:
        return self.lm_heads[j] if self.config.lm_heads == "separate" else self.attached.lm_head

    def logits_of(self, inputs: Tensor, j: int) -> Tensor:
        """Logits [..., V] of head index j for inputs [..., (j+2) * D]: the state, then j+1 embeddings."""
        lm_head = self.lm_head_of(j)
        return lm_head(self.heads[j](inputs).to(lm_head.weight.dtype))

    def decoder(self, max_length_tokens: int) -> HydraDecoder:
        return HydraDecoder(self, max_length_tokens)


DRAFTER = HydraDrafter
