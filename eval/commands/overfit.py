"""`draftsmith doctor --overfit`: train a new drafter on one answer, which it must then draft without a mistake.

A drafter that is wired correctly learns one conversation by heart in about a minute. One whose labels, features or
positions are off does not, or drafts something else than it was trained on; more data would not help it. So a failure
means a mistake in the code or a wrong learning rate, and a pass that a low tau after training is for want of data.

The answer is the target's own greedy one, as only that can be drafted whole: a sampled token is none of the target's
most likely. The drafter is saved to a temporary folder and loaded as for measuring.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl

from draftsmith.data.distill.limits import ITS_TOKENIZER
from draftsmith.data.sources.mixture import load_conversations
from draftsmith.data.tokens.chat_tokens import TokenizedConversation, prompt_token_ids
from draftsmith.errors import UserError
from draftsmith.eval.bench.replay import accepted_lengths
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter, load_drafter_class
from draftsmith.models.decoding.decoders import StepwiseDecoder
from draftsmith.models.loss import loss_weights
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import session_tokens
from draftsmith.recipes.schema import MethodConfig, Recipe
from draftsmith.train.drafter.shown import by_depth
from draftsmith.train.drafter.trainer import DrafterTrainer
from draftsmith.train.drafter.training_arguments import training_arguments

STEPS, LOOKED_EVERY_STEPS = 200, 10
ANSWER_TOKENS, MOST_PROMPT_TOKENS = 96, 256
LOWEST_LEARNING_RATE = 1e-3  # a recipe's own may be too low for so few steps
LEARNED_FRAC, LEARNED_LOGS = 0.985, 5  # share of correct labels at every depth, in this number of consecutive logs
REACHED_FRAC = 0.9  # share of the bound: a near tie of the target may cost one or two rounds, a mistake costs most
CE_SHARE = 0.3  # low enough that a teacher with other tokens still dominates
CHAIN = MethodConfig(name="chain")
# Keys of `train:` that say how a step is computed; those of schedules, batches and files do not fit a single example.
STEP_KEYS = (
    "optim", "optimizer", "muon_learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16",
    "fp16", "gradient_checkpointing",
)  # fmt: skip


@dataclass(frozen=True)
class Overfit:
    """Result of `overfit`.

    loss, accuracy: of the last training steps; the accuracy is that of the depth with the lowest. tau: of the trained
    chain on the answer. bound: tau of a chain of `depth` draft tokens whose tokens are all accepted.
    """

    loss: float
    accuracy: float
    tau: float
    bound: float
    depth: int
    answer_tokens: int
    steps: int
    seconds: float

    def sentence(self, kind: str) -> str:
        """Return the verdict in one sentence, with its figures and, of a failure, with its cause."""
        figures = (
            f"tau {self.tau:.2f} of {self.bound:.2f} after {self.steps} steps on one answer of {self.answer_tokens} "
            f"tokens (loss {self.loss:.3g}, {self.accuracy:.0%} of the labels right, {self.seconds:.0f} s)"
        )
        if self.is_reached:
            return f"{kind} learns one answer by heart: {figures}"
        if self.accuracy >= LEARNED_FRAC:
            return (
                f"{kind} drafts something else than it was trained on: {figures}; compare the labels, features and "
                f"positions of training with those of its decoder (models/drafters/{kind}.py, "
                "models/decoding/decoders.py)"
            )
        return (
            f"{kind} cannot learn even one answer: {figures}; check train.learning_rate and drafter.options, then the "
            f"labels and features that models/drafters/{kind}.py is trained on"
        )

    @property
    def is_reached(self) -> bool:
        return self.tau >= REACHED_FRAC * self.bound


def overfit(
    recipe: Recipe, target: PreTrainedModel, tokenizer: Any, rows: list[TokenizedConversation]
) -> Overfit | None:
    """Train the recipe's drafter on one answer of the target, then draft this answer. Writes nothing into the run.

    Args:
        target: The drafter's target, in the dtype of training.
        rows: Examples; the first one gives the prompt. Without examples the recipe's first conversation does.

    Returns:
        None if this kind of drafter trains no layers, so that it could not learn an answer by heart.

    Raises:
        UserError: An option is wrong, there is no prompt for this target, or the loss is not finite.
    """
    began_s = time.perf_counter()
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices), tempfile.TemporaryDirectory(prefix="draftsmith-overfit-") as name:
        torch.manual_seed(recipe.seed)
        folder, drafter_class = Path(name), load_drafter_class(recipe.drafter.kind)
        drafter = drafter_class.from_target(target, _options(recipe, drafter_class, target))
        if not any(isinstance(module, nn.Linear) for module in drafter.modules()):
            return None
        ids, first = _conversation(recipe, target, tokenizer, rows)
        dataset = Dataset.from_list([{"input_ids": ids, "loss_mask": [0] * first + [1] * (len(ids) - first)}])
        drafter.vocab.prepare(dataset)
        trainer = _train(recipe, target, drafter, dataset, folder)
        drafter.save_pretrained(folder)
        trained = load_drafter(folder, target)
        decoder = trained.decoder(len(ids) + trained.config.num_depths)
        depth = decoder.num_depths if isinstance(decoder, StepwiseDecoder) else trained.config.num_depths
        ids_1s = torch.tensor([ids], device=target.device)
        features_sf = target_features(target, ids_1s, layers=trained.feature_layers)[0]
        chain = build_tree_drafter(CHAIN, decoder, Sampling())
        lengths = accepted_lengths(chain, ids, features_sf, first, len(ids) - 1)
    logs = next(log for log in reversed(trainer.state.log_history) if "loss" in log)
    tokens = sum(lengths)
    return Overfit(
        loss=logs["loss"],
        accuracy=_lowest_accuracy(logs),
        tau=tokens / len(lengths),
        bound=tokens / -(-tokens // (depth + 1)),
        depth=depth,
        answer_tokens=len(ids) - first,
        steps=trainer.state.global_step,
        seconds=time.perf_counter() - began_s,
    )


def _options(recipe: Recipe, drafter_class: type[Drafter], target: PreTrainedModel) -> dict[str, Any]:
    """Return the recipe's options with a share of `ce` in the loss, which decides between near ties of the target."""
    options = recipe.drafter.options
    weights = loss_weights(drafter_class.make_config(target, options).loss)
    return {**options, "loss": {**weights, "ce": max(weights.get("ce", 0.0), CE_SHARE * sum(weights.values()))}}


def _conversation(
    recipe: Recipe, target: PreTrainedModel, tokenizer: Any, rows: list[TokenizedConversation]
) -> tuple[list[int], int]:
    """Return a prompt of the recipe's data with the target's greedy answer, and the answer's first place.

    The answer continues after its end token, so that its length does not depend on the prompt.
    """
    row = next((row for row in rows if any(row.loss_mask) and not row.loss_mask[0]), None)
    if row is not None:
        ids = row.input_ids[: row.loss_mask.index(1)]
    else:
        turns = next(load_conversations(recipe, tokenizer=tokenizer)).turns
        ids = prompt_token_ids(tokenizer, list(takewhile(lambda turn: turn.role != "assistant", turns)))
    if max(ids) >= (size := target.get_input_embeddings().weight.shape[0]):
        raise UserError(f"a prompt has token {max(ids)}, outside the target's vocabulary of {size:,}: {ITS_TOKENIZER}")
    length = session_tokens(target, MOST_PROMPT_TOKENS + ANSWER_TOKENS)
    answer_tokens = min(ANSWER_TOKENS, length // 2)
    prompt_ids = ids[-(length - answer_tokens) :]
    with TargetSession(target, length) as session:
        answer = generate(session, Autoregressive(), prompt_ids, Sampling(), answer_tokens).ids
    return [*prompt_ids, *answer], len(prompt_ids)


def _train(recipe: Recipe, target: PreTrainedModel, drafter: Drafter, dataset: Dataset, folder: Path) -> DrafterTrainer:
    """Train until the labels are predicted, or for `STEPS` steps."""
    values = {key: recipe.train[key] for key in STEP_KEYS if key in recipe.train} | {
        "learning_rate": max(LOWEST_LEARNING_RATE, float(recipe.train.get("learning_rate", 0))),
        "lr_scheduler_type": "linear",
        "warmup_steps": LOOKED_EVERY_STEPS,
        "per_device_train_batch_size": 1,
        "max_steps": STEPS,
        "logging_steps": LOOKED_EVERY_STEPS,
        "save_strategy": "no",
    }
    args = training_arguments(values, folder / "checkpoints", recipe.seed, use_cpu=target.device.type == "cpu")
    trainer = DrafterTrainer(drafter, target, args, dataset)
    trainer.add_callback(StopWhenLearned())
    try:
        trainer.train()
    finally:
        trainer.shown.stop()
    return trainer


class StopWhenLearned(TrainerCallback):
    """Callback that ends the training when `LEARNED_LOGS` logs in a row have `LEARNED_FRAC` of the labels right."""

    def __init__(self) -> None:
        self._learned_logs = 0

    def on_log(self, args: Any, state: Any, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self._learned_logs = self._learned_logs + 1 if _lowest_accuracy(logs) >= LEARNED_FRAC else 0
            control.should_training_stop |= self._learned_logs == LEARNED_LOGS


def _lowest_accuracy(logs: dict[str, float]) -> float:
    return min(accuracy for _, accuracy in by_depth(logs, "accuracy_depth"))
