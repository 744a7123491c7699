"""Medusa (arXiv 2401.10774): K heads that read the target's last hidden state, the target frozen (Medusa-1).

Head d of group t reads h_{t-1}, from which the target's own LM head made x_t, and predicts x_{t+d}:
q_d = softmax(W_d r_d(h_{t-1})), r_d a stack of residual blocks x + SiLU(A x + b). A and b start at zero and W_d at the
target's LM head, so that each head starts as the target's own. (The paper's code leaves b at torch's random start.)

Where we deviate: the loss of depth d is averaged over its own labels and weighted with lambda_d / sum(lambda), lambda_d
= 0.8**(d-1); the paper's sum of lambda_d = 0.8**d times mean losses differs from it by a factor.

Heads are independent of each other's tokens and of every architecture: no layers of the target's kind, no cache. What
they share with other kinds that have a head for each depth (Hydra) is `HeadsDrafter`.

Shapes: B batch, S sequence, P = B*S tokens, G heads = depths, N labelled rows of a depth, D hidden, V' drafted tokens.
"""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.options import DepthOptions, Loss
from draftsmith.models.compiling import BACKEND, Graphs
from draftsmith.models.groups.layout import Groups, previous_features
from draftsmith.recipes.schema import MOST_DEPTHS, MOST_LAYERS


class HeadOptions(DepthOptions):
    """Options of drafters with one head per depth on the target's last hidden state."""

    num_heads: int = Field(5, ge=1, le=MOST_DEPTHS, description="G, the number of heads, and of depths that they draft")
    loss: Loss = "ce"

    @property
    def num_depths(self) -> int:
        return self.num_heads


class HeadsDrafter(Drafter):
    """Base of drafters with one head per depth, which share the target's LM head or have their own.

    A kind defines the LM heads' inputs (`head_hidden`). With `draft_vocab_size` an own LM head has V' rows.
    """

    def add_lm_heads(self, config: DrafterConfig) -> None:
        """Make one LM head for each depth, unless the option `lm_heads` is `shared` (the target's for all)."""
        if config.lm_heads == "separate":
            size, rows = config.hidden_size, config.draft_vocab_size or config.target_config["vocab_size"]
            bias = getattr(config, "lm_head_bias", False)
            self.lm_heads = nn.ModuleList(nn.Linear(size, rows, bias=bias) for _ in range(config.num_heads))
            for head in self.own_heads if bias else []:
                head.bias.requires_grad_(False).zero_()

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Copy the target's LM head into the drafter's own LM heads.

        Raises:
            UserError: The target's LM head has a bias, which separate ones lack.
        """
        if self.own_heads:
            source = target.get_output_embeddings()
            if source.bias is not None:
                raise UserError(
                    f"the LM head of {type(target).__name__} has a bias, so separate LM heads cannot start as it: "
                    "use drafter.options.lm_heads=shared"
                )
            self.start_own_heads()

    def hidden_states(self, groups: Groups, features: Tensor) -> Tensor:
        """Return the states that the heads read: h_{t-1} for each of P tokens, [P, D]."""
        return previous_features(features, groups.position_ids).flatten(0, 1)

    def head_inputs(self, groups: Groups, hidden_nd: Tensor) -> Iterable[tuple[nn.Linear, Tensor, Tensor]]:
        for j, place_m in enumerate(groups.labelled_by_depth):
            yield self.head(j), place_m, self.head_hidden(j, groups, hidden_nd, groups.token_n[place_m])

    def head_hidden(self, j: int, groups: Groups, states_pd: Tensor, token_m: Tensor) -> Tensor:
        """Return the input [M, D] of LM head j (from 0), for the groups with these newest tokens (indices [M])."""
        raise NotImplementedError(f"{type(self).__name__}.head_hidden")


class MedusaConfig(DrafterConfig):
    model_type = MODEL_TYPE_PREFIX + "medusa"

    @property
    def has_own_heads(self) -> bool:
        return self.lm_heads == "separate"

    class Options(HeadOptions):
        """Options of `drafter.kind: medusa`: the keys of `drafter.options` in a recipe."""

        num_layers: int = Field(1, ge=1, le=MOST_LAYERS, description="number of residual blocks in a head")
        lm_heads: Literal["separate", "shared"] = Field(
            "separate",
            description="`separate`: one LM head per Medusa head, initialised from the target's (as in both papers); "
            "`shared`: the target's frozen LM head for all, so that only the blocks are trained",
        )


class ResidualBlocks(nn.Module):
    """A stack of `num_layers` blocks x + SiLU(A x + b)."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class MedusaDrafter(HeadsDrafter):
    """Medusa's drafter q: heads that read the target's last hidden state, one for each depth."""

    config_class = MedusaConfig

    def build(self, config: DrafterConfig) -> None:
        sizes = config.hidden_size, config.num_layers
        self.blocks = nn.ModuleList(ResidualBlocks(*sizes) for _ in range(config.num_heads))
        self.add_lm_heads(config)

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Initialise every head so that it gives the logits of the target's LM head."""
        for parameter in self.blocks.parameters():
            parameter.zero_()
        super().initialize_from_target(target)

    def head_hidden(self, j: int, groups: Groups, states_pd: Tensor, token_m: Tensor) -> Tensor:
        return self.blocks[j](states_pd.index_select(0, token_m).to(self.dtype))

    def logits_of(self, previous: Tensor) -> Tensor:
        """Map hidden states h_{t-1} [..., D] to the logits [G, ..., V'] of all G heads."""
        hidden = torch.stack([blocks(previous.to(self.dtype)) for blocks in self.blocks])
        if not self.own_heads:
            return self.head_logits(hidden)  # one product
        return torch.stack([lm_head(part) for lm_head, part in zip(self.own_heads, hidden, strict=True)])

    def decoder(self, max_length_tokens: int) -> "MedusaDecoder":
        return MedusaDecoder(self)


class MedusaDecoder:
    """Medusa's `DrafterDecoder` (`models/decoding/decoders.py`). It keeps only the newest hidden state, h_{t-1}."""

    def __init__(self, drafter: MedusaDrafter) -> None:
        self._drafter, self.columns = drafter, drafter.columns
        self._previous_1d: Tensor | None = None
        self._run = self._logits

    def compile(self, backend: str = BACKEND) -> None:
        """Compile the heads."""
        heads = Graphs(lambda previous_1d: self._logits(previous_1d), "Medusa", self._drafter.device, backend)
        self._run = lambda previous_1d: heads(1, previous_1d)

    def _logits(self, previous_1d: Tensor) -> Tensor:
        logits: Tensor = self._drafter.logits_of(previous_1d[0]).float()
        return logits

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
        """Start a sequence: read nothing, as the state comes with the first observed token."""
        self._previous_1d = None

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        """Keep the last of the features [n, D] that predicted n new tokens: h_{t-1} of the newest token."""
        self._previous_1d = features[-1:]

    def draft(self) -> Tensor:
        """Return fp32 logits [G, V'] of depths 1..G after the newest committed token."""
        if self._previous_1d is None:
            raise ValueError("drafting needs a new token: call observe() first")
        return self._run(self._previous_1d)


DRAFTER = MedusaDrafter
