"""`draftsmith serve --learn` under traffic: tau of the learning drafter compared with that of the initial one.

    python benchmarks/learning.py --traffic FILE:COUNT ... [--old FILE:COUNT:SKIPPED] [--recipe R]
        [--minutes 2] [--load 0.5] [--new-tokens 64] [--picture FILE.svg] [--json FILE]

Conversations of the files go through the server's worker, one after the other, each question with the target's earlier
answers; pauses between answers keep the server busy for a share `--load` of the time. Greedy answers do not depend on
the drafter, so the initial drafter's accepted tokens are replayed afterwards on the served answers. `--old` are
questions that are never served, to measure forgetting. The server and the training process share two cores.
"""

import shutil
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from parts.timing import benchmark_parser, write_figures
from parts.traffic import Traffic, conversations, interval, traffic_name

from draftsmith.eval.bench.measured_methods import drafter_folders
from draftsmith.eval.commands.demo import shipped_recipe
from draftsmith.eval.commands.learning import Answer, Learned, Learner, start_learning, tau_of
from draftsmith.eval.serving.worker import Worker
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import Recipe

WINDOW_ANSWERS = 50


@dataclass
class ServedAnswer:
    """One answer: its time in minutes, its duration in seconds, its number of rounds, and the drafter's number."""

    traffic: str
    answer: Answer
    minute: float
    seconds: float
    rounds: int
    drafter: int


def progress_line(window: list[ServedAnswer], count: int) -> str:
    tau = sum(len(each.answer.ids) - 1 for each in window) / sum(each.rounds for each in window)
    return f"{count} answers, {window[-1].minute:.1f} min, drafter {window[-1].drafter}: tau {tau:.2f}"


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--traffic", nargs="+", required=True)
    parser.add_argument("--old")
    parser.add_argument("--recipe")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    recipe = shipped_recipe() if options.recipe is None else load_recipe(options.recipe)
    method = recipe.eval.methods[0].model_copy(update={"tree": "best_first", "nodes": 6, "branch": 3, "lookup": False})
    recipe.eval.methods = [method.model_copy(update={"drafter": str(drafter_folders(recipe)[0])})]
    with tempfile.TemporaryDirectory() as folder:
        figures = measured(recipe.model_copy(update={"runs_dir": folder, "name": "learning"}), options)
    write_figures(options, figures)


def measured(recipe: Recipe, options: Any) -> dict[str, Any]:
    learned = Learned(recipe)
    worker = Worker(recipe, 4, lambda finished: learned.add(finished.prompt_ids, finished.record), learned.newer)

    def client() -> tuple[list[Answer], list[ServedAnswer]]:
        traffic = Traffic(worker, options.new_tokens, options.load)
        old = []
        for questions in conversations(options.old) if options.old else ():
            old += [Answer(end.prompt_ids, end.record.ids) for end, _ in traffic.ask(questions[:1])]
        (learned.folder / "answers.jsonl").unlink(
            missing_ok=True
        )  # answers of earlier calls are not part of this traffic
        process = start_learning(learned, options.minutes)
        served: list[ServedAnswer] = []
        begin_s = time.monotonic()
        for spec in options.traffic:
            for questions in conversations(spec):
                for end, seconds in traffic.ask(questions):
                    answer = Answer(end.prompt_ids, end.record.ids)
                    if len(answer.ids) > 1:
                        minute, number = (time.monotonic() - begin_s) / 60, learned.state.current
                        served.append(ServedAnswer(spec, answer, minute, seconds, end.record.rounds, number))
                        if len(served) % WINDOW_ANSWERS == 0:
                            print(progress_line(served[-WINDOW_ANSWERS:], len(served)), flush=True)
        process.terminate()
        process.join()
        return old, served

    old, served = worker.answer(client)
    state = learned.state
    for weighed in state.weighed:
        print(weighed.sentence())

    learner = Learner(learned, options.minutes)
    answers = [each.answer for each in served]
    begun = learner.taus_of(learned.begun_with, answers)
    tokens = np.array([len(answer.ids) - 1 for answer in answers], dtype=float)
    frozen, live = tokens / np.array(begun), np.array([each.rounds for each in served], dtype=float)
    windows: list[dict[str, Any]] = []
    for start in range(0, len(served) - WINDOW_ANSWERS + 1, WINDOW_ANSWERS):
        within = slice(start, start + WINDOW_ANSWERS)
        windows.append(
            {
                "traffic": traffic_name(served[start].traffic),
                "answers": [start, start + WINDOW_ANSWERS],
                "minute": served[start + WINDOW_ANSWERS - 1].minute,
                "drafter": served[start + WINDOW_ANSWERS - 1].drafter,
                "tau": float(tokens[within].sum() / live[within].sum()),
                "tau_frozen": float(tokens[within].sum() / frozen[within].sum()),
                **interval(tokens[within], frozen[within], live[within]),
            }
        )
    last: dict[str, Any] = {}
    for spec in options.traffic:
        numbers = [number for number, each in enumerate(served) if each.traffic == spec]
        third = numbers[-(len(numbers) // 3) :]
        name = traffic_name(spec)
        last[name] = interval(tokens[third], frozen[third], live[third])
        low, high = last[name]["low"], last[name]["high"]
        print(f"{name}: the last third of its answers: {last[name]['ratio']:.2f}x ({low:.2f} to {high:.2f}) of tau")
    retention: dict[str, Any] = {}
    if old:
        before, after = (learner.taus_of(place, old) for place in (learned.begun_with, learned.serving()))
        counts = [len(answer.ids) - 1 for answer in old]
        sizes = np.array(counts, dtype=float)
        retention = {
            "tau_before": tau_of(counts, before),
            "tau_after": tau_of(counts, after),
            **interval(sizes, sizes / np.array(before), sizes / np.array(after)),
        }
        print(f"old questions: {retention['ratio']:.2f}x ({retention['low']:.2f} to {retention['high']:.2f}) of tau")
    if options.picture is not None:
        draw(windows, options.picture)
    figures = {
        "windows": windows,
        "last_third": last,
        "old": retention,
        "weighed": [each.sentence() for each in state.weighed],
        "answers": len(served),
        "minutes": served[-1].minute,
        "load": options.load,
        "new_tokens": options.new_tokens,
    }
    shutil.rmtree(learned.folder)
    return figures


def draw(windows: list[dict[str, Any]], file: Path) -> None:
    """Draw both taus over the answers, with the interval of their ratio as a band."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    places = [window["answers"][1] for window in windows]
    frozen = np.array([window["tau_frozen"] for window in windows])
    axes.plot(places, frozen, color="#999999", label="the initial drafter")
    axes.plot(places, [window["tau"] for window in windows], color="#0072B2", label="the drafter that learns")
    low, high = (np.array([window[bound] for window in windows]) for bound in ("low", "high"))
    axes.fill_between(places, frozen * low, frozen * high, color="#0072B2", alpha=0.2, linewidth=0)
    for before, after in pairwise(windows):
        if before["traffic"] != after["traffic"]:
            axes.axvline(before["answers"][1], color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("answers served")
    axes.set_ylabel("tau")
    axes.legend(frameon=False)
    figure.savefig(file)


if __name__ == "__main__":
    main()
