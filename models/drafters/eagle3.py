"""EAGLE-3: fused features, and training on the inputs that drafting has (arXiv 2503.01840, sections 3.1 and 3.2).

**The shape**, P-EAGLE's too and vLLM's `eagle3` layout. g = fc([low; mid; high]), the residual streams of three layers
of the target. The first decoder layer is of the target's own kind, with q, k and v projections twice as wide: its
attention reads [input_layernorm(e(x_t)); hidden_norm(g_{t-1})] and is added to the un-normed g_{t-1}; the MLP is as
ever. Further layers are plain. Logits come from norm(out).

With EAGLE-3.1's `fc_norm` (arXiv 2605.09992: an RMSNorm for each hidden state taken from the target) g is
fc([norm_1(low); norm_2(mid); norm_3(high)]), so that no layer counts for more because its values are larger.
`norm_before_fc` is another form of it, of NVIDIA's and speculators' drafters: fc(norm([low; mid; high])). P-EAGLE's
`mask_hidden` goes through the same norms, as it does in vLLM (v1/spec_decode/llm_base_proposer.py) and speculators.

**Training.** The layer reads x_t and g_{t-1} and predicts x_{t+1}. Its output stands in for g_t when the next
token is drafted. No loss ties that output to a feature: instead training drafts too ("training-time test"). Step j of
group t reads e(x_{t+j}) and the output of step j-1, stands at position t+j, and sees the real tokens up to x_t and
steps 1..j of the same group. That is group attention (`attention.py`) whose depth j is computed after depth j-1,
so groups, rows, labels and loss are those of `group_wise.py`.

EAGLE-3.1 (arXiv 2605.09992) finds that this output grows from step to step, since nothing norms the residual path that
runs through all of them, and that attention drifts from the prompt to the drafted tokens. Its two changes are options:
`norm_output`, with which step j reads norm(output of step j-1), the very states that the head reads ("post-norm"), and
`fc_norm`. Neither changes what a round costs. Both are as vLLM's keys of these names
(model_executor/models/llama_eagle3.py), in training and in decoding.

Where we decide or differ: a step reads the true token, as the authors' code does, not the drafted one; every depth's
loss is a separate mean, the weights 0.8**j are normalised; KL stands for soft cross entropy: the same gradient,
and 0 at the optimum. With a draft vocabulary the authors' code (SafeAILab/EAGLE, eagle/traineagle3/cnets.py) leaves out
the rows where the teacher's most likely token is not in it; we keep them (with `loss: ce` rows go whose *label* is
not). It trains 7 steps, we by default 5. Neither is measured here.

Shapes: B batch, S sequence, G depths, P tokens, N active rows, D hidden, E = 2D input width of the first layer, F = 3D
features.
"""

import copy
from typing import Annotated, Any, Self, cast

import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.group_wise import GroupWiseDrafter, GroupWiseOptions, layers_or
from draftsmith.models.base.options import DepthOptions, DraftDepth, FirstToken, Init, Layers, Rope
from draftsmith.models.groups.attention import GroupAttention
from draftsmith.models.groups.layers import build_target_layers, layers_config
from draftsmith.models.groups.layout import Groups, previous_features
from draftsmith.recipes.schema import MOST_DEPTHS

# Projections of the attention's input, in transformers' names: separate, or fused (Phi-3).
INPUT_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj")


def default_feature_layers(num_layers: int) -> list[int]:
    """Return EAGLE-3's layers 2, L/2 and L-3 for a target of L layers, moved apart if L is too small."""
    middle = max(num_layers // 2, 1)
    low, high = min(2, middle - 1), max(num_layers - 3, middle + 1)
    return [layer for layer in (low, middle, high) if layer < num_layers]


class Eagle3ShapeOptions(GroupWiseOptions, DepthOptions):
    """Options of EAGLE-3 and P-EAGLE. With `draft_vocab_size` the head is trained and starts from the target's rows."""

    feature_layers: Annotated[list[int] | None, layers_or(default_feature_layers)] = Field(
        None,
        validate_default=True,
        description="target layers whose hidden states are fused, ascending; k = after k layers, 0 = the "
        "embeddings. By default EAGLE-3's three: a low, a middle and a high one",
    )
    init: Init = "target"
    layers: Layers = Field(None, validate_default=True)
    rope: Rope = None
    first_token: FirstToken = True
    norm_before_residual: bool = Field(
        False,
        description="the residual stream starts from the normed fused features, as in speculators' drafters, not "
        "from the unnormed ones",
    )
    fc_norm: bool = Field(
        False, description="norm each layer's features separately before they are fused, as in EAGLE-3.1"
    )
    norm_before_fc: bool = Field(
        False, description="norm all features together before they are fused, as in speculators' drafters"
    )

    @model_validator(mode="after")
    def _one_norm_of_features(self) -> Self:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("`fc_norm` and `norm_before_fc` exclude each other: set one of them to false")
        return self


class Eagle3ShapeConfig(DrafterConfig):
    @property
    def has_own_heads(self) -> bool:
        return self.draft_vocab_size is not None


class Eagle3Layer(nn.Module):
    """A decoder layer of the target's kind whose attention reads a token's embedding and a feature, concatenated.

    Args:
        layer: transformers' layer, whose modules this layer takes over under the same names.
        initializer_range: Standard deviation of the random weights of the widened projections.
        norm_before_residual: Whether attention is added to the normed feature, not to the feature itself.
    """

    def __init__(self, layer: Any, initializer_range: float, norm_before_residual: bool = False) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.post_attention_layernorm = layer.post_attention_layernorm
        # For architectures that norm the outputs of attention and MLP instead of their inputs (OLMo 2).
        self.post_feedforward_layernorm = getattr(layer, "post_feedforward_layernorm", None)
        fresh_norm = getattr(layer, "input_layernorm", layer.post_attention_layernorm)
        self.input_layernorm, self.hidden_norm = copy.deepcopy(fresh_norm), copy.deepcopy(fresh_norm)
        for name in INPUT_PROJECTIONS:
            narrow = getattr(self.self_attn, name, None)
            if narrow is not None:
                wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
                nn.init.normal_(wide.weight, std=initializer_range)
                setattr(self.self_attn, name, wide)

    def forward(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], **attention: Any) -> Tensor:
        """Map inputs [e(x_t); g_{t-1}] [1, N, E] to the layer's output [1, N, D]."""
        residual, wide = self.attention_input(hidden)
        attended = self.self_attn(wide, position_embeddings=position_embeddings, attention_mask=None, **attention)[0]
        if self.post_feedforward_layernorm is not None:
            hidden = residual + self.post_attention_layernorm(attended)
            return hidden + self.post_feedforward_layernorm(self.mlp(hidden))
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def attention_input(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Split inputs [..., E]; return the residual stream [..., D] and the projections' normed input [..., E]."""
        embedded, residual = hidden.chunk(2, dim=-1)
        normed = self.hidden_norm(residual)
        wide = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return normed if self.norm_before_residual else residual, wide

    @torch.no_grad()
    def start_from(self, source: Any) -> None:
        """Copy the weights of `source`, a layer of the target; its projections serve both halves of the input."""
        mine, theirs = self.state_dict(), source.state_dict()
        for name, value in theirs.items():
            if name not in mine:
                continue
            if mine[name].shape != value.shape:
                value = torch.cat([value, value], dim=1) / 2**0.5
            mine[name].copy_(value)
        if "input_layernorm.weight" in theirs:
            self.hidden_norm.load_state_dict(source.input_layernorm.state_dict())


class Eagle3Shape(GroupWiseDrafter):
    """Base of EAGLE-3 and P-EAGLE: their shared parameters and inputs. They differ in how depths are drafted."""

    fc_norm: nn.ModuleList | None
    input_norm: nn.Module | None

    def build(self, config: DrafterConfig) -> None:
        """Make the parameters. The first layer is an `Eagle3Layer`; P-EAGLE's further layers are plain."""
        self.layers_config = layers_config(config.layers_of, getattr(config, "num_layers", 1))
        (first, *others), norm = build_target_layers(self.layers_config)
        hidden_size = self.layers_config.hidden_size
        spread = getattr(self.layers_config, "initializer_range", 0.02)
        self.layers = nn.ModuleList([Eagle3Layer(first, spread, config.norm_before_residual), *others])
        self.norm = norm
        self.fc = nn.Linear(len(config.feature_layers) * hidden_size, hidden_size, bias=False)
        self.fc_norm = self.input_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(self._fresh_norm(hidden_size) for _ in config.feature_layers)
        if config.norm_before_fc:
            self.input_norm = self._fresh_norm(self.fc.in_features)
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(hidden_size, config.draft_vocab_size, bias=False)

    def _fresh_norm(self, size: int) -> nn.Module:
        """Make a norm of the target's kind, with weights of one."""
        return type(self.norm)(size, eps=self.layers_config.rms_norm_eps)

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """With `init: target`, copy the target's last layers; fused features g start near the features' mean."""
        self.start_own_heads()
        self.fc.weight.normal_(0.0, self.fc.in_features**-0.5 / 4)
        if not self.takes_target_layers:
            return
        for block in self.fc.weight.split(self.fc.out_features, dim=1):
            block.diagonal().add_(1.0 / len(self.config.feature_layers))
        source = target.base_model
        first, *others = source.layers[-len(self.layers) :]
        cast(Eagle3Layer, self.layers[0]).start_from(first)
        for layer, source_layer in zip(self.layers[1:], others, strict=True):
            layer.load_state_dict(source_layer.state_dict())
        self.norm.load_state_dict(source.norm.state_dict())

    def real_inputs(self, input_ids: Tensor, previous_features: Tensor) -> Tensor:
        """Return the layers' inputs [..., E] from tokens x_t [...] and features [..., F] that predicted them."""
        return self.token_inputs(input_ids, self.fused(previous_features))

    def fused(self, features: Tensor) -> Tensor:
        """Return the fused features g [..., D] of the target's features [..., F], concatenated over layers."""
        features = features.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            of_layers = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, of_layers, strict=True)], dim=-1)
        return self.fc(features)

    def token_inputs(self, input_ids: Tensor, predicted_by: Tensor) -> Tensor:
        """Return inputs [..., E] from tokens [...] and the states [..., D] before them: fused features or outputs."""
        return torch.cat([self.attached.embedding(input_ids).to(predicted_by.dtype), predicted_by], dim=-1)


class Eagle3Config(Eagle3ShapeConfig):
    model_type = MODEL_TYPE_PREFIX + "eagle3"

    class Options(Eagle3ShapeOptions):
        """Options of `drafter.kind: eagle3`: the keys of `drafter.options` in a recipe."""

        ttt_steps: int = Field(
            5,
            ge=1,
            le=MOST_DEPTHS,
            description="number of depths in training (training-time test), each reads the outputs of the depth "
            "before; 1: no training-time test",
        )
        draft_depth: DraftDepth | None = Field(
            None, validate_default=True, description="most draft tokens along one path; by default `ttt_steps`"
        )
        norm_output: bool = Field(
            False, description="a depth reads the previous depth's output after the final norm, as in EAGLE-3.1"
        )

        @field_validator("draft_depth")
        @classmethod
        def _as_trained(cls, depth: int | None, info: ValidationInfo) -> int | None:
            return info.data.get("ttt_steps") if depth is None else depth

        @property
        def num_depths(self) -> int:
            return self.ttt_steps


class Eagle3Drafter(Eagle3Shape):
    """EAGLE-3's drafter q: one layer that drafts token by token and reads its own output."""

    config_class = Eagle3Config

    def hidden_states(self, groups: Groups, features: Tensor) -> Tensor:
        """Return hidden states [N, D] of the N computed rows before the final norm, computed depth after depth."""
        previous_bsf = previous_features(features, groups.position_ids)
        # Input of the next depth next to its tokens: first g, then the outputs of the depth before.
        feedback_pd, ids_p = self.fused(previous_bsf).flatten(0, 1), groups.input_ids.flatten()
        attention = GroupAttention(self.config.attention, groups, keeps=True, window=self.sliding_window)
        outputs, places = list[Tensor](), list[Tensor]()
        for j, depths in enumerate(groups.rows_of_depths(*[1] * groups.shape[1])):
            if outputs:
                before_n = groups.token_n[places[-1]]
                feedback_pd = outputs[-1].new_zeros(feedback_pd.shape).index_copy(0, before_n, outputs[-1])
            place_n = depths[0]
            token_n = groups.token_n[place_n]
            read = self.drafted_inputs if j else self.token_inputs
            hidden = read(ids_p[token_n + j], feedback_pd.index_select(0, token_n)).unsqueeze(0)
            rotary = self.rotary_of(hidden, groups.position_n[place_n].unsqueeze(0))
            attention.resume(depths)
            outputs.append(self.run_layers(hidden, rotary, attention)[0])
            places.append(place_n)
        return torch.cat(outputs).index_select(0, torch.cat(places).argsort())

    def drafted_inputs(self, input_ids: Tensor, feedback: Tensor) -> Tensor:
        """Return the layer's next inputs [..., E], of draft tokens [...] and outputs [..., D] that predicted them."""
        return self.token_inputs(input_ids, self.norm(feedback) if self.config.norm_output else feedback)


DRAFTER = Eagle3Drafter
