"""EAGLE-3: fused features, and training on what it will read when it drafts (arXiv 2503.01840, sections 3.1 and 3.2).

The layer (`eagle3_shape.py`) reads x_t and g_{t-1} and predicts x_{t+1}. Its output stands in for g_t when the next
token is drafted. No loss ties that output to a feature: instead training drafts too ("training-time test"). Step j of
group t reads e(x_{t+j}) and the output of step j-1, stands at position t+j, and sees the real tokens up to x_t and
steps 1..j of its own group. That is group attention (`attention.py`) whose depth j is computed after depth j-1,
so groups, rows, labels and loss are those of `group_wise.py`.

EAGLE-3.1 (arXiv 2605.09992) finds that this output grows from step to step, since nothing norms the residual path that
runs through all of them, and that attention drifts from the prompt to the drafted tokens. Its two changes are options:
`norm_output`, with which step j reads norm(output of step j-1), the very states that the head reads ("post-norm"), and
`fc_norm` (`eagle3_shape.py`). Neither changes what a round costs. Both are as vLLM's keys of these names
(model_executor/models/llama_eagle3.py), in training and in decoding.

Where we decide or differ: a step reads the true token, as the authors' code does, not the drafted one; every depth's
loss is a mean of its own and the weights 0.8**j are normalised; KL stands for soft cross entropy: the same gradient,
and 0 at the optimum. With a draft vocabulary the authors' code (SafeAILab/EAGLE, eagle/traineagle3/cnets.py) leaves out
the rows where the teacher's most likely token is not in it; we keep them, the teacher renormalised over the tokens that
are (with `loss: ce` rows go whose *label* is not). It trains 7 steps, we by default 5. Neither is measured here.

Shapes: B batch, S sequence, G depths, N active rows, D hidden, E input width of the layer, F features, Dh head size.
"""

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX, DraftDepth, DrafterConfig
from draftsmith.models.base.eagle3_shape import Eagle3Shape, Eagle3ShapeOptions
from draftsmith.models.groups.layers import GroupAttention
from draftsmith.models.groups.rows import ActiveRows, previous_features


class Eagle3Config(DrafterConfig):
    model_type = MODEL_TYPE_PREFIX + "eagle3"

    class Options(Eagle3ShapeOptions):
        """The keys of `drafter.options` in a recipe."""

        ttt_steps: int = Field(
            5, ge=1, description="depths that are trained, each on the outputs of the one before; 1 is no such training"
        )
        draft_depth: DraftDepth | None = Field(
            None, validate_default=True, description="the longest path that is drafted; `ttt_steps` by default"
        )
        norm_output: bool = Field(
            False, description="a step reads the output of the step before after the final norm, as EAGLE-3.1"
        )

        @field_validator("draft_depth")
        @classmethod
        def _as_trained(cls, depth: int | None, info: ValidationInfo) -> int | None:
            return info.data.get("ttt_steps") if depth is None else depth

        @property
        def num_depths(self) -> int:
            return self.ttt_steps


class Eagle3Drafter(Eagle3Shape):
    """The drafter q; see the module's docstring."""

    config_class = Eagle3Config

    def build(self, config: DrafterConfig) -> None:
        self.build_shape(config, num_layers=1)

    def rows_hidden(
        self, rows: ActiveRows, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        """[N, D] of the active rows, before the final norm: depth after depth. Features are those AT each token."""
        length = rows.shape[2]
        previous_bsf = previous_features(self.features_read(features), position_ids)
        # What the next depth reads with its tokens: g first, then the outputs of the depth before it.
        feedback_pd = self.fused(previous_bsf).flatten(0, 1)
        positions_n, ids_p = self.positions(rows, position_ids), input_ids.flatten()
        attention = GroupAttention(self.config.attention, rows.grid, keeps=True)
        outputs, places = [], []
        for j, (place_n, grid) in enumerate(rows.by_depth()):
            token_n, position_n = rows.token_n[place_n], rows.position_n[place_n]
            # Past the end of the row there is no token to read, nor a label: any will do.
            read_n = token_n + (position_n + j).clamp_max(length - 1) - position_n
            read = self.drafted_inputs if j else self.token_inputs
            hidden = read(ids_p[read_n], feedback_pd.index_select(0, token_n)).unsqueeze(0)
            rotary = self.rotary_of(hidden, positions_n[place_n].unsqueeze(0))
            attention.go_on(grid)
            outputs.append(self.run_layers(hidden, rotary, cached_attention=attention)[0])
            places.append(place_n)
            feedback_pd = outputs[-1].new_zeros(feedback_pd.shape).index_copy(0, token_n, outputs[-1])
        return torch.cat(outputs).index_select(0, torch.cat(places).argsort())

    def drafted_inputs(self, input_ids: Tensor, feedback: Tensor) -> Tensor:
        """[..., E] from drafted tokens [...] and the outputs that predicted them [..., D], in place of g."""
        return self.token_inputs(input_ids, self.norm(feedback) if self.config.norm_output else feedback)


DRAFTER = Eagle3Drafter
