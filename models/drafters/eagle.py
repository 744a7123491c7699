"""EAGLE: autoregression on the target's features (arXiv 2401.15077, sections 4.1 and 4.2).

One decoder layer of the target's own kind reads the pair [e(x_t); h_{t-1}] through a linear map `fc` and regresses the
feature that the target will have at x_t: f_t, close to h_t. The target's LM head reads the distribution of x_{t+1} from
f_t, and f_t stands in for h_t when the next token is drafted. (The paper numbers the same pair (f_t, e_{t+1}): its
features count from the token that they are at, its tokens from the one that they predict.)

Loss of a row: SmoothL1(f_t, h_t), mean over D, plus w_cls times the distance of its distribution to the target's.
In training, uniform noise on the features that are read, never on those that are regressed, compensates for errors that
accumulate while drafting. Training is one depth of the group-wise code (`group_wise.py`), decoding grows a tree over
the layer's own KV cache (`TreeDecoder`), with the target's features again for every token that was committed.

The noise is that of the authors' code (SafeAILab/EAGLE, eagle/train/main.py, AddUniformNoise: the 512 is in no paper):
U(-0.1, 0.1) in a sequence of 512 tokens, times 512 / length in others, so that short ones get more. A length is counted
up to the last label; each of several packed documents has its own. w_cls = 0.1 is the paper's, and `p_w` in that code.

As in the authors' code, the layer has no input norm and there is no final norm (it is vLLM's layout too), and it starts
at random: the target's last layer, whose inputs have a larger norm, is no better a start. Where we differ from that
code:
* KL in place of soft cross entropy: the same gradient, and 0 at the optimum.
* `fc` has no bias by default. Theirs has (eagle/model/cnets1.py), but where the config says `bias: false`, as for
  Llama 3: `fc_bias`. Its effect is not measured here.

Shapes: B batch, S sequence, N labelled rows, D hidden, E = D input width of the layer, V' drafted tokens, G depths.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.group_wise import GroupWiseDrafter, GroupWiseOptions
from draftsmith.models.base.options import DraftDepth, FirstToken, Layers, Rope
from draftsmith.models.groups.layers import build_target_layers, layers_config
from draftsmith.models.groups.layout import Groups
from draftsmith.models.loss import AuxiliaryLoss, HeadBlock, smooth_l1

# Tokens of a sequence at which the noise is `feature_noise`.
NOISE_LENGTH = 512


class EagleLayerOptions(GroupWiseOptions):
    """Options of EAGLE and of ParallelSpec's EAGLE flavour; `loss` compares q with the target's distribution."""

    class_weight: float = Field(
        0.1, ge=0, description="w_cls, the weight of `loss`, relative to 1 for the regression of the features"
    )
    feature_noise: float = Field(
        0.1,
        ge=0,
        description="a of the uniform noise U(-a, a) * 512 / (length of the sequence) that training adds to the "
        "features",
    )
    first_token: FirstToken = True
    layers: Layers = Field(None, validate_default=True)
    rope: Rope = None
    fc_bias: bool = Field(False, description="give `fc` a bias, as in the authors' Vicuna and Llama 2 drafters")


class EagleConfig(DrafterConfig):
    model_type = MODEL_TYPE_PREFIX + "eagle"
    published_as = "eagle-1"  # vLLM looks for `eagle-`

    class Options(EagleLayerOptions):
        """Options of `drafter.kind: eagle`: the keys of `drafter.options` in a recipe."""

        draft_depth: DraftDepth = 5


class EagleDrafter(GroupWiseDrafter):
    """EAGLE's drafter q, a layer that regresses features; base of ParallelSpec's EAGLE flavour."""

    config_class: type[DrafterConfig] = EagleConfig

    def build(self, config: DrafterConfig) -> None:
        self.layers_config = layers_config(config.layers_of, num_layers=1)
        self.layers, _ = build_target_layers(self.layers_config)
        self.layers[0].input_layernorm, self.norm = nn.Identity(), nn.Identity()
        hidden_size = self.layers_config.hidden_size
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=config.fc_bias)
        self.head_weight = config.class_weight

    @property
    def needs_teacher(self) -> bool:
        return True

    # ---- training ----

    def hidden_states(self, groups: Groups, features: Tensor) -> Tensor:
        if self.training and self.config.feature_noise:  # uniform, added to the features that the layer reads
            dtype, device = self.fc.weight.dtype, features.device
            noise = torch.rand(features.shape, generator=self.generator, dtype=dtype, device=device)
            lengths_bs = groups.document_lengths().clamp(min=1).to(dtype)
            width_bs1 = (2.0 * NOISE_LENGTH * self.config.feature_noise / lengths_bs).unsqueeze(-1)
            features = noise.sub_(0.5).mul_(width_bs1).add_(features)
        return super().hidden_states(groups, features)

    def auxiliary_loss(self, block: HeadBlock, features_pd: Tensor | None) -> AuxiliaryLoss:
        """Return the SmoothL1 loss of labelled rows' outputs against the target's features."""
        if features_pd is None:
            raise ValueError("EAGLE regresses the target's features: pass teacher_features")
        target_md = features_pd.index_select(0, block.rows.before_m)
        return AuxiliaryLoss(smooth_l1(block.hidden_md, target_md), block.rows.every_weight_m)

    # ---- shared by training and decoding ----

    def real_inputs(self, input_ids: Tensor, previous_features: Tensor) -> Tensor:
        """Return the layer's inputs [..., E] from newest tokens x_t [...] and features h_{t-1} [..., D]."""
        dtype = self.fc.weight.dtype
        embedded = self.attached.embedding(input_ids)
        return self.fc(torch.cat([embedded.to(dtype), previous_features.to(dtype)], dim=-1))


DRAFTER = EagleDrafter
