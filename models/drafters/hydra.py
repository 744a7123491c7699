"""Hydra's sequentially dependent heads (arXiv 2402.05109).

Head d of group t reads the target's feature h_{t-1} and the embeddings of x_t, x_{t+1}, ..., x_{t+d-1}, of which all
but x_t are drafted ones, and predicts x_{t+d}: Medusa's heads, which also read the earlier heads' drafts. In training
the tokens are the true ones. Hydra++ is `prefix_attention: true`, `num_layers: 4`, `loss: kl`: a decoder layer over all
features up to h_{t-1} in h_{t-1}'s place, deeper heads, and the target's distribution as the label.

Where we deviate:
* `embedding_norm`: the embeddings are normalised first. Those of a pre-norm target are far smaller than its final
  features (25 times in the embedded one), so that the heads would take long to notice the drafted tokens.
* The blocks of a deep head have separate weights; in the authors' code (zankner/Hydra, hydra/model/hydra_heads/
  mlp_head.py) all but the first are one block repeated.
* Every head starts as the target's own LM head on h_{t-1}. In the authors' code only the LM head's weights start so:
  the first block's projection past SiLU, the biases of the blocks, and a bias that its LM heads have and ours have not,
  start at torch's random values. Not measured here.
* The loss of head d is averaged over its own labels, then weighted with lambda_d / sum(lambda).

Shapes: B batch, G heads, S sequence, N packed query rows, D hidden, V vocabulary, n newly committed tokens, W nodes of
a call. "State" is the heads' input from the prefix: h_{t-1}, or prefix attention's output there.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.options import Attention, DepthWeights, Layers, SlidingWindow
from draftsmith.models.compiling import BACKEND, Graphs, padded_rows
from draftsmith.models.decoding.cached_layers import CachedDecoder
from draftsmith.models.decoding.decoders import FEWEST_STATIC_NODES, GrowingTree
from draftsmith.models.decoding.kv_cache import LONGEST_TREE_NODES, for_device, to_device
from draftsmith.models.drafters.medusa import HeadsDrafter, MedusaConfig
from draftsmith.models.groups.attention import GroupAttention
from draftsmith.models.groups.layers import Rotate, build_rotary, build_target_layers, layers_config
from draftsmith.models.groups.layout import Groups, previous_features


class HydraConfig(MedusaConfig):
    model_type = MODEL_TYPE_PREFIX + "hydra"

    class Options(MedusaConfig.Options):
        """Options of `drafter.kind: hydra`. Hydra++ has 4 layers, prefix attention and the loss `kl`."""

        prefix_attention: bool = Field(False, description="add Hydra++'s decoder layer over the prefix")
        embedding_norm: bool = Field(True, description="normalise the token embeddings that the heads read")
        lm_head_bias: bool = Field(
            False, description="give the LM heads biases that are not trained, as in the authors' published drafters"
        )
        attention: Attention = "folded"
        sliding_window: SlidingWindow = None
        layers: Layers = Field(None, validate_default=True)
        depth_weights: DepthWeights = 1.0

        @model_validator(mode="after")
        def _window_of_a_layer(self) -> Self:
            if self.sliding_window is not None and not self.prefix_attention:
                raise ValueError("`sliding_window` is that of the layer over the prefix: set `prefix_attention: true`")
            return self


class ResidualBlock(nn.Module):
    """Block residual(x) + SiLU(linear(x)); `residual` is a projection if the input is wider than the output."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_size, out_size)
        self.residual = nn.Identity() if in_size == out_size else nn.Linear(in_size, out_size)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.residual(inputs) + nn.functional.silu(self.linear(inputs))


class PrefixAttention(nn.Module):
    """Hydra++'s prefix attention: one decoder layer of the target's kind and a norm, over all features so far."""

    reads_first_token = True
    rotary_of: Rotate  # RoPE's cos and sin [1, N, Dh] of features at positions [1, N]

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self._kind, self.layers_config = config.layers, layers_config(config.layers_of, num_layers=1)
        self.sliding_window: int | None = config.sliding_window
        (self.layer,), self.norm = build_target_layers(self.layers_config)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def attach(self, target: PreTrainedModel) -> None:
        self.rotary_of = build_rotary(self._kind, target, self.layers_config)

    def real_inputs(self, input_ids: Tensor, previous_features: Tensor) -> Tensor:
        """Return the layer's inputs: the features [n, D], in the layer's dtype; tokens are not read."""
        return previous_features.to(self.dtype)

    def logits_of(self, states: Tensor) -> Tensor:
        """Return an empty tensor in place of logits: the heads read the states themselves."""
        return states[..., :0]

    def run_layers(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attention: Any) -> Tensor:
        """Map features [1, N, D] to states [1, N, D]; the layer calls `attention.attend`."""
        return self.norm(self.layer(hidden, position_embeddings=rotary, row_attention=attention))


class HydraDrafter(HeadsDrafter):
    """Hydra's drafter q: heads that also read the tokens drafted by earlier heads."""

    config_class = HydraConfig

    def build(self, config: DrafterConfig) -> None:
        hidden_size = config.hidden_size
        # Head index j reads the state and j+1 embeddings.
        self.heads = nn.ModuleList(
            nn.Sequential(
                ResidualBlock((j + 2) * hidden_size, hidden_size),
                *(ResidualBlock(hidden_size, hidden_size) for _ in range(config.num_layers - 1)),
            )
            for j in range(config.num_heads)
        )
        self.add_lm_heads(config)
        if config.embedding_norm:
            self.embedding_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.prefix = PrefixAttention(config) if config.prefix_attention else None

    def attach(self, target: PreTrainedModel) -> Self:
        super().attach(target)
        if self.prefix is not None:
            self.prefix.attach(target)
        return self

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Initialise heads so that they return h_{t-1}, as Medusa's; prefix attention stays random."""
        for block in self.modules():
            if isinstance(block, ResidualBlock):  # it then returns its first D inputs
                nn.init.zeros_(block.linear.weight)
                nn.init.zeros_(block.linear.bias)
                if isinstance(block.residual, nn.Linear):
                    nn.init.eye_(block.residual.weight)
                    nn.init.zeros_(block.residual.bias)
        super().initialize_from_target(target)

    # ---- training: all groups of a sequence together ----

    def hidden_states(self, groups: Groups, features: Tensor) -> Tensor:
        """Return for each token its group's state (zeros without a row) and its embedding, concatenated [P, 2D]."""
        previous_pd = previous_features(features, groups.position_ids).to(self.dtype).flatten(0, 1)
        embedded_pd = self.embedded(groups.input_ids).flatten(0, 1).to(previous_pd.dtype)
        if self.prefix is None:
            return torch.cat([previous_pd, embedded_pd], dim=-1)
        depths = groups.rows_of_depths(1)[0]
        place_n = depths[0]
        token_n = groups.token_n[place_n]
        hidden = previous_pd.index_select(0, token_n).unsqueeze(0)
        rotary = self.prefix.rotary_of(hidden, groups.position_n[place_n].unsqueeze(0))
        attention = GroupAttention(self.config.attention, groups, depths, window=self.prefix.sliding_window)
        states_nd = self.prefix.run_layers(hidden, rotary, attention)[0]
        states_pd = states_nd.new_zeros(len(previous_pd), states_nd.shape[-1]).index_copy(0, token_n, states_nd)
        return torch.cat([states_pd, embedded_pd.to(states_pd.dtype)], dim=-1)

    def head_hidden(self, j: int, groups: Groups, states_pd: Tensor, token_m: Tensor) -> Tensor:
        states_pd, embedded_pd = states_pd.chunk(2, dim=-1)
        read = [states_pd.index_select(0, token_m), *(embedded_pd.index_select(0, token_m + i) for i in range(j + 1))]
        return self.heads[j](torch.cat(read, dim=-1))

    # ---- shared by training and decoding ----

    def embedded(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [..., D] of tokens [...], normalised with the option `embedding_norm`."""
        embedded = self.attached.embedding(input_ids).to(self.dtype)
        return self.embedding_norm(embedded) if self.config.embedding_norm else embedded

    def logits_of(self, inputs: Tensor, j: int) -> Tensor:
        """Return logits [..., V'] of head j (from 0) for inputs [..., (j+2) * D]: the state, then j+1 embeddings."""
        return self.head_logits(self.heads[j](inputs), j)

    def decoder(self, max_length_tokens: int) -> "HydraDecoder":
        return HydraDecoder(self, max_length_tokens)


class HydraDecoder:
    """Hydra's `StepwiseDecoder`. For each node it keeps its head's input: the state, and its path's embeddings."""

    def __init__(self, drafter: HydraDrafter, max_length_tokens: int) -> None:
        self.num_depths, self.columns = drafter.config.num_heads, drafter.columns
        self._drafter = drafter
        self._attended = None if drafter.prefix is None else _AttendedPrefix(drafter.prefix, max_length_tokens, 0)
        self._newest: tuple[Tensor, Tensor] | None = None  # the newest token [1] and the feature before it [1, D]
        self._hidden_size = drafter.config.hidden_size
        # Of all nodes; a node at depth d has (d + 2) * D numbers.
        shape = 2 * LONGEST_TREE_NODES, (self.num_depths + 1) * self._hidden_size
        self._rows = torch.zeros(shape, dtype=drafter.dtype, device=drafter.device)
        self._tree = GrowingTree(self.num_depths, f"there are {self.num_depths} heads")
        self._levels: list[Graphs] = []  # by depth, where they are compiled

    def compile(self, backend: str = BACKEND) -> None:
        """Compile the heads, one graph for each depth, and the layer over the prefix."""
        torch._dynamo.mark_static_address(self._rows)
        levels = [self._level_forward(depth) for depth in range(self.num_depths)]
        group = list[Graphs]()
        self._levels = [Graphs(level, "Hydra", self._drafter.device, backend, group=group) for level in levels]
        if self._attended is not None:
            self._attended.compile(backend)

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
        if self._attended is not None:
            self._attended.start(prompt_ids, features)
        self._newest = None

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        if self._attended is not None:
            self._attended.observe(committed_ids, features)
        self._newest = committed_ids[-1:], features[-1:]

    def begin(self) -> Tensor:
        """Run the first head; return fp32 logits [1, V'] for the children of the newest committed token."""
        if self._newest is None:
            raise ValueError("drafting needs a new token: call observe() first")
        (newest_id, state_1d), self._newest = self._newest, None
        if self._attended is not None:
            state_1d = self._attended.newest_state()
        self._rows[:1, : self._hidden_size].copy_(state_1d)
        self._tree.begin()
        return self._level(newest_id, [0], 0, 0)

    def expand(self, tokens: list[int] | Tensor, parents: list[int]) -> Tensor:
        """Add W nodes, one below each of `parents`; return fp32 logits [W, V'] for their children."""
        first, depths = len(self._tree.depths), self._tree.grow(parents)
        if len(set(depths)) == 1:  # as trees are grown
            return self._level(tokens, parents, first, depths[0])
        each = enumerate(zip(tokens, parents, depths, strict=True), start=first)
        return torch.cat([self._level([token], [parent], node, depth).clone() for node, (token, parent, depth) in each])

    def _level(self, tokens: list[int] | Tensor, parents: list[int], first: int, depth: int) -> Tensor:
        """Run new nodes of one depth, numbered from `first` on; return fp32 logits [W, V'] of their children."""
        device, nodes = self._drafter.device, len(parents)
        ids, numbers = for_device(tokens, device), for_device([[parent, first] for parent in parents], device)
        if self._levels and self._levels[depth].works:
            size = max(FEWEST_STATIC_NODES, padded_rows(nodes)) if depth else 1
            logits: Tensor = self._levels[depth](size, ids, numbers)
            return logits[:nodes]
        return self._level_forward(depth)(to_device(ids, device), to_device(numbers, device))

    def _level_forward(self, depth: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function of tokens [W], and of parents and the first node's number [W, 2]; it may be compiled."""
        drafter, held, hidden_size = self._drafter, self._rows, self._hidden_size

        def run(tokens: Tensor, numbers: Tensor) -> Tensor:
            parents, first = numbers[:, 0], numbers[0, 1]
            above = held.index_select(0, parents)[:, : (depth + 1) * hidden_size]
            rows = torch.cat([above, drafter.embedded(tokens)], dim=-1)
            nodes = first + torch.arange(len(tokens), device=held.device)
            held[:, : rows.shape[-1]].index_copy_(0, nodes, rows)
            return drafter.logits_of(rows, depth).float()

        return run


class _AttendedPrefix(CachedDecoder):
    """The prefix attention's layer over the features of all committed tokens, each once."""

    def newest_state(self) -> Tensor:
        """Run the queued tokens; return the state [1, D] before the newest committed token."""
        return self._read_pending()[0]


DRAFTER = HydraDrafter
