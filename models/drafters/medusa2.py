"""Medusa-2 (arXiv 2401.10774, sections 2.2.2 and 2.3.2): a LoRA inside the target is trained together with the heads.

    L = L_LM + lambda_0 * L_heads

L_heads is Medusa's loss; its gradient reaches the LoRA through the features. L_LM keeps the target what it was: on
self-distilled answers KL(original target, changed target), else cross entropy with the next token. The heads learn
alone for `warmup_steps` steps, while the LoRA rests at its start, where it changes nothing; then both learn, the LoRA
at a quarter of the heads' learning rate.

The result is another target. Attaching a trained Medusa-2 drafter merges the LoRA into the target's weights, so
that the autoregressive baseline, the methods and the proof of identity are all about the changed one; the report says
so (`target_change`).

The drafter owns a `LoraPair` for each linear layer that it changes, in a tree of modules with the target's own names,
so that they are trained, saved and resumed with it; hooks of the target's layers add their outputs (`Lora`). In its
file they are named `lora.model.layers.0.self_attn.q_proj.lora_A.weight`, as in peft's own checkpoints. A target holds
one LoRA at a time: `remove` takes an earlier one out.

Where we deviate: lambda_d are normalised as in `medusa.py`, so that the paper's lambda_0 of 0.2, times the sum of its
0.8**d over five heads, is 0.54 here; no LoRA on the LM head and no dropout; lambda_0 is constant.

Shapes: B batch, S sequence, N labelled positions, D hidden.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from typing import Annotated, Any, Literal, Self
from weakref import WeakKeyDictionary

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftsmith.errors import UserError
from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.options import one_message
from draftsmith.models.drafters.medusa import MedusaConfig, MedusaDrafter
from draftsmith.models.groups.layout import Groups
from draftsmith.models.loss import DrafterOutput, HeadRows, Teacher, head_loss, safe_denominator
from draftsmith.models.target.features import target_features

ALL_LINEAR = "all-linear"


class Medusa2Config(MedusaConfig):
    """Config of Medusa-2. `lora_shapes`, {layer: [inputs, outputs]}, is read from the target and is no option."""

    model_type = MODEL_TYPE_PREFIX + "medusa2"

    class Options(MedusaConfig.Options):
        """Options of `drafter.kind: medusa2`: Medusa's, and those of the LoRA in the target."""

        lora_rank: int = Field(32, ge=1, description="rank of the LoRA in the target's layers")
        lora_alpha: float = Field(16.0, gt=0, description="the LoRA's output is scaled by lora_alpha / lora_rank")
        lora_targets: Annotated[
            Literal["all-linear"] | Annotated[list[str], Field(min_length=1)],
            one_message(
                "must be `all-linear` or a list of names of the target's linear layers, such as [q_proj, v_proj]"
            ),
        ] = Field(
            "all-linear", description="names of the target's linear layers that get a LoRA; the LM head never does"
        )
        lora_learning_rate: float = Field(
            0.25, gt=0, description="learning rate of the LoRA, as a share of the heads' (`train.learning_rate`)"
        )
        lm_loss: Literal["kl", "ce"] = Field(
            "kl",
            description="loss L_LM that keeps the target's behaviour: `kl`: divergence from the original target, "
            "for self-distilled answers; `ce`: cross entropy with the next token, for other answers",
        )
        heads_weight: float = Field(
            0.5, gt=0, description="lambda_0, the weight of the heads' loss, relative to 1 for `lm_loss`"
        )
        warmup_steps: int = Field(
            200, ge=0, description="number of first optimizer steps in which only the heads are trained"
        )

    lora_shapes: dict[str, list[int]] = field(default_factory=dict)
    not_exported = "it changes the target itself, by a LoRA that no format carries: train with drafter.kind=medusa"


class Medusa2Drafter(MedusaDrafter):
    """Medusa-2's drafter q: Medusa's heads, and a LoRA in the target that is trained with them."""

    config_class = Medusa2Config
    offline_obstacle = "it changes the target while it trains, so that features from disk would be the old target's"

    def build(self, config: DrafterConfig) -> None:
        super().build(config)
        self.lora = lora_tree(config.lora_shapes, config.lora_rank)
        self.learning_rate_factors = {"lora.": config.lora_learning_rate}

    @classmethod
    def make_config(cls, target: PreTrainedModel, options: dict[str, Any]) -> DrafterConfig:
        config = super().make_config(target, options)
        remove(target)
        config.lora_shapes = linear_shapes(target, config.lora_targets)
        return config

    def attach(self, target: PreTrainedModel) -> Self:
        """Borrow the target's embedding and LM head; put the LoRA into the target, in place of an earlier one."""
        super().attach(target)
        config = self.config
        remove(target)
        shapes = linear_shapes(target, ALL_LINEAR)
        for name, shape in config.lora_shapes.items():
            if shapes.get(name) != shape:
                raise UserError(
                    f"this drafter changes layer {name} {shape} of its target ({config.target_name_or_path}), and this "
                    f"target has {shapes.get(name, 'no such layer')}: use it with that target, or train a new one"
                )
        pairs = {name: self.lora.get_submodule(name) for name in config.lora_shapes}
        _loras[target] = Lora(target, pairs, config.lora_alpha / config.lora_rank)
        return self

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        super().initialize_from_target(target)
        for pair in self.lora.modules():
            if isinstance(pair, LoraPair):  # as LoRA does, so that the layers are unchanged
                nn.init.kaiming_uniform_(pair.lora_A.weight, a=5**0.5)
                nn.init.zeros_(pair.lora_B.weight)

    def freeze(self) -> Self:
        super().freeze()
        _loras[self.attached.target].merge()
        return self

    def training_features(
        self,
        target: PreTrainedModel,
        ids_bs: Tensor,
        positions_bs: Tensor | None = None,
        attention_mask_bs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return features of the changed target (in training with gradients), and of the original one for L_LM."""
        if not self.trains_target:
            return super().training_features(target, ids_bs, positions_bs, attention_mask_bs)
        teacher_features = None
        if self.needs_teacher:
            with switched_off(self.attached.target):
                teacher_features = target_features(target, ids_bs, None, positions_bs)
        trains = torch.is_grad_enabled()
        return target_features(target, ids_bs, None, positions_bs, self.feature_layers, trains), teacher_features

    @property
    def target_change(self) -> str:
        """Return a sentence for the report: attaching this drafter changes the target's answers."""
        config = self.config
        return (
            f"The target itself was changed: a LoRA of rank {config.lora_rank} in {len(config.lora_shapes)} of its "
            "linear layers was trained together with the drafter. All figures, the autoregressive baseline and the "
            "greedy identity included, are measured against the changed target, whose answers may differ from the "
            "original's."
        )

    @property
    def trains_target(self) -> bool:
        """Return True if the current step trains the LoRA too: after the warm-up."""
        return self.training_step >= self.config.warmup_steps

    @property
    def needs_teacher(self) -> bool:
        return self.trains_target and self.config.lm_loss == "kl"

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        teacher_features: Tensor | None = None,
        label_counts: Tensor | None = None,
        groups: Groups | None = None,
    ) -> DrafterOutput:
        """Return the loss L_LM + lambda_0 * L_heads; in the warm-up L_heads alone.

        Args:
            features: As in `Drafter.forward`, of the changed target, with a gradient after the warm-up.
            teacher_features: Features of the original target, for the `kl` of L_LM.
        """
        groups = self.groups(input_ids, loss_mask, position_ids) if groups is None else groups
        label_counts = self.label_counts(groups) if label_counts is None else label_counts
        output = super().forward(input_ids, features, loss_mask, position_ids, features, label_counts, groups)
        heads_loss = self.config.heads_weight * output.loss
        if not self.trains_target:
            return output._replace(loss=heads_loss)
        # h_t predicts x_{t+1}, the label of depth 1: the mean L_LM of the tokens that may be predicted.
        _, label_m, token_m = groups.labels(groups.labelled_by_depth[0])
        target_head, shape = self.attached.lm_head, self.attached.shape
        teacher = (
            None if teacher_features is None else Teacher(teacher_features.flatten(0, 1), target_head, shape=shape)
        )
        states_md = features.flatten(0, 1).index_select(0, token_m)
        rows = HeadRows.flat(label_m, torch.ones_like(token_m, dtype=torch.float32), token_m)
        lm_loss = head_loss(target_head, states_md, rows, self.config.lm_loss, teacher, shape=shape).loss
        return output._replace(loss=heads_loss + lm_loss * safe_denominator(label_counts[0, 0]).reciprocal().float())


# ---- the LoRA in the target ----


class LoraPair(nn.Module):
    """The two LoRA factors of one linear layer, under peft's names `lora_A` and `lora_B`."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Linear(in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, out_features, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.lora_B(self.lora_A(inputs.to(self.lora_A.weight.dtype)))


class Lora:
    """LoRA of a target's linear layers: added to their outputs, or after `merge` to their weights.

    Args:
        pairs: The `LoraPair` of each changed layer, by the layer's name.
        scale: Factor of the LoRA's outputs.
    """

    def __init__(self, target: PreTrainedModel, pairs: Mapping[str, Any], scale: float) -> None:
        self._pairs = {target.get_submodule(name): pair for name, pair in pairs.items()}
        self._scale, self.is_on = scale, True
        self._hooks = [layer.register_forward_hook(partial(self._add, pair)) for layer, pair in self._pairs.items()]

    def _add(self, pair: LoraPair, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the changed output of a layer, as its forward hook."""
        return (output + pair(inputs[0]) * self._scale).to(output.dtype) if self.is_on else output

    def merge(self) -> None:
        """Add the LoRA to the target's weights, so that the target runs as fast as without it."""
        if self._hooks:
            self._remove_hooks()
            self._change_weights(1)

    def remove(self) -> None:
        """Take the LoRA out of the target's layers; after a `merge` weights are restored up to rounding."""
        if self._hooks:
            self._remove_hooks()
        else:
            self._change_weights(-1)

    @torch.no_grad()
    def _change_weights(self, sign: int) -> None:
        for layer, pair in self._pairs.items():
            dtype = torch.promote_types(pair.lora_A.weight.dtype, torch.float32)
            change = pair.lora_B.weight.to(dtype) @ pair.lora_A.weight.to(dtype)
            layer.weight.add_((change.T if isinstance(layer, Conv1D) else change) * self._scale, alpha=sign)

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


_loras: WeakKeyDictionary[PreTrainedModel, Lora] = WeakKeyDictionary()


def remove(target: PreTrainedModel) -> None:
    """Take the LoRA out of a target; after a `merge` the weights are restored up to rounding."""
    if (lora := _loras.pop(target, None)) is not None:
        lora.remove()


@contextmanager
def switched_off(target: PreTrainedModel) -> Iterator[None]:
    """Switch the LoRA off in this context, so that the target computes as without it."""
    lora = _loras[target]
    lora.is_on = False
    try:
        yield
    finally:
        lora.is_on = True


def lora_tree(shapes: dict[str, list[int]], rank: int) -> nn.Module:
    """Make a `LoraPair` for each layer in `shapes` ([inputs, outputs]), in a tree with the target's module names."""
    root = nn.Module()
    for name, (in_features, out_features) in shapes.items():
        *path, last = name.split(".")
        parent = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, LoraPair(in_features, out_features, rank))
    return root


def linear_shapes(target: PreTrainedModel, endings: str | list[str]) -> dict[str, list[int]]:
    """Return [inputs, outputs] of linear layers of a target without adapter, by name; never of its LM head.

    Args:
        target: The target, whose decoder's layers are searched.
        endings: `all-linear`, or the last parts of layers' names, such as `q_proj`.

    Raises:
        UserError: No linear layer has one of these names.
    """
    shapes = {}
    for name, module in target.named_modules():
        if name.startswith(f"{target.base_model_prefix}."):
            if isinstance(module, Conv1D):  # GPT-2's linear layer, transposed
                shapes[name] = list(module.weight.shape)
            elif isinstance(module, nn.Linear):
                shapes[name] = [module.in_features, module.out_features]
    if endings == ALL_LINEAR:
        return shapes
    for part in endings:
        if not any(name.endswith(f".{part}") for name in shapes):
            known = sorted({name.rpartition(".")[2] for name in shapes})
            raise UserError(
                f"key `drafter.options.lora_targets`: the target has no linear layer `{part}`; use some of "
                f"{', '.join(known)}, or `{ALL_LINEAR}`"
            )
    return {name: shape for name, shape in shapes.items() if name.endswith(tuple(f".{part}" for part in endings))}


DRAFTER = Medusa2Drafter
