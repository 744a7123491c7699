"""`draftsmith serve --learn`: the drafter learns from the answers that are served.

What a target answers while it serves is self-distilled data. Under `runs/<name>/learned/`:

    answers.jsonl    the newest answers: the tokens of a prompt and of what was said; one line each, whole or not there
    drafters/<n>/    drafters that were good enough to serve
    state.json       which of them serves, which one did before, and what became of every candidate
    trainer.log      what training printed

Only their owner reads them. One server at a time learns in a folder, and one process trains in it: the learner of a
server that was killed ends with it, and the next one waits until it has. A full disk costs no answer: it is not kept,
and training is tried again.

A process of its own, at a lower priority, goes on from the drafter that serves: it trains for a few minutes on the
newest answers, and on as many older ones and rows of the run's own data so that these are not forgotten. The candidate
keeps a part of the weights that learning began with: it forgets less than what was trained (weight-space ensembles,
arXiv 2109.01903), from which training goes on. It is weighed on answers that are kept out of all training: by replay,
which is the tau of the tree in use at T = 0.
A candidate that is better beyond noise is written whole, named in `state.json` and taken by the server between two
answers; one that is worse beyond noise is dropped; else training goes on from it. No drafter changes an answer: that is
the verification's part, and a candidate whose greedy answers were not the target's own would not be taken either.
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
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock
from pydantic import Field, TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_NAME

from draftsmith.data.distill.token_dataset import CONVERSATION, FEATURES, load_tokens, save_rows
from draftsmith.eval.bench.measured_methods import drafter_folders
from draftsmith.eval.bench.replay import replay
from draftsmith.eval.decoding.loop import AnswerRecord, TargetSession, generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.methods.drafter import drafter_method
from draftsmith.eval.trees.verify import Sampling
from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX
from draftsmith.models.base.registry import TRAINING_FILE, drafter_config, load_drafter, load_drafter_class
from draftsmith.models.cpu_kernels import pack_linears
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import load_target, target_device
from draftsmith.models.weights import weights_sha256
from draftsmith.recipes.errors import UserError, what_the_system_refused
from draftsmith.recipes.parent import end_with_parent
from draftsmith.recipes.run_folder import RunFolder, read_json, write_atomically
from draftsmith.recipes.schema import MethodRecipe, Recipe
from draftsmith.train.drafter.stage import train_drafter

LEARNED, ANSWERS, STATE, DRAFTERS, LOG, CYCLES, TRAINER_LOCK = (
    "learned", "answers.jsonl", "state.json", "drafters", "trainer.log", "cycles", ".trainer.lock",
)  # fmt: skip
KEPT_ANSWERS = 4000  # of the newest, by default
KEPT_OUT_FRAC, FEWEST_KEPT_OUT, MOST_KEPT_OUT = 0.15, 8, 64
FEWEST_NEW_TOKENS = 1500  # of answers, before another training
FIRST_CYCLE_TOKENS = 16_000  # read in the first training, whose speed says how many there are in the next
SHORTEST_ROW_TOKENS = 16
BEGINNING_FRAC = 0.25  # what a candidate keeps of the weights that learning began with: less of the old is forgotten
CANDIDATE = "candidate"
RESAMPLES, LEVEL = 1000, 0.05
PROVEN_PROMPTS, PROVEN_TOKENS = 2, 48
LOWEST_PRIORITY = 19
LOOKS_EVERY_S = 2.0
TRIES_AGAIN_AFTER_S = 60.0  # of a disk that is full
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
ROWS_OF_A_STEP = TRAINING["per_device_train_batch_size"] * TRAINING["gradient_accumulation_steps"]


TokenId = Annotated[int, Field(ge=0, strict=True)]
Row = tuple[list[int], list[int]]  # token ids, and the mask of those that carry loss


@dataclass(frozen=True)
class Answer:
    """Token ids of a prompt and of its answer, and a hash of both."""

    prompt_ids: list[TokenId]
    ids: list[TokenId]

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(json.dumps([self.prompt_ids, self.ids]).encode()).hexdigest()[:16]

    @property
    def is_kept_out(self) -> bool:
        """By its tokens alone, so that the same answer is always on the same side."""
        return int(self.key[:8], 16) / 16**8 < KEPT_OUT_FRAC

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    @property
    def row(self) -> Row:
        return [*self.prompt_ids, *self.ids], [0] * len(self.prompt_ids) + [1] * len(self.ids)

    @staticmethod
    def of_line(line: bytes) -> Answer | None:
        """Read a line of `answers.jsonl`; None if it is damaged."""
        try:
            return LINE.validate_json(line)
        except ValidationError:
            return None


LINE = TypeAdapter(Answer)


@dataclass(frozen=True)
class Weighed:
    """A candidate beside the drafter that served: tau of both on the kept-out answers, and their difference's interval.

    number: its folder, if it was taken.
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
        """Say it in one line."""
        taken = "thrown away" if self.high < 0 else "goes on" if self.number is None else f"serves as {self.number}"
        return (
            f"candidate: tau {self.serving:.2f} -> {self.candidate:.2f} ({self.low:+.2f} to {self.high:+.2f}) on "
            f"{self.answers} kept-out answers: {taken}"
        )


@dataclass
class State:
    """current, previous: numbers of drafters, 0 the one that learning began with; begun_with: a hash of its weights."""

    begun_with: str
    current: int = 0
    previous: int = 0
    weighed: list[Weighed] = field(default_factory=list)


class Learned:
    """What a run has learned while it served, in its folder.

    Args:
        recipe: What is served; its first method drafts.
        kept_answers: So many of the newest answers stay on disk.
    """

    def __init__(self, recipe: Recipe, kept_answers: int = KEPT_ANSWERS) -> None:
        self.recipe, self.kept_answers = recipe, kept_answers
        self.folder = RunFolder(recipe).root / LEARNED
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):  # somebody else's folder, who shares it
            self.folder.chmod(OWNERS_FOLDER)
        self.damaged_lines = 0  # of the answers' file, when it was read last
        (self.begun_with,) = drafter_folders(recipe)
        self._changed, self._current = 0, -1
        self._lines = 0
        weights = " ".join(weights_sha256(self.begun_with).values())
        if not (self.folder / STATE).is_file():
            self.write(State(weights))
        if self.state.begun_with != weights:
            raise UserError(
                f"{self.folder} was learned from another drafter than {self.begun_with} holds: restore that one, or "
                "delete the folder to learn anew"
            )
        self.newer()

    @property
    def state(self) -> State:
        """
        Raises:
            UserError: The file is damaged.
        """
        return read_json(self.folder / STATE, State, f"delete {self.folder} to learn anew")

    def write(self, state: State) -> None:
        write_atomically(self.folder / STATE, json.dumps(asdict(state), indent=1) + "\n")

    def drafter(self, number: int) -> Path:
        """The folder of a drafter by its number."""
        return self.folder / DRAFTERS / str(number) if number else self.begun_with

    def serving(self) -> Path:
        """The folder of the drafter that serves."""
        return self.drafter(self.state.current)

    def newer(self) -> Path | None:
        """The folder of another drafter than at the last call, if there is one."""
        changed = (self.folder / STATE).stat().st_mtime_ns
        if changed == self._changed:
            return None
        self._changed, before = changed, self._current
        self._current = self.state.current
        return None if self._current == before else self.serving()

    def roll_back(self) -> str:
        """Let the drafter serve that served before; says which.

        Raises:
            UserError: There is none.
        """
        state = self.state
        if state.current == state.previous:
            raise UserError(f"{self.folder} has no drafter to go back to: {state.current} is the only one that served")
        state.current, state.previous = state.previous, state.current
        self.write(state)
        return f"drafter {state.current} serves again, in place of {state.previous}"

    def add(self, prompt_ids: list[int], record: AnswerRecord) -> None:
        """Keep an answer, on disk when this returns; forget the oldest now and then.

        Raises:
            OSError: The disk is full; the lines that were there before are left.
        """
        file = self.folder / ANSWERS
        if self._lines == 0:
            self._lines = self._trim(file)
        line = memoryview(json.dumps({"prompt_ids": prompt_ids, "ids": record.ids}).encode() + b"\n")
        lines, self._lines = self._lines, 0  # what stops this may leave a part of the line: looked at by the next call
        with open(file, "ab", buffering=0, opener=_for_the_owner) as stream:
            begin = stream.tell()
            try:
                while line:
                    line = line[stream.write(line) :]
                os.fsync(stream.fileno())
            except BaseException:
                os.ftruncate(stream.fileno(), begin)
                raise
        self._lines = lines + 1
        if self._lines > 2 * self.kept_answers:
            self._lines = self._trim(file)

    def _trim(self, file: Path) -> int:
        """Leave the newest lines, without damaged ones; how many."""
        whole = self._whole_lines()
        lines = [line for line in whole if Answer.of_line(line) is not None]
        if damaged := len(whole) - len(lines):
            logging.getLogger(__name__).warning("%s: %s damaged lines are left out", file, damaged)
        lines = lines[-self.kept_answers :]
        if file.exists():
            write_atomically(file, b"".join(lines).decode())
            file.chmod(OWNER_ALONE)
        return len(lines)

    def _whole_lines(self) -> list[bytes]:
        """One that is torn, or still being written, is left out."""
        file = self.folder / ANSWERS
        lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
        return [line for line in lines if line.endswith(b"\n")]

    def size_bytes(self) -> int:
        """Of the answers' file: whether there are others is told without reading them."""
        file = self.folder / ANSWERS
        return file.stat().st_size if file.is_file() else 0

    def answers(self) -> list[Answer]:
        """The newest answers that something can be learned from, each once, the oldest first.

        Damaged lines are left out, and counted in `damaged_lines`.
        """
        found: dict[str, Answer] = {}
        self.damaged_lines = 0
        for line in self._whole_lines():
            answer = Answer.of_line(line)
            if answer is None:
                self.damaged_lines += 1
            elif len(answer.ids) > 1 and answer.tokens >= SHORTEST_ROW_TOKENS:
                found[answer.key] = answer
        return list(found.values())[-self.kept_answers :]


def _for_the_owner(file: str, flags: int) -> int:
    return os.open(file, flags, OWNER_ALONE)


def start_learning(learned: Learned, minutes: float) -> Any:
    """Start the process that learns; it ends with the one that called this.

    Args:
        minutes: Of a training, before its candidate is weighed.
    """
    process = get_context("spawn").Process(target=_learn, args=(learned, minutes), daemon=True)
    process.start()
    return process


def watched(learned: Learned, process: Any) -> Callable[[], Path | None]:
    """`Learned.newer`, which also says once that the process that learns has ended."""
    told: list[bool] = []

    def newer() -> Path | None:
        if not process.is_alive() and not told:
            told.append(True)
            log = learned.folder / LOG
            logging.getLogger(__name__).warning("what learns has ended, as %s says; answers go on without it", log)
        return learned.newer()

    return newer


def _learn(learned: Learned, minutes: float) -> None:
    end_with_parent()
    if hasattr(os, "SCHED_IDLE"):
        # Niceness alone would still make the server's threads wait for a slice whenever they wake.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(LOWEST_PRIORITY)
    with (
        FileLock(learned.folder / TRAINER_LOCK),  # that of a server which was killed may still end
        (learned.folder / LOG).open("a", encoding="utf-8", buffering=1) as log,
        redirect_stdout(log),
        redirect_stderr(log),
    ):
        try:
            learner = Learner(learned, minutes)
            while True:
                time.sleep(cycle_or_pause_s(learner))
        except KeyboardInterrupt:
            sys.exit()


def cycle_or_pause_s(learner: Learner) -> float:
    """Train and weigh a candidate if there is something new; the seconds until the next look.

    A disk that is full, or whatever else the system refuses, is told in `trainer.log`, and tried again.
    """
    try:
        weighed = learner.cycle()
    except Exception as error:
        sentence = what_the_system_refused(error)
        if sentence is None:
            raise
        with suppress(OSError):  # the log is on the same disk
            print(sentence)
        learner.look_again()
        return TRIES_AGAIN_AFTER_S
    if weighed is None:
        return LOOKS_EVERY_S
    with suppress(OSError):
        print(weighed.sentence())
    return 0.0


class Learner:
    """Trains candidates and weighs them.

    Args:
        learned: The folder.
        minutes: About so long is a training.
    """

    def __init__(self, learned: Learned, minutes: float) -> None:
        self.learned, self.minutes = learned, minutes
        recipe = learned.recipe
        # AdamW's steps are smaller than bf16's: trained in fp32, weighed in the dtype that serves.
        on_cpu = target_device(recipe.target).type == "cpu"
        self.training_target = recipe.target.model_copy(update={"dtype": "float32"} if on_cpu else {})
        self.target, _ = load_target(recipe.target)
        pack_linears(self.target)  # as where it serves: a token has the same bits alone and in a tree
        self.method = drafter_alone(recipe.eval.methods[0])
        self.drafter = recipe_of_drafter(learned.begun_with)
        if "until_first_error" in load_drafter_class(self.drafter["kind"]).config_class.Options.model_fields:
            self.drafter["options"] |= {"until_first_error": True}  # what follows a mistake is never drafted from
        self.cycle_tokens = FIRST_CYCLE_TOKENS
        self.trained = set[str]()  # keys of answers
        self._seen_bytes = -1  # of the file, when there was too little in it
        self.trainee: Path | None = None  # what was trained last, unless its candidate was worse
        self._features: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self._taus: dict[tuple[Path, str], float] = {}
        shutil.rmtree(learned.folder / CYCLES, ignore_errors=True)

    def cycle(self) -> Weighed | None:
        """Train a candidate and weigh it; None if there is too little that is new, or to weigh on."""
        if (size := self.learned.size_bytes()) == self._seen_bytes:
            return None
        self._seen_bytes = size
        answers, state = self.learned.answers(), self.learned.state
        if self.learned.damaged_lines:
            print(f"{self.learned.folder / ANSWERS}: {self.learned.damaged_lines} damaged lines are left out")
        kept_out = [answer for answer in answers if answer.is_kept_out][-MOST_KEPT_OUT:]
        train = [answer for answer in answers if not answer.is_kept_out]
        new = [answer for answer in train if answer.key not in self.trained]
        if len(kept_out) < FEWEST_KEPT_OUT or sum(len(answer.ids) for answer in new) < FEWEST_NEW_TOKENS:
            return None
        serving = self.learned.drafter(state.current)
        chosen = self._chosen(train, state.weighed)
        begin_s = time.monotonic()
        trainee = self._train(self.trainee or serving, chosen, len(state.weighed))
        candidate = self._candidate(trainee)
        trained = sum(len(ids) for ids, _ in chosen)
        pace = trained / max(time.monotonic() - begin_s, 1e-9)
        self.cycle_tokens = max(FIRST_CYCLE_TOKENS // 2, round(60 * self.minutes * pace))
        before, after = (self.taus_of(folder, kept_out) for folder in (serving, candidate))
        tokens = [len(answer.ids) - 1 for answer in kept_out]
        low, high = paired_interval(tokens, before, after)
        number = None
        if low > 0 and self._proven(candidate, kept_out):
            number = 1 + max((each.number or 0 for each in state.weighed), default=0)
            place = self.learned.drafter(number)
            place.parent.mkdir(exist_ok=True)
            shutil.rmtree(place, ignore_errors=True)  # of a process that was killed before it could name it
            candidate.rename(place)
            self._taus = {(place, key): tau for (folder, key), tau in self._taus.items() if folder == candidate}
            state.current, state.previous = number, state.current
        self.trainee = None if high < 0 else trainee
        taus = tau_of(tokens, before), tau_of(tokens, after)
        weighed = Weighed(time.time(), len(kept_out), trained, *taus, low, high, number)
        state.weighed.append(weighed)
        self.learned.write(state)
        self.trained = {answer.key for answer in train}
        return weighed

    def look_again(self) -> None:
        """Let the next cycle look at the answers, also if there are no new ones."""
        self._seen_bytes = -1

    def _chosen(self, train: Sequence[Answer], weighed: Sequence[Weighed]) -> list[Row]:
        """Rows of a cycle's tokens: half of the newest answers, half of older ones and of the run's own data."""
        generator = random.Random(len(weighed))
        rows = [answer.row for answer in train]
        newest = _taken(rows, self.cycle_tokens // 2)
        run = RunFolder(self.learned.recipe)
        if (run.data / "tokens").is_dir():
            tokens = load_tokens(run, self.learned.recipe.name)
            numbers = generator.sample(range(len(tokens)), min(len(tokens), max(len(newest), 1)))
            rows += [(tokens[number]["input_ids"], tokens[number]["loss_mask"]) for number in numbers]
        generator.shuffle(rows)
        return newest + _taken(rows, self.cycle_tokens // 2)

    def _train(self, begun_from: Path, rows: list[Row], number: int) -> Path:
        """The folder of a drafter that has gone on from another."""
        cycles = self.learned.folder / CYCLES
        recipe = Recipe.model_validate(
            {
                "name": f"{number}",
                "runs_dir": str(cycles),
                "seed": number,
                "target": self.training_target.model_dump(),
                "drafter": self.drafter | {"init": str(begun_from), "init_vocabulary": "extended"},
                "train": TRAINING | {"max_steps": max(1, len(rows) // ROWS_OF_A_STEP)},
            }
        )
        run = RunFolder(recipe)
        shutil.rmtree(run.root, ignore_errors=True)
        run.data.mkdir(parents=True)
        with ArrowWriter(path=str(run.data / "rows.arrow"), features=FEATURES) as writer:
            for row, (ids, mask) in enumerate(rows):
                writer.write({"input_ids": ids, "loss_mask": mask, "length": len(ids), CONVERSATION: row})
            writer.finalize()
        save_rows(run.data / "rows.arrow", run.data / "tokens")
        train_drafter(recipe)
        for old in cycles.iterdir():
            if old.name != recipe.name and old / "drafter" != begun_from:
                shutil.rmtree(old, ignore_errors=True)
        return run.drafter

    def _candidate(self, trained: Path) -> Path:
        """A drafter between the one that was trained, which training goes on from, and the one learning began with."""
        candidate = trained.with_name(CANDIDATE)
        shutil.rmtree(candidate, ignore_errors=True)
        shutil.copytree(trained, candidate, ignore=shutil.ignore_patterns("checkpoints"))
        keep_some_of(self.learned.begun_with, candidate, BEGINNING_FRAC)
        return candidate

    def taus_of(self, folder: Path, answers: Sequence[Answer]) -> list[float]:
        """The tau of each answer with this drafter."""
        wanted = [answer for answer in answers if (folder, answer.key) not in self._taus]
        if wanted:
            drafter = load_drafter(folder, self.target)
            decoder = drafter.decoder(max(answer.tokens for answer in wanted) + drafter.config.num_depths + 1)
            method = drafter_method(self.method, decoder, Sampling())
            for answer in wanted:
                tau = replay(method, [self._row(answer, drafter.feature_layers)])
                self._taus[folder, answer.key] = 1.0 if tau is None else tau
        return [self._taus[folder, answer.key] for answer in answers]

    def _row(self, answer: Answer, layers: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [S], loss mask [S] and features [S, F]."""
        if answer.key not in self._features:
            ids, mask = answer.row
            ids_s, mask_s = torch.tensor(ids, device=self.target.device), torch.tensor(mask)
            with torch.inference_mode():
                features_sf = target_features(self.target, ids_s[None], layers=layers)[0]
            if len(self._features) >= 2 * MOST_KEPT_OUT:
                self._features.clear()
            self._features[answer.key] = (ids_s, mask_s, features_sf)
        return self._features[answer.key]

    def _proven(self, folder: Path, answers: Sequence[Answer]) -> bool:
        """Whether greedy answers with this drafter are those of the target alone."""
        drafter = load_drafter(folder, self.target)
        prompts = [answer.prompt_ids for answer in answers[-PROVEN_PROMPTS:]]
        length = max(map(len, prompts)) + PROVEN_TOKENS + self.method.nodes + 1
        method = drafter_method(self.method, drafter.decoder(length), Sampling())
        with TargetSession(self.target, length, drafter.feature_layers) as session:
            for prompt in prompts:
                drafted, plain = (
                    generate(session, each, prompt, Sampling(), PROVEN_TOKENS, ()).ids
                    for each in (method, Autoregressive())
                )
                if drafted != plain:
                    print(f"not taken: a greedy answer differs from the target's own ({folder})")
                    return False
        return True


@torch.no_grad()
def keep_some_of(begun_with: Path, folder: Path, frac: float) -> None:
    """Take the weights in a drafter's folder so far back towards those that it once began with (arXiv 2109.01903)."""
    file = folder / SAFE_WEIGHTS_NAME
    earlier, weights = (load_file(each / SAFE_WEIGHTS_NAME) for each in (begun_with, folder))
    for name, value in weights.items():
        begun = earlier.get(name)
        if begun is not None and value.is_floating_point() and begun.shape == value.shape:
            value.copy_(value.float().lerp(begun.float(), frac))
    save_file(weights, file, metadata={"format": "pt"})
    training = json.loads((folder / TRAINING_FILE).read_text())
    write_atomically(folder / TRAINING_FILE, json.dumps(training | {"weights_sha256": weights_sha256(folder)}) + "\n")


def tau_of(tokens: Sequence[int], taus: Sequence[float]) -> float:
    """Tokens per round over all answers, from each answer's own; its first token, which comes with the prompt, is not
    among its tokens."""
    return sum(tokens) / sum(count / tau for count, tau in zip(tokens, taus, strict=True))


def paired_interval(tokens: Sequence[int], before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """What lies between so much and so much in 90 of 100 resamplings of the answers: tau after minus tau before."""
    counts = np.array(tokens, dtype=float)
    rounds = np.stack([counts / np.array(each) for each in (before, after)])
    drawn = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
    taus = counts[drawn].sum(axis=1) / rounds[:, drawn].sum(axis=2)
    low, high = np.quantile(taus[1] - taus[0], [LEVEL, 1 - LEVEL])
    return float(low), float(high)


def _taken(rows: list[Row], tokens: int) -> list[Row]:
    """The last rows, taken out until they have so many tokens."""
    found: list[Row] = []
    while rows and tokens > 0:
        found.append(rows.pop())
        tokens -= len(found[-1][0])
    return found


def drafter_alone(method: MethodRecipe) -> MethodRecipe:
    """A method's tree as the drafter alone decides it: without lookups, and whatever a round costs."""
    tree = "best_first" if method.tree == "adaptive" else method.tree
    return method.model_copy(update={"lookup": False, "tree": tree})


def recipe_of_drafter(folder: Path) -> dict[str, Any]:
    """The `drafter` section that makes a drafter like the one in this folder."""
    config = drafter_config(folder)
    kind = str(config["model_type"]).removeprefix(MODEL_TYPE_PREFIX)
    known = load_drafter_class(kind).config_class.Options.model_fields
    return {"kind": kind, "options": {key: config[key] for key in known if config.get(key) is not None}}
