"""A drafter that learns while it serves: stored answers, training, choice of candidates, and kills."""

import json
import queue
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
from draftsmith.eval.report.bootstrap import QuestionSums
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.loading import load_target
from draftsmith.models.weights import weights_sha256
from draftsmith.recipes.conversations import SourceRecipe
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.serve import learning, server, worker
from draftsmith.serve.learning import (
    Learned,
    Learner,
    interpolate_weights,
)
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
    """Only their owner can read them."""
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
    assert stat.S_IMODE(learned.file.stat().st_mode) == 0o600
    again = Learned(learned.recipe, 3)
    again.add(answer(range(20), 8, 7))
    assert len(learned.file.read_bytes().splitlines()) == 4  # it and the newest three before it
    assert again.answers()[-1].ids == (8, 7)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (learned.file, learned.folder)] == [0o600, 0o700]


def test_full_disk_loses_no_answer(served: Any, again: Recipe, caplog: Any) -> None:
    refused, kept = iter([True, True, False, False]), list[Any]()

    def keep(finished: CompletedAnswer) -> None:
        if next(refused):
            raise OSError(28, "No space left on device")
        kept.append(finished.record.ids)

    worker = Worker(again, 4, keep)
    assert answers_of(worker, served[1][:4]) == served[2][:4]
    assert kept == served[2][2:4]
    assert worker.not_kept._value.get() == 2
    assert (
        caplog.text.count("answers cannot be stored and are only sent to clients"),
        caplog.text.count("stored again"),
    ) == (1, 1)


# ---- evaluation of candidates ----


def test_candidate_is_interpolated_with_its_initial_weights(again: Recipe, tmp_path: Path) -> None:
    begun, folder = RunFolder(again).drafter, tmp_path / "trained"
    shutil.copytree(begun, folder)
    weights = load_file(begun / "model.safetensors")
    floats = {name for name, value in weights.items() if value.is_floating_point()}
    save_file({name: value + (name in floats) for name, value in weights.items()},
              folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    noted = {"steps": 1, "history": [], "weights_sha256": weights_sha256(folder)}
    (folder / "training.json").write_text(json.dumps(noted))
    interpolate_weights(begun, folder, 0.25)
    found = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value + 0.75 if name in floats else value, atol=1e-6, rtol=0)
    load_drafter(folder, load_target(again.target)[0])  # its weights match the recorded hashes


def test_learner_improves_the_drafter_and_answers_stay_equal(again: Recipe, served: Any, monkeypatch: Any) -> None:
    """A candidate is accepted only if it is better on held-out answers; the server then drafts with it."""
    learned = Learned(again, KEPT)
    learner = Learner(learned, 0.1)
    seen: list[list[int]] = []
    train = learner._train

    def noted(begun_from: Path, rows: list[learning.Row], number: int) -> Path:
        seen.extend(row["input_ids"] for row in rows)
        return train(begun_from, rows, number)

    monkeypatch.setattr(learner, "_train", noted)
    first = learner.cycle()
    assert first is not None
    held_out = [each.input_ids for each in learned.answers() if each.is_held_out]
    assert first.answers == len(held_out) >= learning.FEWEST_HELD_OUT
    assert not [ids for ids in held_out if ids in seen]
    assert 1 < first.low < first.candidate / first.serving < first.high
    assert (first.number, learned.state.current) == (1, 1)
    assert learner.cycle() is None  # no new answers
    worker = Worker(again, 4, get_newer=Learned(again, KEPT).newer)
    worker._get_newer = iter([learned.serving(), *[None] * 99]).__next__
    assert answers_of(worker, served[1][:8]) == served[2][:8]
    assert worker.drafters._value.get() == 1


def test_worse_candidate_is_dropped_and_unclear_one_trained_further(again: Recipe, monkeypatch: Any) -> None:
    learned = Learned(again, KEPT)
    learner = Learner(learned, 0.1)
    begun: list[Path] = []
    monkeypatch.setattr(learner, "_train", lambda folder, rows, number: begun.append(folder) or Path(f"/c{number}"))
    monkeypatch.setattr(learner, "_candidate", lambda trained: trained)
    equal = QuestionSums(*np.full((6, 8), 2.0))
    monkeypatch.setattr(learner, "measure", lambda *_: equal)
    for ends in ((0.9, 1.1), (0.8, 0.9), (0.9, 1.1)):
        monkeypatch.setattr(learning, "paired_ratio", lambda *_, ends=ends: ends)
        learner.trained, learner.seen_bytes = set(), -1
        assert learner.cycle() is not None
    origin = RunFolder(again).drafter
    assert begun == [origin, Path("/c0"), origin]
    assert learned.state.current == 0
    sentences = [weighed.sentence().rpartition(": ")[2] for weighed in learned.state.weighed]
    assert sentences == ["trained further", "dropped", "trained further"]


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
    state = learned.state
    state.current = 3
    learned.write(state)
    said = CliRunner().invoke(cli.app, ["serve", recipe_file(again), "--learn", "--learn-minutes", "2"])
    assert f"the newest 4000 prompts and answers are stored in {learned.folder}" in said.stdout.replace("\n", " ")
    assert begun[0][1] == 2.0
    assert workers[1][0].eval.methods[0].drafter == str(learned.folder / "drafters" / "3")
    assert seconds[0].exit_code == 2
    assert f"{learned.folder} is in use by `draftsmith serve --learn`" in seconds[0].stderr
    assert len(workers) == 2
    back = CliRunner().invoke(cli.app, ["serve", recipe_file(again), "--learn", "--rollback"])
    assert (back.exit_code, "set `current` in learned/state.json" in back.stderr.replace("\n", " ")) == (2, True)


def test_kill_between_a_candidate_and_its_state(again: Recipe, monkeypatch: Any) -> None:
    """A drafter without a state does not serve, and the next one replaces it."""
    trained = RunFolder(again).drafter

    def learner_of(learned: Learned) -> Learner:
        learner = Learner(learned, 0.1)
        made_of = trained.with_name("candidate")
        monkeypatch.setattr(learner, "_train", lambda *_: trained)
        monkeypatch.setattr(learner, "_candidate", lambda each: Path(shutil.copytree(each, made_of)))
        return learner

    monkeypatch.setattr(Learner, "measure", lambda *_: QuestionSums(*np.full((6, 8), 2.0)))
    monkeypatch.setattr(learning, "paired_ratio", lambda *_: (1.1, 1.2))
    learned = Learned(again, KEPT)
    with monkeypatch.context() as killed:
        killed.setattr(learned, "write", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            learner_of(learned).cycle()
    half = learned.folder / "drafters" / "1"
    assert half.is_dir()
    (half / "of the killed one").touch()
    after = Learned(again, KEPT)
    assert (after.state.current, after.state.weighed, after.serving()) == (0, [], trained)
    weighed = learner_of(after).cycle()
    assert weighed is not None
    assert (weighed.number, after.state.current) == (1, 1)
    assert not (half / "of the killed one").exists()
    load_drafter(after.serving(), load_target(again.target)[0])
