"""A drafter that learns while it serves: stored answers, training, choice of candidates, and kills."""

import json
import queue
import re
import shutil
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_runs import recipe_file, untrained_run
from typer.testing import CliRunner

from draftsmith.cli import main as cli
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.files import open_records
from draftsmith.data.sources.record_reader import parse_conversation
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.errors import UserError
from draftsmith.eval.report.bootstrap import QuestionSums
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.loading import load_target
from draftsmith.models.weights import weights_sha256
from draftsmith.recipes.conversations import SourceRecipe
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.serve import learning, server, worker
from draftsmith.serve.learning import Learned, Learner, interpolate_weights
from draftsmith.serve.worker import CompletedAnswer, Job, Worker

pytestmark = pytest.mark.slow
NEW_TOKENS, KEPT = 48, 4000


def build_run(folder: Path) -> Recipe:
    return untrained_run(folder, methods=[{"name": "tree", "tree": "best_first", "nodes": 6, "branch": 3}])


def answer(prompt_ids: Iterable[int], *ids: int) -> Any:
    return SimpleNamespace(prompt_ids=list(prompt_ids), record=SimpleNamespace(ids=list(ids)))


def answers_of(worker: Worker, prompts: list[list[int]]) -> list[list[int]]:
    """Have a worker answer prompts one after the other, in this thread."""

    def ask(prompt_ids: list[int]) -> list[int]:
        out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        worker.submit(Job(prompt_ids, NEW_TOKENS, Sampling(), 0, (), out.put))
        while not isinstance(end := out.get(timeout=60), CompletedAnswer):
            assert not isinstance(end, BaseException)
        return end.record.ids

    worker.warm_up()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: list(map(ask, prompts)))
        asked.add_done_callback(lambda _: worker.stop())
        worker.work()
        return asked.result()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, list[list[int]], list[list[int]]]:
    """Return a run that has served 90 answers of the target, the prompts and the answers."""
    recipe = build_run(tmp_path_factory.mktemp("learn"))
    worker = Worker(recipe, 4, Learned(recipe, KEPT).add)
    records = (parse_conversation(record, where) for where, record in open_records(SourceRecipe(), "all"))
    prompts = [prompt_token_ids(worker.tokenizer, [Turn("user", next(records).turns[0].content)]) for _ in range(90)]
    return recipe, prompts, answers_of(worker, prompts)


@pytest.fixture
def again(served: Any, tmp_path: Path, monkeypatch: Any) -> Recipe:
    """Copy that run, for short trainings."""
    shutil.copytree(served[0].runs_dir, tmp_path / "runs")
    monkeypatch.setattr(learning, "FIRST_CYCLE_TOKENS", 6000)
    monkeypatch.setattr(learning, "TRAINING", learning.TRAINING | {"learning_rate": 2e-3})
    return served[0].model_copy(update={"runs_dir": str(tmp_path / "runs")})


# ---- stored answers ----


def test_newest_answers_are_kept_and_torn_lines_dropped(tmp_path: Path) -> None:
    """Only their owner can enter their folder."""
    learned = Learned(build_run(tmp_path), 4)
    for number in range(5):
        learned.add(answer(range(20), number, 7))
    learned.add(answer(range(20), 4, 7))  # a duplicate
    learned.add(answer([1], 2, 7))  # too short to learn from
    learned.add(answer(range(20), 9))  # nothing was decoded
    assert [each.ids[0] for each in learned.answers()] == [1, 2, 3, 4]
    with learned.file.open("ab") as stream:
        stream.write(b'{"prompt_ids": [1, 2')
    assert len(learned.answers()) == 4
    again = Learned(learned.recipe, 3)
    again.add(answer(range(20), 8, 7))
    assert len(learned.file.read_bytes().splitlines()) == 4  # it and the newest three before it
    assert again.answers()[-1].ids == (8, 7)
    assert stat.S_IMODE(learned.folder.stat().st_mode) == 0o700
    (learned.folder / "first_drafter").write_bytes(b"\xff")
    with pytest.raises(UserError, match="restore those weights, or delete the folder"):
        Learned(learned.recipe, 3)
    shutil.rmtree(learned.first)
    with pytest.raises(UserError, match="holds no trained drafter"):
        Learned(learned.recipe, 3)


def test_full_disk_loses_no_answer(served: Any, again: Recipe, caplog: Any) -> None:
    refused, kept = iter([True, True, False, False]), list[Any]()

    def keep(finished: CompletedAnswer) -> None:
        if next(refused):
            raise OSError(28, "No space left on device")
        kept.append(finished.record.ids)

    worker = Worker(again, 4, keep)
    assert answers_of(worker, served[1][:4]) == served[2][:4]
    assert kept == served[2][2:4]
    assert caplog.text.count("an answer cannot be stored and is only sent to its client") == 2


# ---- evaluation of candidates ----


def test_candidate_is_interpolated_with_its_initial_weights(again: Recipe, tmp_path: Path) -> None:
    first, folder, candidate = RunFolder(again).drafter, tmp_path / "trained", tmp_path / "candidate"
    shutil.copytree(first, folder)
    weights = load_file(first / "model.safetensors")
    floats = {name for name, value in weights.items() if value.is_floating_point()}
    save_file({name: value + (name in floats) for name, value in weights.items()},
              folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    noted = {"steps": 1, "history": [], "weights_sha256": weights_sha256(folder)}
    (folder / "training.json").write_text(json.dumps(noted))
    interpolate_weights(first, folder, candidate)
    found = load_file(candidate / "model.safetensors")
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value + 0.75 if name in floats else value, atol=1e-6, rtol=0)
    load_drafter(candidate, load_target(again.target)[0])  # its weights match the recorded hashes


def test_learner_improves_the_drafter_and_answers_stay_equal(again: Recipe, served: Any, monkeypatch: Any) -> None:
    """A candidate is accepted only if it is better on held-out answers; the server then drafts with it."""
    learned = Learned(again, KEPT)
    learner = Learner(learned, 0.1)
    seen: list[list[int]] = []
    train = learner._train

    def noted(init: Path, rows: list[learning.Row]) -> Path:
        seen.extend(row["input_ids"] for row in rows)
        return train(init, rows)

    monkeypatch.setattr(learner, "_train", noted)
    sentence = learner.cycle()
    assert sentence is not None
    held_out = [each.input_ids for each in learned.answers() if each.is_held_out]
    assert len(held_out) >= learning.FEWEST_HELD_OUT
    assert not [ids for ids in held_out if ids in seen]
    form = r"candidate: tau (.*) -> (.*) \((.*)x to (.*)x\) on (.*) held-out answers: serves as 1"
    figures = re.fullmatch(form, sentence)
    assert figures is not None
    before, after, low, high, answers = map(float, figures.groups())
    assert 1 < low < after / before < high
    assert answers == len(held_out)
    assert learned.newer() == learned.serving() == learned.drafters / "1"
    assert learned.newer() is None
    assert learner.cycle() is None  # no new answers
    worker = Worker(again, 4, get_newer=Learned(again, KEPT).newer)
    first = worker.drafter
    worker._get_newer = iter([learned.serving(), *[None] * 99]).__next__
    assert answers_of(worker, served[1][:8]) == served[2][:8]
    assert worker.drafter is not first


def test_worse_candidate_is_dropped_and_unclear_one_trained_further(again: Recipe, monkeypatch: Any) -> None:
    """Each candidate is trained from what the one before left; without the newest drafter the one before serves."""
    learned = Learned(again, KEPT)
    learner = Learner(learned, 0.1)
    inits: list[Path] = []

    def train(init: Path, _: Any) -> Path:
        inits.append(init)
        return Path(shutil.copytree(learned.first, learner.folder / "trained"))

    def copy(_: Path, trained: Path, candidate: Path) -> None:
        shutil.copytree(trained, candidate, dirs_exist_ok=True)

    monkeypatch.setattr(learner, "_train", train)
    monkeypatch.setattr(learning, "interpolate_weights", copy)
    monkeypatch.setattr(learner, "measure", lambda *_: QuestionSums(*np.full((6, 8), 2.0)))
    decisions = []
    for ends in ((0.9, 1.1), (0.8, 0.9), (1.1, 1.2), (0.8, 0.9), (1.1, 1.2)):
        monkeypatch.setattr(learning, "paired_ratio", lambda *_, ends=ends: ends)
        learner.trained, learner.seen_ns = set(), 0
        sentence = learner.cycle()
        assert sentence is not None
        decisions.append(sentence.rpartition(": ")[2])
        shutil.rmtree(learner.folder / "trained", ignore_errors=True)
    assert decisions == ["trained further", "dropped", "serves as 1", "dropped", "serves as 2"]
    second = learned.drafters / "2"
    assert inits == [learned.first, learner.trainee, learned.first, learner.trainee, learned.drafters / "1"]
    assert Learned(again, KEPT).serving() == second
    shutil.rmtree(second)
    assert learned.serving() == learned.drafters / "1"
    load_drafter(learned.serving(), load_target(again.target)[0])


# ---- the process ----


def test_serve_learns_only_with_its_option(again: Recipe, monkeypatch: Any) -> None:
    """Check the command's arguments, its output, and the drafter that it starts with."""
    begun: list[Any] = []
    monkeypatch.setattr(learning, "start_learning", lambda *options: begun.append(options))
    workers: list[Any] = []

    def noted(*given: Any) -> Any:
        workers.append(given[:4])
        return SimpleNamespace()

    monkeypatch.setattr(worker, "Worker", noted)
    seconds: list[Any] = []

    def run(*_: Any) -> None:
        if len(workers) == 2:  # try to start a second server while this one serves and learns
            seconds.append(CliRunner().invoke(cli.app, ["serve", recipe_file(again), "--learn"]))

    monkeypatch.setattr(server, "run", run)
    plain = CliRunner().invoke(cli.app, ["serve", recipe_file(again)])
    assert plain.exit_code == 0, plain.output
    assert (begun, len(workers[0])) == ([], 2)
    learned = Learned(again, KEPT)
    for number in ("3", "11", "12.old"):
        (learned.drafters / number).mkdir()
    said = CliRunner().invoke(cli.app, ["serve", recipe_file(again), "--learn", "--learn-minutes", "2"])
    assert f"the newest 4000 prompts and answers are stored in {learned.folder}" in said.stdout.replace("\n", " ")
    assert begun[0][1] == 2.0
    assert workers[1][0].eval.methods[0].drafter == str(learned.drafters / "11")
    assert seconds[0].exit_code == 2
    assert f"{learned.folder} is in use by `draftsmith serve --learn`" in seconds[0].stderr
    assert len(workers) == 2
    back = CliRunner().invoke(cli.app, ["serve", recipe_file(again), "--learn", "--rollback"])
    assert (back.exit_code, "delete the newest folder of learned/drafters" in back.stderr) == (2, True)
