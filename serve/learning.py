"""`draftsmith serve --learn`: train the drafter on the answers that are served.

The answers of a target that serves are self-distilled data. Files under `runs/<name>/learned/`:

    answers.jsonl    the newest answers, one line each: token ids of the prompt and of the answer
    first_drafter    hash of the weights that learning started with, the first drafter's
    drafters/<n>/    drafters that were good enough to serve; the newest one serves
    training/        files of the current training
    trainer.log      the output of training, and the comparison of every candidate

Only their owner can enter the folder. One server at a time learns in it, and one process trains in it: the trainer of a
killed server ends with the server, and the next trainer waits until it has. If the disk is full, the client still gets
its answer, which is not stored, and training is tried again after further answers.

A separate process of lower priority trains the serving drafter further, half on the newest answers and half on older
ones and examples of the run's own data, so that these are not forgotten. The candidate is an interpolation between the
trained weights and the first ones: it forgets less than the trained drafter (weight-space ensembles, arXiv 2109.01903),
which the next training continues from. It is compared with the serving drafter by replay on held-out answers: the tau
of the serving tree at T = 0. A significantly better one moves to `drafters/`, and the server loads it between two
answers. A significantly worse one is dropped together with the trained drafter. No drafter can change an answer, as the
target verifies every draft.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from filelock import FileLock
from pydantic import BaseModel, NonNegativeInt, ValidationError
from safetensors.torch import load_file, save_file
from transformers.utils import SAFE_WEIGHTS_NAME

from draftsmith.data.distill.token_dataset import load_tokens
from draftsmith.errors import UserError, os_error_message
from draftsmith.eval.bench.measured_methods import drafter_folders
from draftsmith.eval.bench.replay import accepted_lengths
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.eval.report.bootstrap import QuestionSums, compute_ratio, paired_ratio, tau
from draftsmith.files import append_whole, write_atomically
from draftsmith.models.base.registry import check_as_trained, load_drafter
from draftsmith.models.kernels.cpu_kernels import pack_linears
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import load_target, target_device
from draftsmith.models.weights import weights_sha256
from draftsmith.parent import end_with_parent
from draftsmith.recipes.run_folder import TRAINING_FILE, RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.serve.worker import CompletedAnswer
from draftsmith.train.drafter.stage import train_drafter

HELD_OUT_FRAC, FEWEST_HELD_OUT, MOST_HELD_OUT = 0.15, 8, 64
FEWEST_NEW_TOKENS = 1500  # new answer tokens that start another training
FIRST_CYCLE_TOKENS = 16_000  # of the first training, whose speed sets the number for the next one
SHORTEST_ROW_TOKENS = 16
FIRST_FRAC = 0.25  # share of the first drafter's weights in a candidate, against forgetting
LOOKS_EVERY_S = 2.0
TRAINING: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 1,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "learning_rate": 5e-4,
    "save_strategy": "no",
    "logging_steps": 5,
}
logger = logging.getLogger(__name__)

Row = dict[str, list[int]]  # `input_ids` and `loss_mask` of a training example


class Answer(BaseModel, frozen=True):
    """Token ids of a prompt and of its answer, a line of `answers.jsonl`."""

    prompt_ids: tuple[NonNegativeInt, ...]
    ids: tuple[NonNegativeInt, ...]

    @property
    def is_held_out(self) -> bool:
        """Return whether the answer is held out from training; depends on its tokens only, so it never changes."""
        digest = hashlib.sha256(self.model_dump_json().encode()).digest()
        return int.from_bytes(digest[:4], "big") / 2**32 < HELD_OUT_FRAC

    @property
    def input_ids(self) -> list[int]:
        """Return all token ids, the prompt's first."""
        return [*self.prompt_ids, *self.ids]


class Learned:
    """Folder `learned/` of a run: its answers and drafters.

    Args:
        recipe: The recipe that is served; its first method drafts.
        kept_answers: Number of the newest answers that stay on disk.

    Raises:
        UserError: The recipe's drafter is not trained, or the folder was started with another one.
    """

    def __init__(self, recipe: Recipe, kept_answers: int) -> None:
        self.recipe, self.kept_answers = recipe, kept_answers
        self.folder = RunFolder(recipe).root / "learned"
        self.file, self.log = self.folder / "answers.jsonl", self.folder / "trainer.log"
        self.drafters = self.folder / "drafters"
        (self.first,) = drafter_folders(recipe)
        check_as_trained(self.first)
        self.drafters.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)  # which nobody else can enter, whatever the modes of its files
        self.file.touch()
        weights, started = " ".join(weights_sha256(self.first).values()), self.folder / "first_drafter"
        if not started.is_file():
            write_atomically(started, weights)
        if started.read_bytes() != weights.encode():
            raise UserError(
                f"{self.folder} was trained from other weights than those in {self.first}: restore those weights, or "
                "delete the folder to learn from scratch"
            )
        self._serving = self.serving()
        self._added = 0  # answers by this process
        self.process: Any = None  # the training process, once it was started

    def newest(self) -> int:
        """Return the number of the newest drafter that was good enough to serve, 0 if there is none."""
        return max((int(each.name) for each in self.drafters.iterdir() if each.name.isdecimal()), default=0)

    def serving(self) -> Path:
        """Return the folder of the serving drafter: the newest one, or the one that learning started with."""
        number = self.newest()
        return self.drafters / str(number) if number else self.first

    def newer(self) -> Path | None:
        """Return the serving drafter's folder if it has changed since the last call, else None.

        Logs, once, if the training process has ended.
        """
        if self.process is not None and not self.process.is_alive():
            self.process = None
            logger.warning(
                "the process that trains the drafter has ended, see %s; the server continues without it", self.log
            )
        before, self._serving = self._serving, self.serving()
        return None if self._serving == before else self._serving

    def add(self, finished: CompletedAnswer) -> None:
        """Append an answer to the file and sync it to disk; removes the oldest answers now and then.

        Raises:
            OSError: The disk is full; the earlier lines are left as they were.
        """
        if self._added % self.kept_answers == 0:  # first of all a line that a killed server left half-written
            kept = self._stored()[-self.kept_answers :]
            write_atomically(self.file, "".join(answer.model_dump_json() + "\n" for answer in kept))
        answer = Answer(prompt_ids=tuple(finished.prompt_ids), ids=tuple(finished.record.ids))
        append_whole(self.file, answer.model_dump_json().encode() + b"\n")
        self._added += 1

    def answers(self) -> list[Answer]:
        """Read the newest answers that are long enough for training, without duplicates, the oldest first."""
        stored = dict.fromkeys(self._stored())
        long_enough = [each for each in stored if len(each.ids) > 1 and len(each.input_ids) >= SHORTEST_ROW_TOKENS]
        return long_enough[-self.kept_answers :]

    def _stored(self) -> list[Answer]:
        """Read the answers; lines that a killed server left half-written are left out."""
        answers = []
        for line in self.file.read_bytes().splitlines():
            with suppress(ValidationError):
                answers.append(Answer.model_validate_json(line))
        return answers


def start_learning(learned: Learned, minutes: float) -> None:
    """Start the training process, which ends with the calling process and evaluates a candidate after `minutes`."""
    process = get_context("spawn").Process(target=_learn, args=(learned, minutes), daemon=True)
    process.start()
    learned.process = process


def _learn(learned: Learned, minutes: float) -> None:
    """Train and compare candidates, as the training process of `serve --learn`."""
    end_with_parent()
    if hasattr(os, "SCHED_IDLE"):
        # Niceness alone would still make the server's threads wait for a slice whenever they wake.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)
    # Until the process ends, so that the traceback of an error is in the log too.
    sys.stdout = sys.stderr = learned.log.open("a", encoding="utf-8", buffering=1)
    with FileLock(learned.folder / ".trainer.lock"), suppress(KeyboardInterrupt):
        learner = Learner(learned, minutes)
        while True:
            try:
                sentence = learner.cycle()
            except Exception as error:
                sentence = os_error_message(error)
                if sentence is None:
                    raise
            if sentence is not None:
                with suppress(OSError):  # of a full disk, which the log is on too
                    print(sentence)
            time.sleep(LOOKS_EVERY_S)


class Learner:
    """Trainer of new drafters (candidates) on the served answers, for about `minutes` each, and judge of them."""

    def __init__(self, learned: Learned, minutes: float) -> None:
        self.learned, self.minutes = learned, minutes
        recipe = learned.recipe
        # AdamW's updates are below bf16's resolution: train in fp32, evaluate in the dtype that serves.
        on_cpu = target_device(recipe.target).type == "cpu"
        self.training_target = recipe.target.model_copy(update={"dtype": "float32"} if on_cpu else {})
        self.target, _ = load_target(recipe.target)
        pack_linears(self.target)  # as in the server
        self.method = recipe.eval.methods[0].model_copy(update={"lookup": False})  # trees of the drafter alone
        config = load_drafter(learned.first, self.target).config
        options = config.options.model_dump(mode="json", exclude_none=True) | config.Options.while_serving
        self.drafter = {"kind": config.kind, "options": options}
        self.cycle_tokens = FIRST_CYCLE_TOKENS
        self.trained = set[Answer]()  # those that the last training could choose from
        self.seen_ns = 0  # when `answers.jsonl` had last changed at the last cycle
        self.random = random.Random(0)
        self.folder = learned.folder / "training"
        self.trainee = self.folder / "trainee"  # the drafter trained last, unless its candidate was worse
        shutil.rmtree(self.folder, ignore_errors=True)

    def cycle(self) -> str | None:
        """Train a candidate, compare it with the serving drafter and decide.

        Returns the comparison in one line; None if there are too few new or too few held-out answers. If it fails, it
        is tried again once there are further answers.
        """
        changed_ns = self.learned.file.stat().st_mtime_ns
        if changed_ns == self.seen_ns:
            return None
        self.seen_ns = changed_ns
        answers = self.learned.answers()
        held_out = [answer for answer in answers if answer.is_held_out][-MOST_HELD_OUT:]
        train = [answer for answer in answers if not answer.is_held_out]
        new_tokens = sum(len(answer.ids) for answer in train if answer not in self.trained)
        if len(held_out) < FEWEST_HELD_OUT or new_tokens < FEWEST_NEW_TOKENS:
            return None
        serving, candidate = self.learned.serving(), self.folder / "candidate"
        trained = self._train(self.trainee if self.trainee.is_dir() else serving, self._chosen(train))
        interpolate_weights(self.learned.first, trained, candidate)
        before, after = (self.measure(folder, held_out) for folder in (serving, candidate))
        ends = paired_ratio(tau, after, before)
        assert ends is not None  # `FEWEST_HELD_OUT` are enough
        low, high = ends
        shutil.rmtree(self.trainee, ignore_errors=True)
        decision = "dropped"
        if high >= 1:
            trained.rename(self.trainee)
            decision = "trained further"
        if low > 1:
            number = self.learned.newest() + 1
            candidate.rename(self.learned.drafters / str(number))
            decision = f"serves as {number}"
        self.trained = set(train)
        return (
            f"candidate: tau {compute_ratio(tau, before):.2f} -> {compute_ratio(tau, after):.2f} ({low:.2f}x to "
            f"{high:.2f}x) on {len(held_out)} held-out answers: {decision}"
        )

    def _chosen(self, train: Sequence[Answer]) -> list[Row]:
        """Choose a cycle's training examples: half the tokens newest answers, half older ones and run data."""
        rows = [
            {"input_ids": each.input_ids, "loss_mask": [0] * len(each.prompt_ids) + [1] * len(each.ids)}
            for each in train
        ]
        newest = _pop_rows(rows, self.cycle_tokens // 2)
        run = RunFolder(self.learned.recipe)
        if (run.data / "tokens").is_dir():
            tokens = load_tokens(run).select_columns(["input_ids", "loss_mask"])
            rows += tokens.select(self.random.sample(range(len(tokens)), min(len(tokens), len(newest)))).to_list()
        self.random.shuffle(rows)
        return newest + _pop_rows(rows, self.cycle_tokens // 2)

    def _train(self, init: Path, rows: list[Row]) -> Path:
        """Train a drafter from the weights in `init`, and measure the pace. Returns its folder."""
        recipe = Recipe.model_validate(
            {
                "name": "trained",
                "runs_dir": str(self.folder),
                "target": self.training_target.model_dump(),
                "drafter": self.drafter | {"init": str(init)},
                "train": TRAINING,
            }
        )
        run = RunFolder(recipe)
        shutil.rmtree(run.root, ignore_errors=True)
        run.data.mkdir(parents=True)
        Dataset.from_list(rows).save_to_disk(run.data / "tokens")
        begin_s = time.monotonic()
        train_drafter(recipe)
        pace = sum(len(row["input_ids"]) for row in rows) / (time.monotonic() - begin_s)
        self.cycle_tokens = max(FIRST_CYCLE_TOKENS // 2, round(60 * self.minutes * pace))
        return run.drafter

    def measure(self, folder: Path, answers: Sequence[Answer]) -> QuestionSums:
        """Return the tokens and rounds of each answer, and its rounds as its time, with the drafter in `folder`."""
        drafter = load_drafter(folder, self.target)
        decoder = drafter.decoder(max(len(answer.input_ids) for answer in answers) + drafter.config.num_depths + 1)
        method = build_tree_drafter(self.method, decoder, Sampling())
        rounds = []
        for answer in answers:
            ids, first = answer.input_ids, len(answer.prompt_ids)
            ids_1s = torch.tensor([ids], device=self.target.device)
            features_sf = target_features(self.target, ids_1s, layers=drafter.feature_layers)[0]
            rounds.append(len(accepted_lengths(method, ids, features_sf, first, len(ids) - 1)))
        rounds_q, tokens_q = np.array(rounds, float), np.array([len(answer.ids) - 1 for answer in answers], float)
        return QuestionSums(tokens_q, rounds_q, tokens_q, rounds_q, tokens_q, tokens_q)


@torch.no_grad()
def interpolate_weights(first: Path, trained: Path, candidate: Path) -> None:
    """Write a drafter whose weights lie between the first ones and the trained ones (arXiv 2109.01903).

    Args:
        first: Folder of the drafter that learning started with.
        trained: Folder of the drafter that was trained from it.
        candidate: Folder to write; what it holds is replaced.
    """
    shutil.rmtree(candidate, ignore_errors=True)
    shutil.copytree(trained, candidate)
    earlier, weights = (load_file(folder / SAFE_WEIGHTS_NAME) for folder in (first, trained))
    for name, value in weights.items():
        if value.is_floating_point():  # else it maps a draft vocabulary
            value.copy_(value.float().lerp(earlier[name].float(), FIRST_FRAC))
    save_file(weights, candidate / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    training = json.loads((trained / TRAINING_FILE).read_text())
    hashes = {"weights_sha256": weights_sha256(candidate)}
    write_atomically(candidate / TRAINING_FILE, json.dumps(training | hashes) + "\n")


def _pop_rows(rows: list[Row], tokens: int) -> list[Row]:
    """Remove examples from the end of `rows` until they have at least `tokens` tokens; returns them, the last first."""
    popped: list[Row] = []
    while rows and tokens > 0:
        popped.append(rows.pop())
        tokens -= len(popped[-1]["input_ids"])
    return popped
