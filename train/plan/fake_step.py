"""Training steps of a recipe on tensors without values (`FakeRun`): their batches, what they cost, and cheaper ones.

The calls are those of `DrafterTrainer` in their order, so a step's cost holds for every kind of drafter.

Shapes: B batch, S sequence.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import Trainer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from draftsmith.data.distill.token_dataset import answer_lengths, load_tokens, row_lengths
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.fake_run import FakeRun, Phase
from draftsmith.models.losses import chunks_made_for
from draftsmith.models.target.features import drop_decoder_layers
from draftsmith.models.target.loading import target_device, target_without_weights
from draftsmith.models.target.quantized import saved_bytes
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder, bytes_text
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.optimizer import muon_with_adamw
from draftsmith.train.drafter.rows import PackedRows, split_rows
from draftsmith.train.drafter.trainer import collate_right_padded
from draftsmith.train.drafter.training_arguments import (
    GLOBAL_BATCH,
    DrafterTrainingArguments,
    enable_gradient_checkpointing,
    training_arguments,
)
from draftsmith.train.features.cache import refuse_obstacle

LATE_STEP = 1 << 40  # a drafter that warms up is planned as it is afterwards
SMALLER_VOCABULARY = 32_000
ACTIVE = "draftsmith_active"  # how transformers' experts are run, by name
WORTH_FRAC = 0.98  # of the peak: what saves less is not proposed


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


def active_experts(experts: Any, hidden_nd: Tensor, chosen_nk: Tensor, weights_nk: Tensor) -> Tensor:
    """[N, D] at the price of the experts that each token takes, which the router cannot choose without values."""
    copies = hidden_nd.repeat_interleave(chosen_nk.shape[-1], dim=0)

    def product(inputs: Tensor, weight_eoi: Tensor) -> Tensor:
        return inputs @ weight_eoi[0] if experts.is_transposed else nn.functional.linear(inputs, weight_eoi[0])

    if experts.has_gate:
        inner = experts._apply_gate(product(copies, experts.gate_up_proj))
    else:
        inner = experts.act_fn(product(copies, experts.up_proj))
    weighted = product(inner, experts.down_proj) * weights_nk.reshape(-1, 1)
    return weighted.view(len(hidden_nd), -1, weighted.shape[-1]).sum(dim=1).to(hidden_nd.dtype)


class FakeTraining:
    """A recipe's target and drafter without values, ready for steps.

    Compiled attention, which needs values, is replaced by `folded`, which saves as much for the backward pass.

    Args:
        recipe: Its target's config must be within reach, weights are not needed.
        args: Of the recipe's `train` section.

    Raises:
        UserError: As `load_target` and `Drafter.from_target`, or the optimiser cannot be had.
    """

    def __init__(self, recipe: Recipe, args: DrafterTrainingArguments) -> None:
        is_offline = recipe.data.features.source == "offline"
        if is_offline:
            refuse_obstacle(recipe)
        self._args, self._run = args, FakeRun()
        self._disk_dtype = getattr(torch, recipe.data.features.dtype) if is_offline else None
        self._device_type = target_device(recipe.target).type
        run, options = self._run, recipe.drafter.options
        options = {**options, "attention": "folded"} if options.get("attention") == "flex" else options
        with run.building():
            self.target = target_without_weights(recipe.target)
            self.drafter = load_drafter_class(recipe.drafter.kind).from_target(self.target, options)
        if getattr(self.target.config.get_text_config(), "num_experts_per_tok", None):
            ALL_EXPERTS_FUNCTIONS.register(ACTIVE, active_experts)
            self.target.set_experts_implementation(ACTIVE)
        if is_offline:
            drop_decoder_layers(self.target)
        self._quantised_away_bytes = saved_bytes(recipe.target, self.target)
        for kind, model in (("target", self.target), ("drafter", self.drafter)):
            run.adopt(kind, model)
            run.logits_widths |= {
                size for key, size in vars(model.config).items() if key.endswith("vocab_size") and isinstance(size, int)
            }
        for head in (self.target.get_output_embeddings(), self.drafter.borrowed_head):
            run.heads.add(head.weight.untyped_storage()._cdata)
        self.drafter.train()
        self.drafter.training_step = LATE_STEP
        enable_gradient_checkpointing(args, self.drafter)
        self.trained = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(lambda p: run.count_as("gradients", p.grad))
        try:
            optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args, self.drafter)
            self._optimizer: torch.optim.Optimizer = optimizer_class(self.trained, **settings)
        except (ImportError, ValueError, TypeError) as error:
            raise UserError(f"key `train.optim`: {' '.join(str(error).split())}") from None
        if args.optimizer == "muon":
            self._optimizer = muon_with_adamw(self._optimizer, self.drafter, args.learning_rate)
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


def arguments_of(recipe: Recipe) -> DrafterTrainingArguments:
    """Return the arguments of the recipe's training on the target's device."""
    use_cpu = target_device(recipe.target).type == "cpu"
    return training_arguments(recipe.train, RunFolder(recipe).drafter / "checkpoints", recipe.seed, use_cpu=use_cpu)


@dataclass(frozen=True)
class TrainingData:
    """The largest batch that can come and a typical one, `how` they were chosen, and all tokens (None: unknown)."""

    largest: dict[str, Tensor]
    typical: dict[str, Tensor]
    how: tuple[str, str]
    tokens: int | None
    tokens_how: str


def training_data(recipe: Recipe, batch_size: int, labelled_share: float | None = None) -> TrainingData:
    """Choose batches from the distilled tokens if there are any, packed where the recipe packs them.

    Without any, or with a `labelled_share`, they are rows of `data.max_length_tokens`.
    """
    folder, length, limit = RunFolder(recipe), recipe.data.max_length_tokens, recipe.data.conversations.limit
    tokens = load_tokens(folder, recipe.name) if (folder.data / "tokens").is_dir() else None
    tokens_how = f"the tokens of {folder.data / 'tokens'}"
    if tokens is None or labelled_share is not None:
        num_prompt = 0 if labelled_share is None else length - round(labelled_share * length)
        how = "assumed: rows of data.max_length_tokens"
        how += ", all labelled: the most there can be (--labelled-share)" if labelled_share is None else ""
        row = {"input_ids": [0] * length, "loss_mask": [0] * num_prompt + [1] * (length - num_prompt)}
        batch, total = collate_right_padded([row] * batch_size), None if limit is None else limit * length
        if tokens is not None:
            total = sum(row_lengths(tokens))
        elif limit is None:
            tokens_how = "data.conversations.limit is not set and nothing is distilled yet"
        else:
            tokens_how = "at most: data.conversations.limit x data.max_length_tokens, as nothing is distilled yet"
        return TrainingData(batch, batch, (how, how), total, tokens_how)
    tokens, _ = split_rows(tokens, recipe.data.eval_rows_frac, recipe.data.train_answer_tokens)
    lengths, labels = np.array(row_lengths(tokens)), np.array(answer_lengths(tokens))
    num_tokens = int(lengths.sum())
    rows: Dataset | PackedRows = tokens
    if recipe.data.packing:
        rows = PackedRows(tokens, length)
        lengths, labels = (np.array([each[row].sum() for row in rows.rows]) for each in (lengths, labels))
    batch_size, longest = min(batch_size, len(rows)), int(lengths.argmax())
    others = [int(row) for row in np.argsort(-labels, kind="stable") if row != longest][: batch_size - 1]
    by_length = np.argsort(lengths, kind="stable")
    spread = [int(by_length[(2 * i + 1) * len(rows) // (2 * batch_size)]) for i in range(batch_size)]
    largest, typical = (collate_right_padded([rows[row] for row in chosen]) for chosen in ([longest, *others], spread))
    where = folder.data / "tokens"
    hows = f"the longest and the most labelled rows of {where}", f"rows of all lengths of {where}"
    return TrainingData(largest, typical, hows, num_tokens, tokens_how)


@dataclass(frozen=True)
class WayOut:
    """Lines of the recipe, by key, the peak of a step with them, and whether training stays the same."""

    lines: dict[str, Any]
    peak_bytes: int

    @property
    def trains_the_same(self) -> bool:
        return "train.per_device_train_batch_size" in self.lines

    def __str__(self) -> str:
        lines = " ".join(f"{key}={'true' if value is True else value}" for key, value in self.lines.items())
        return f"{lines} ({bytes_text(self.peak_bytes)})"


def ways_out(recipe: Recipe, need_bytes: int, labelled_share: float | None = None) -> Iterator[WayOut]:
    """Yield changes of the recipe by which a step needs less than `need_bytes`, those that train the same first."""
    for lines in _changes(recipe):
        values = recipe.model_dump()
        for key, value in lines.items():
            *sections, name = key.split(".")
            section = values
            for part in sections:
                section = section[part]
            section[name] = value
        try:
            changed = Recipe.model_validate(values)
            args = arguments_of(changed)
            inputs = training_data(changed, args.per_device_train_batch_size, labelled_share).largest
            # Rows on disk may be those of the recipe as it was.
            inputs = {name: value[:, : changed.data.max_length_tokens] for name, value in inputs.items()}
            peak_bytes = FakeTraining(changed, args).step(inputs).peak[1].peak_bytes
        except (ValueError, UserError):  # no recipe, or not for this kind or this target
            continue
        if peak_bytes < WORTH_FRAC * need_bytes:
            yield WayOut(lines, peak_bytes)


def _changes(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield what could be changed, whether or not this kind of drafter has it."""
    args, options = arguments_of(recipe), recipe.drafter.options
    rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    for fewer in sorted({max(1, rows // 2), max(1, rows // 4), 1} - {rows}, reverse=True):
        if rows % fewer == 0:
            lines = {"train.per_device_train_batch_size": fewer}
            if GLOBAL_BATCH not in recipe.train:
                lines["train.gradient_accumulation_steps"] = accumulation * rows // fewer
            yield lines
    for key, value, helps in (
        ("data.max_length_tokens", recipe.data.max_length_tokens // 2, True),
        ("target.dtype", "bfloat16", recipe.target.dtype not in ("bfloat16", "float16")),
        ("train.bf16", True, not (args.bf16 or args.fp16)),
        ("data.features.source", "offline", recipe.data.features.source == "online"),
        ("drafter.options.lm_heads", "shared", options.get("lm_heads") in (None, "separate")),
        ("drafter.options.draft_vocab_size", SMALLER_VOCABULARY, options.get("draft_vocab_size") is None),
        ("drafter.options.attention", "folded", options.get("attention") == "dense"),
        ("train.optim", "adafactor", args.optim.value.startswith("adamw_torch")),
    ):
        if helps:
            yield {key: value}
