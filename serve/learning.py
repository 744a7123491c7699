"""`draftsmith serve --learn`: train the drafter on the answers that are served.

The answers that a target gives to clients are self-distilled training data. Files under `runs/<name>/learned/`:

    answers.jsonl    the newest answers, one line each: token ids of the prompt and of the answer
    drafters/<n>/    drafters that were good enough to serve
    state.json       the number of the serving drafter, and the result of every candidate
    trainer.log      the output of training

Only the files' owner can read them. One server at a time uses a folder, and one process trains in it: the trainer of a
killed server ends with the server, and the next trainer waits for that. If the disk is full, the client still gets its
answer, but the answer is not stored, and training is tried again later.

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
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from datasets import Dataset
from filelock import FileLock
from pydantic import Field, TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file
from transformers.utils import SAFE_WEIGHTS_NAME

from draftsmith.data.distill.token_dataset import FEATURES, load_tokens
from draftsmith.errors import UserError, os_error_message
from draftsmith.eval.bench.measured_methods import drafter_folders
from draftsmith.eval.bench.replay import accepted_lengths
from draftsmith.eval.decoding.generate import AnswerRecord
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


TokenId = Annotated[int, Field(ge=0, strict=True)]
Row = tuple[list[int], list[int]]  # token ids and loss mask of a training example


@dataclass(frozen=True)
class Answer:
    """Token ids of a prompt and of its answer."""

    prompt_ids: list[TokenId]
    ids: list[TokenId]

    @cached_property
    def key(self) -> str:
        """Return a hash of prompt and answer, by which the answer is recognised."""
        return hashlib.sha256(json.dumps([self.prompt_ids, self.ids]).encode()).hexdigest()[:16]

    @property
    def is_held_out(self) -> bool:
        """Return whether the answer is held out from training; depends on its tokens only, so it never changes."""
        return int(self.key[:8], 16) / 16**8 < HELD_OUT_FRAC

    @property
    def row(self) -> Row:
        return [*self.prompt_ids, *self.ids], [0] * len(self.prompt_ids) + [1] * len(self.ids)


LINE = TypeAdapter(Answer)


@dataclass(frozen=True)
class CandidateResult:
    """Comparison of a candidate, a newly trained drafter, with the serving drafter on held-out answers.

    at: Unix time. answers: number of held-out answers. serving, candidate: tau of each drafter. low, high: 95 %
    interval of candidate tau / serving tau. number: the candidate's folder under `drafters/`; None: not adopted.
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
        """Return the comparison and what happens to the candidate, as one line of `trainer.log`."""
        decision = (
            "dropped" if self.high < 1 else "trained further" if self.number is None else f"serving as {self.number}"
        )
        return (
            f"candidate: tau {self.serving:.2f} -> {self.candidate:.2f} ({self.low:.2f}x to {self.high:.2f}x) on "
            f"{self.answers} held-out answers: {decision}"
        )


@dataclass
class State:
    """State of learning, the content of `state.json`.

    begun_with: hash of the drafter's weights at the start of learning. current: number of the serving drafter; 0: the
    one at the start. weighed: results of all candidates so far.
    """

    begun_with: str
    current: int = 0
    weighed: list[CandidateResult] = field(default_factory=list)


class Learned:
    """The folder `runs/<name>/learned/`: served answers, drafters trained on them, and the state of learning.

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
        self._lines = 0  # of the file; 0: not read yet
        weights = " ".join(weights_sha256(self.begun_with).values())
        if not (self.folder / STATE).is_file():
            self.write(State(weights))
        if self.state.begun_with != weights:
            raise UserError(
                f"{self.folder} was started with other weights than {self.begun_with} has now: restore the earlier "
                "weights, or delete the first folder to learn from scratch"
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
        """Return the folder of a drafter by its number; 0 is the drafter at the start of learning."""
        return self.folder / DRAFTERS / str(number) if number else self.begun_with

    def serving(self) -> Path:
        """Return the folder of the serving drafter, which `state.json` names."""
        return self.drafter(self.state.current)

    def newer(self) -> Path | None:
        """Return the serving drafter's folder if it has changed since the last call, else None.

        Logs a warning, once, if the training process has ended.
        """
        if self.process is not None and not self.process.is_alive():
            self.process = None
            logger.warning(
                "the process that trains the drafter has ended, see %s; the server continues without it",
                self.folder / LOG,
            )
        before, self._current = self._current, self.state.current
        return None if self._current == before else self.serving()

    def add(self, prompt_ids: list[int], record: AnswerRecord) -> None:
        """Append an answer to `answers.jsonl` and sync it to disk; at 2 * `kept_answers` lines the oldest are removed.

        Raises:
            OSError: The disk is full; the earlier lines are left as they were.
        """
        if self._lines in (0, 2 * self.kept_answers):
            self._lines = self._trim()
        append_whole(self.file, json.dumps({"prompt_ids": prompt_ids, "ids": record.ids}).encode() + b"\n")
        self._lines += 1

    def _trim(self) -> int:
        """Remove damaged lines and all but the newest ones. Returns the number of lines left."""
        kept = self._stored()[-self.kept_answers :]
        write_atomically(self.file, "".join(json.dumps(asdict(answer)) + "\n" for answer in kept))
        self.file.chmod(OWNER_ALONE)
        return len(kept)

    def _stored(self) -> list[Answer]:
        """Read the answers, without a last line that is torn; logs the number of damaged lines."""
        lines = [line for line in self.file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        answers = []
        for line in lines:
            with suppress(ValidationError):
                answers.append(LINE.validate_json(line))
        if damaged := len(lines) - len(answers):
            logger.warning("%s: %s damaged lines are left out", self.file, damaged)
        return answers

    def answers(self) -> list[Answer]:
        """Return the newest stored answers that are long enough for training, without duplicates, oldest first."""
        long_enough = [
            answer
            for answer in self._stored()
            if answer.prompt_ids and len(answer.ids) > 1 and len(answer.row[0]) >= SHORTEST_ROW_TOKENS
        ]
        return list({answer.key: answer for answer in long_enough}.values())[-self.kept_answers :]


def start_learning(learned: Learned, minutes: float) -> None:
    """Start a process that trains new drafters, about `minutes` each; it ends with the calling process."""
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
    """Train and evaluate a new drafter if there are new answers. Returns the seconds to wait before the next call.

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
    """Trains new drafters on the served answers, about `minutes` each, and compares them with the serving one."""

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
        self.trained = set[str]()  # keys of answers
        self.seen_bytes = -1  # size of `answers.jsonl` at the last cycle
        self.trainee: Path | None = None  # the drafter trained last, unless its candidate was worse
        shutil.rmtree(learned.folder / CYCLES, ignore_errors=True)

    def cycle(self) -> CandidateResult | None:
        """Train a new drafter, and adopt it if it is better; None if there are too few new or held-out answers."""
        if (size := self.learned.file.stat().st_size) == self.seen_bytes:
            return None
        self.seen_bytes = size
        answers, state = self.learned.answers(), self.learned.state
        held_out = [answer for answer in answers if answer.is_held_out][-MOST_HELD_OUT:]
        train = [answer for answer in answers if not answer.is_held_out]
        new = [answer for answer in train if answer.key not in self.trained]
        if len(held_out) < FEWEST_HELD_OUT or sum(len(answer.ids) for answer in new) < FEWEST_NEW_TOKENS:
            return None
        serving = self.learned.drafter(state.current)
        chosen = self._chosen(train, state.weighed)
        begin_s = time.monotonic()
        trainee = self._train(self.trainee or serving, chosen, len(state.weighed))
        candidate = self._candidate(trainee)
        trained = sum(len(ids) for ids, _ in chosen)
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
        self.trained = {answer.key for answer in train}
        return weighed

    def _chosen(self, train: Sequence[Answer], weighed: Sequence[CandidateResult]) -> list[Row]:
        """Choose a cycle's training examples: half the tokens newest answers, half older ones and run data."""
        generator = random.Random(len(weighed))
        rows = [answer.row for answer in train]
        newest = _pop_rows(rows, self.cycle_tokens // 2)
        run = RunFolder(self.learned.recipe)
        if (run.data / "tokens").is_dir():
            tokens = load_tokens(run)
            numbers = generator.sample(range(len(tokens)), min(len(tokens), max(len(newest), 1)))
            rows += [(tokens[number]["input_ids"], tokens[number]["loss_mask"]) for number in numbers]
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
        columns = {
            "input_ids": [ids for ids, _ in rows],
            "loss_mask": [mask for _, mask in rows],
            "length": [len(ids) for ids, _ in rows],
            "conversation": range(len(rows)),
        }
        Dataset.from_dict(columns, FEATURES).save_to_disk(run.data / "tokens")
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
        """Count each answer's tokens and its rounds with the drafter in `folder`; rounds also stand for seconds."""
        drafter = load_drafter(folder, self.target)
        decoder = drafter.decoder(max(len(answer.row[0]) for answer in answers) + drafter.config.num_depths + 1)
        method = build_tree_drafter(self.method, decoder, Sampling())
        rounds = []
        for answer in answers:
            ids, first = answer.row[0], len(answer.prompt_ids)
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
        frac: Share of the weights at the start: 0 changes nothing, 1 restores those weights.
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
        tokens -= len(popped[-1][0])
    return popped


def recipe_of_drafter(folder: Path) -> dict[str, Any]:
    """Return the `drafter` section of a recipe that trains the drafter in `folder` further, with its options."""
    config = drafter_config(folder)
    kind = str(config["model_type"]).removeprefix(MODEL_TYPE_PREFIX)
    options = load_drafter_class(kind).config_class.Options
    chosen = {key: config[key] for key in options.model_fields if config.get(key) is not None}
    return {"kind": kind, "options": chosen | options.while_serving}
