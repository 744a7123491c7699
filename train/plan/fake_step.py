"""One training step of a recipe on tensors without values (`FakeRun`): what it allocates and computes, from configs.

The calls are those of `DrafterTrainer` in their order, so it holds for every kind of drafter.

Shapes: B batch, S sequence.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.fake_run import FakeRun, Phase
from draftsmith.models.losses import chunks_made_for
from draftsmith.models.target.features import drop_decoder_layers
from draftsmith.models.target.loading import target_device, target_without_weights
from draftsmith.models.target.quantized import saved_bytes
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.training_arguments import enable_gradient_checkpointing
from draftsmith.train.features.cache import refuse_obstacle

LATE_STEP = 1 << 40  # a drafter that warms up is planned as it is afterwards


@dataclass(frozen=True)
class StepCost:
    """What one optimiser step of one process needs, by phase in their order, and its tokens without padding."""

    phases: dict[str, Phase]
    tokens: int

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
        is_offline = recipe.data.features.source == "offline"
        if is_offline:
            refuse_obstacle(recipe)
        self._args, self._run = args, FakeRun()
        self._disk_dtype = getattr(torch, recipe.data.features.dtype) if is_offline else None
        self._device_type = target_device(recipe.target).type
        run = self._run
        with run.building():
            self.target = target_without_weights(recipe.target)
            self.drafter = load_drafter_class(recipe.drafter.kind).from_target(self.target, recipe.drafter.options)
        if is_offline:
            drop_decoder_layers(self.target)
        self._quantised_away_bytes = saved_bytes(recipe.target, self.target)
        for kind, model in (("target", self.target), ("drafter", self.drafter)):
            run.adopt(kind, model)
        sizes = (vars(model.config).items() for model in (self.target, self.drafter))
        run.logits_widths = {
            size for items in sizes for key, size in items if key.endswith("vocab_size") and isinstance(size, int)
        }
        for head in (self.target.get_output_embeddings(), self.drafter.borrowed_head):
            run.count_products_as_head(head.weight)
        self.drafter.train()
        self.drafter.training_step = LATE_STEP
        enable_gradient_checkpointing(args, self.drafter)
        self.trained = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(lambda p: run.count_as("gradients", p.grad))
        try:
            optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, self.drafter)
            self._optimizer = optimizer_class(self.trained, **options)
        except (ImportError, ValueError, TypeError) as error:
            raise UserError(f"key `train.optim`: {' '.join(str(error).split())}") from None
        with run:  # the state that its first step makes
            self._allocate_gradients()
            self._optimizer.step()
            run.count_as("optimiser", list(self._optimizer.state.values()))
            self._optimizer.zero_grad()

    def step(self, inputs: dict[str, Tensor]) -> StepCost:
        """Return the cost of a step on this batch: `input_ids`, `loss_mask`, ... [B, S], as collated."""
        run, args = self._run, self._args
        run.phases = {}
        ids, loss_mask, positions = inputs["input_ids"], inputs["loss_mask"], inputs.get("position_ids")
        run.count_as("features", inputs)
        with run.phase("target forward"):
            if args.gradient_accumulation_steps > 1:
                self._allocate_gradients()  # left by the batch before
            from_disk = None
            if self._disk_dtype is None:
                features = self.drafter.training_features(self.target, ids, positions)
            else:  # the Trainer fetches all batches of a step before it begins
                width = len(self.drafter.layers_read) * self.target.config.get_text_config().hidden_size
                from_disk = torch.zeros(args.gradient_accumulation_steps, *ids.shape, width, dtype=self._disk_dtype)
                run.count_as("features", from_disk)
                features = self.drafter.split_features(from_disk[0].to(self.target.dtype))
            run.count_as("features", features)
        half = torch.float16 if args.fp16 else torch.bfloat16
        autocast = torch.autocast("cpu", dtype=half, enabled=args.bf16 or args.fp16)
        with run.phase("drafter forward"), autocast, chunks_made_for(self._device_type):
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

    def _allocate_gradients(self) -> None:
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
            self._run.count_as("gradients", parameter.grad)
