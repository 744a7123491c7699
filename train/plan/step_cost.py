"""One training step of a recipe on tensors without values (`FakeRun`): what it allocates and computes, from configs.

The same calls in the same order as `DrafterTrainer`: the target's features (computed, or from disk), the drafter's
forward and loss, backward, clipping, the optimiser. So it holds for every drafter in `models/`, and for one that does
not exist yet.

Shapes: B batch, S sequence.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.fake_run import FakeRun, Phase
from draftsmith.models.head_loss import chunks_made_for
from draftsmith.models.target.features import drop_decoder_layers
from draftsmith.models.target.loading import target_device, target_without_weights
from draftsmith.models.target.quantized import saved_bytes
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.training_arguments import enable_gradient_checkpointing
from draftsmith.train.features.cache import refuse_obstacle

# A drafter that warms up is planned as it is afterwards.
LATE_STEP = 1 << 40
KINDS = ("target", "drafter", "gradients", "optimiser", "features", "activations", "logits")


@dataclass(frozen=True)
class StepCost:
    """What one optimiser step of one process needs. Phases in their order."""

    phases: dict[str, Phase]
    tokens: int  # real ones, padding left out

    @property
    def peak(self) -> tuple[str, Phase]:
        """The phase that needs most, and its needs."""
        return max(self.phases.items(), key=lambda item: item[1].peak_bytes)

    def flops(self) -> dict[str, int]:
        """FLOPs by part of the step."""
        total: Counter[str] = Counter()
        for name, phase in self.phases.items():
            total[name] += phase.flops["layers"]
            total["LM head"] += phase.flops["head"]
        return {name: flops for name, flops in total.items() if flops}


class FakeTraining:
    """A recipe's target and drafter without values, ready for steps.

    Args:
        recipe: Its target's config must be within reach, weights are not needed.
        args: Of the recipe's `train` section.

    Raises:
        UserError: As `load_target` and `Drafter.from_target`, or the optimiser cannot be had.
    """

    def __init__(self, recipe: Recipe, args: TrainingArguments) -> None:
        if recipe.data.features.source == "offline":
            refuse_obstacle(recipe)
        self._args = args
        self._run = run = FakeRun()
        with run.building():
            self.target = target_without_weights(recipe.target)
            self.drafter = load_drafter_class(recipe.drafter.kind).from_target(self.target, recipe.drafter.options)
        self._features, self._device_type = recipe.data.features, target_device(recipe.target).type
        if self._features.source == "offline":
            drop_decoder_layers(self.target)
        self._quantised_away_bytes = saved_bytes(recipe.target, self.target)
        run.adopt(self.target, "target")
        run.adopt(self.drafter, "drafter")
        run.logits_widths = _vocabulary_sizes(self.target.config, self.drafter.config)
        for head in (self.target.get_output_embeddings(), self.drafter.borrowed_head):
            run.count_products_as_head(head.weight)
        self.drafter.train()
        self.drafter.training_step = LATE_STEP
        enable_gradient_checkpointing(args, self.drafter)
        self.trained = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(lambda p: run.count_as("gradients", p.grad))
        self._optimizer = self._make_optimizer()

    def step(self, inputs: dict[str, Tensor]) -> StepCost:
        """The cost of a step on this batch: `input_ids`, `loss_mask`, ... [B, S], as collated."""
        run, args = self._run, self._args
        run.phases = {}
        ids, loss_mask, positions = inputs["input_ids"], inputs["loss_mask"], inputs.get("position_ids")
        run.count_as("features", inputs)
        with run.phase("target forward"):
            if args.gradient_accumulation_steps > 1:
                self._allocate_gradients()  # left by the batch before
            from_disk = self._from_disk(ids)
            if from_disk is None:
                features = self.drafter.training_features(self.target, ids, positions)
            else:
                features = self.drafter.split_features(from_disk[0].to(self.target.dtype))
            run.count_as("features", features)
        with run.phase("drafter forward"), self._autocast(), chunks_made_for(self._device_type):
            loss = self.drafter(ids, features[0], loss_mask, position_ids=positions, teacher_features=features[1]).loss
        with run.phase("backward"), chunks_made_for(self._device_type):
            loss.backward()
        del loss, features, from_disk
        with run.phase("optimiser step"):
            if args.max_grad_norm:
                nn.utils.clip_grad_norm_(self.trained, args.max_grad_norm)
            self._optimizer.step()
            self._optimizer.zero_grad()
        for phase in run.phases.values():
            phase.at_peak_bytes["target"] -= self._quantised_away_bytes
            phase.peak_bytes -= self._quantised_away_bytes
        return StepCost(run.phases, int(inputs["attention_mask"].sum()))

    def _from_disk(self, ids_bs: Tensor) -> Tensor | None:
        """[A, B, S, F] if features come from there: the Trainer fetches all A batches of a step before it begins."""
        if self._features.source == "online":
            return None
        width = len(self.drafter.layers_read) * self.target.config.get_text_config().hidden_size
        shape = (self._args.gradient_accumulation_steps, *ids_bs.shape, width)
        batches = torch.zeros(shape, dtype=getattr(torch, self._features.dtype))
        self._run.count_as("features", batches)
        return batches

    def _make_optimizer(self) -> Any:
        """With the state that its first step makes."""
        try:
            optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(self._args, self.drafter)
            optimizer = optimizer_class(self.trained, **options)
        except (ImportError, ValueError, TypeError) as error:
            raise UserError(f"key `train.optim`: {' '.join(str(error).split())}") from None
        with self._run:
            self._allocate_gradients()
            optimizer.step()
            self._run.count_as("optimiser", list(optimizer.state.values()))
            optimizer.zero_grad()
        return optimizer

    def _allocate_gradients(self) -> None:
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
            self._run.count_as("gradients", parameter.grad)

    def _autocast(self) -> torch.autocast:
        dtype = torch.float16 if self._args.fp16 else torch.bfloat16
        return torch.autocast("cpu", dtype=dtype, enabled=self._args.bf16 or self._args.fp16)


def _vocabulary_sizes(*configs: Any) -> tuple[int, ...]:
    """Of the target, and of a drafter that has a smaller one."""
    values = {key: value for config in configs for key, value in vars(config).items() if key.endswith("vocab_size")}
    return tuple({value for value in values.values() if isinstance(value, int)})
