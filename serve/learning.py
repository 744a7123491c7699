"""`draftsmith serve --learn`: train the drafter on the answers that are served.

The answers of a target that serves are self-distilled data. Files under `runs/<name>/learned/`:

    answers.jsonl    the newest answers, one line each: token ids of the prompt and of the answer
    drafters/<n>/    drafters that were good enough to serve
    state.json       the number of the serving drafter, and the result of every candidate
    trainer.log      the output of training

Only their owner can read them. One server at a time learns in a folder, and one process trains in it: the trainer of a
killed server ends with the server, and the next trainer waits until it has. If the disk is full, the client still gets
its answer, which is not stored, and training is tried again later.

A separate process of lower priority trains the serving drafter further, half on the newest answers and half on older
ones and examples of the run's own data, so that these are not forgotten. The candidate is an interpolation between the
trained weights and those at the start of learning: it forgets less than the trained drafter (weight-space ensembles,
arXiv 2109.01903), which the next training continues from. It is compared with the serving drafter by replay on held-out
answers: the tau of the serving tree at T = 0. A significantly better one is saved, named in `state.json` and loaded by
the server between two answers. A significantly worse one is dropped together with the trained drafter. No drafter can
change an answer, as the target verifies every draft.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
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
from draftsmith.files import append_whole, read_json, write_atomically
from draftsmith.models.base.config import MODEL_TYPE_PREFIX
from draftsmith.models.base.registry import drafter_config, load_drafter, load_drafter_class
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

LEARNED, ANSWERS, STATE, DRAFTERS, LOG, CYCLES, TRAINER_LOCK = (
    "learned", "answers.jsonl", "state.json", "drafters", "trainer.log", "cycles", ".trainer.lock",
)  # fmt: skip
HELD_OUT_FRAC, FEWEST_HELD_OUT, MOST_HELD_OUT = 0.15, 8, 64
FEWEST_NEW_TOKENS = 1500  # new answer tokens that start another training
FIRST_CYCLE_TOKENS = 16_000  # of the first training, whose speed sets the number for the next one
SHORTEST_ROW_TOKENS = 16
BEGINNING_FRAC = 0.25  # share of the weights at the start of learning in a candidate, against forgetting
CANDIDATE = "candidate"
LOWEST_PRIORITY = 19
LOOKS_EVERY_S = 2.0
TRIES_AGAIN_AFTER_S = 60.0  # after an error of the system, such as a full disk
OWNER_ALONE, OWNERS_FOLDER = 0o600, 0o700
TRAINING: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 1,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "learning_rate": 5e-4,
    "save_strategy": "no",
    "logging_steps": 5,
    "report_to": [],
}
logger = logging.getLogger(__name__)
ROWS_OF_A_STEP = TRAINING["per_device_train_batch_size"] * TRAINING["gradient_accumulation_steps"]


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

    def row(self) -> Row:
        """Return the training example, with loss on the answer."""
        return {"input_ids": self.input_ids, "loss_mask": [0] * len(self.prompt_ids) + [1] * len(self.ids)}


@dataclass(frozen=True)
class CandidateResult:
    """Comparison of a candidate with the serving drafter on the held-out answers.

    at: Unix time. answers: number of held-out answers. serving, candidate: tau of the two drafters. low, high: 95 %
    interval of the ratio of both. number: folder of the candidate under `drafters/`; None if it was not adopted.
    """

    at: float
    answers: int
    trained_tokens: int
    serving: float
    candidate: float
    low: float
    high: float
    number: int | None = None

    def sentence(self) -> str:
        """Return the comparison in one line."""
        decision = (
            "dropped" if self.high < 1 else "trained further" if self.number is None else f"serves as {self.number}"
        )
        return (
            f"candidate: tau {self.serving:.2f} -> {self.candidate:.2f} ({self.low:.2f}x to {self.high:.2f}x) on "
            f"{self.answers} held-out answers: {decision}"
        )


@dataclass
class State:
    """Content of `state.json`.

    begun_with: hash of the weights at the start of learning. current: number of the serving drafter, 0 for that at the
    start. weighed: all candidates so far.
    """

    begun_with: str
    current: int = 0
    weighed: list[CandidateResult] = field(default_factory=list)


class Learned:
    """Folder `learned/` of a run: its answers, drafters and state.

    Args:
        recipe: The recipe that is served; its first method drafts.
        kept_answers: Number of the newest answers that stay on disk.

    Raises:
        UserError: The folder was started with another drafter than the recipe's, or its state is damaged.
    """

    def __init__(self, recipe: Recipe, kept_answers: int) -> None:
        self.recipe, self.kept_answers = recipe, kept_answers
        self.folder = RunFolder(recipe).root / LEARNED
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):  # the folder belongs to another user, who shares it
            self.folder.chmod(OWNERS_FOLDER)
        self.file = self.folder / ANSWERS
        self.file.touch(OWNER_ALONE)
        (self.begun_with,) = drafter_folders(recipe)
        self.process: Any = None  # the training process, once it was started
        self._added = 0  # answers by this process
        weights = " ".join(weights_sha256(self.begun_with).values())
        if not (self.folder / STATE).is_file():
            self.write(State(weights))
        if self.state.begun_with != weights:
            raise UserError(
                f"{self.folder} was trained from other weights than those in {self.begun_with}: restore those weights, "
                "or delete the folder to learn from scratch"
            )
        self._current = self.state.current

    @property
    def state(self) -> State:
        """Read the current state from `state.json`.

        Raises:
            UserError: The file is damaged.
        """
        return read_json(self.folder / STATE, State, f"delete {self.folder} to learn from scratch")

    def write(self, state: State) -> None:
        write_atomically(self.folder / STATE, json.dumps(asdict(state), indent=1) + "\n")

    def drafter(self, number: int) -> Path:
        """Return a drafter's folder by its number."""
        return self.folder / DRAFTERS / str(number) if number else self.begun_with

    def serving(self) -> Path:
        """Return the folder of the serving drafter."""
        return self.drafter(self.state.current)

    def newer(self) -> Path | None:
        """Return the serving drafter's folder if it has changed since the last call, else None.

        Logs, once, if the training process has ended.
        """
        if self.process is not None and not self.process.is_alive():
            self.process = None
            logger.warning(
                "the process that trains the drafter has ended, see %s; the server continues without it",
                self.folder / LOG,
            )
        before, self._current = self._current, self.state.current
        return None if self._current == before else self.serving()

    def add(self, finished: CompletedAnswer) -> None:
        """Append an answer to the file and sync it to disk; removes the oldest answers now and then.

        Raises:
            OSError: The disk is full; the earlier lines are left as they were.
        """
        if self._added % self.kept_answers == 0:  # first of all a line that a killed server left half-written
            kept = self._stored()[-self.kept_answers :]
            write_atomically(self.file, "".join(answer.model_dump_json() + "\n" for answer in kept))
            self.file.chmod(OWNER_ALONE)
        answer = Answer(prompt_ids=tuple(finished.prompt_ids), ids=tuple(finished.record.ids))
        append_whole(self.file, answer.model_dump_json().encode() + b"\n")
        self._added += 1

    def answers(self) -> list[Answer]:
        """Read the newest answers that are long enough for training, without duplicates, the oldest first."""
        stored = dict.fromkeys(self._stored())
        long_enough = [
            answer for answer in stored if len(answer.ids) > 1 and len(answer.input_ids) >= SHORTEST_ROW_TOKENS
        ]
        return long_enough[-self.kept_answers :]

    def _stored(self) -> list[Answer]:
        """Read the answers; logs the number of damaged lines, which are left out."""
        lines, answers = self.file.read_bytes().splitlines(), []
        for line in lines:
            with suppress(ValidationError):
                answers.append(Answer.model_validate_json(line))
        if damaged := len(lines) - len(answers):
            logger.warning("%s: %s damaged lines are left out", self.file, damaged)
        return answers


def start_learning(learned: Learned, minutes: float) -> None:
    """Start the training process, which ends with the calling process and evaluates a candidate after `minutes`."""
    process = get_context("spawn").Process(target=_learn, args=(learned, minutes), daemon=True)
    process.start()
    learned.process = process


def _learn(learned: Learned, minutes: float) -> None:
    """Train in cycles, as the training process of `serve --learn`."""
    end_with_parent()
    if hasattr(os, "SCHED_IDLE"):
        # Niceness alone would still make the server's threads wait for a slice whenever they wake.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(LOWEST_PRIORITY)
    with (
        FileLock(learned.folder / TRAINER_LOCK),  # the trainer of a killed server may still be ending
        (learned.folder / LOG).open("a", encoding="utf-8", buffering=1) as log,
        redirect_stdout(log),
        redirect_stderr(log),
        suppress(KeyboardInterrupt),
    ):
        learner = Learner(learned, minutes)
        while True:
            time.sleep(cycle_or_pause_s(learner))


def cycle_or_pause_s(learner: Learner) -> float:
    """Train and evaluate a candidate if there are new answers. Returns the seconds to wait before the next call.

    An error of the system, such as a full disk, is written to `trainer.log`, and training is tried again.
    """
    try:
        weighed = learner.cycle()
    except Exception as error:
        sentence, pause_s = os_error_message(error), TRIES_AGAIN_AFTER_S
        if sentence is None:
            raise
        learner.seen_bytes = -1  # read the answers again even if the file has not changed
    else:
        if weighed is None:
            return LOOKS_EVERY_S
        sentence, pause_s = weighed.sentence(), 0.0
    with suppress(OSError):  # the log is on the same disk
        print(sentence)
    return pause_s


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
        self.drafter = recipe_of_drafter(learned.begun_with)
        self.cycle_tokens = FIRST_CYCLE_TOKENS
        self.trained = set[Answer]()  # those that the last training could choose from
        self.seen_bytes = -1  # size of `answers.jsonl` at the last cycle
        self.trainee: Path | None = None  # the drafter trained last, unless its candidate was worse
        shutil.rmtree(learned.folder / CYCLES, ignore_errors=True)

    def cycle(self) -> CandidateResult | None:
        """Train and evaluate a candidate; None if there are too few new or too few held-out answers."""
        if (size := self.learned.file.stat().st_size) == self.seen_bytes:
            return None
        self.seen_bytes = size
        answers, state = self.learned.answers(), self.learned.state
        held_out = [answer for answer in answers if answer.is_held_out][-MOST_HELD_OUT:]
        train = [answer for answer in answers if not answer.is_held_out]
        new = [answer for answer in train if answer not in self.trained]
        if len(held_out) < FEWEST_HELD_OUT or sum(len(answer.ids) for answer in new) < FEWEST_NEW_TOKENS:
            return None
        serving = self.learned.drafter(state.current)
        chosen = self._chosen(train, state.weighed)
        begin_s = time.monotonic()
        trainee = self._train(self.trainee or serving, chosen, len(state.weighed))
        candidate = self._candidate(trainee)
        trained = sum(len(row["input_ids"]) for row in chosen)
        pace = trained / max(time.monotonic() - begin_s, 1e-9)
        self.cycle_tokens = max(FIRST_CYCLE_TOKENS // 2, round(60 * self.minutes * pace))
        before, after = (self.measure(folder, held_out) for folder in (serving, candidate))
        ends = paired_ratio(tau, after, before)
        assert ends is not None  # `FEWEST_HELD_OUT` are enough
        (low, high), number = ends, None
        if low > 1:
            number = 1 + max((each.number or 0 for each in state.weighed), default=0)
            place = self.learned.drafter(number)
            place.parent.mkdir(exist_ok=True)
            shutil.rmtree(place, ignore_errors=True)  # left by a process that was killed before it wrote the state
            candidate.rename(place)
            state.current = number
        self.trainee = None if high < 1 else trainee
        taus = compute_ratio(tau, before), compute_ratio(tau, after)
        weighed = CandidateResult(time.time(), len(held_out), trained, *taus, low, high, number)
        state.weighed.append(weighed)
        self.learned.write(state)
        self.trained = set(train)
        return weighed

    def _chosen(self, train: Sequence[Answer], weighed: Sequence[CandidateResult]) -> list[Row]:
        """Choose a cycle's training examples: half the tokens newest answers, half older ones and run data."""
        generator = random.Random(len(weighed))
        rows = [answer.row() for answer in train]
        newest = _pop_rows(rows, self.cycle_tokens // 2)
        run = RunFolder(self.learned.recipe)
        if (run.data / "tokens").is_dir():
            tokens = load_tokens(run).select_columns(["input_ids", "loss_mask"])
            rows += tokens.select(generator.sample(range(len(tokens)), min(len(tokens), len(newest)))).to_list()
        generator.shuffle(rows)
        return newest + _pop_rows(rows, self.cycle_tokens // 2)

    def _train(self, begun_from: Path, rows: list[Row], number: int) -> Path:
        """Train a drafter from the weights in `begun_from`. Returns its folder."""
        cycles = self.learned.folder / CYCLES
        recipe = Recipe.model_validate(
            {
                "name": f"{number}",
                "runs_dir": str(cycles),
                "seed": number,
                "target": self.training_target.model_dump(),
                "drafter": self.drafter | {"init": str(begun_from)},
                "train": TRAINING | {"max_steps": max(1, len(rows) // ROWS_OF_A_STEP)},
            }
        )
        run = RunFolder(recipe)
        shutil.rmtree(run.root, ignore_errors=True)
        run.data.mkdir(parents=True)
        Dataset.from_list(rows).save_to_disk(run.data / "tokens")
        train_drafter(recipe)
        for old in cycles.iterdir():
            if old.name != recipe.name and old / "drafter" != begun_from:
                shutil.rmtree(old, ignore_errors=True)
        return run.drafter

    def _candidate(self, trained: Path) -> Path:
        """Write the candidate, between the trained weights and those at the start of learning. Returns its folder."""
        candidate = trained.with_name(CANDIDATE)
        shutil.rmtree(candidate, ignore_errors=True)
        shutil.copytree(trained, candidate, ignore=shutil.ignore_patterns("checkpoints"))
        interpolate_weights(self.learned.begun_with, candidate, BEGINNING_FRAC)
        return candidate

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
def interpolate_weights(begun_with: Path, folder: Path, frac: float) -> None:
    """Interpolate a drafter's weights towards those at the start of learning, in place (arXiv 2109.01903).

    Args:
        begun_with: Folder of the drafter at the start of learning.
        folder: Folder of the drafter that is changed.
        frac: Weight of the start: 0 changes nothing, 1 restores it.
    """
    file = folder / SAFE_WEIGHTS_NAME
    earlier, weights = (load_file(each / SAFE_WEIGHTS_NAME) for each in (begun_with, folder))
    for name, value in weights.items():
        begun = earlier.get(name)
        if begun is not None and value.is_floating_point() and begun.shape == value.shape:
            value.copy_(value.float().lerp(begun.float(), frac))
    save_file(weights, file, metadata={"format": "pt"})
    training = json.loads((folder / TRAINING_FILE).read_text())
    write_atomically(folder / TRAINING_FILE, json.dumps(training | {"weights_sha256": weights_sha256(folder)}) + "\n")


def _pop_rows(rows: list[Row], tokens: int) -> list[Row]:
    """Remove examples from the end of `rows` until they have at least `tokens` tokens; returns them, the last first."""
    popped: list[Row] = []
    while rows and tokens > 0:
        popped.append(rows.pop())
        tokens -= len(popped[-1]["input_ids"])
    return popped


def recipe_of_drafter(folder: Path) -> dict[str, Any]:
    """Return the `drafter` section of a recipe that trains a drafter like the one in this folder while it serves."""
    config = drafter_config(folder)
    kind = str(config["model_type"]).removeprefix(MODEL_TYPE_PREFIX)
    options = load_drafter_class(kind).config_class.Options
    chosen = {key: config[key] for key in options.model_fields if config.get(key) is not None}
    return {"kind": kind, "options": chosen | options.while_serving}
