"""`draftsmith tune`: find the fastest draft tree for this drafter on this machine.

Chains and best-first trees of several sizes, with lookups and without, answer every other question in turns. After each
turn the slower half is dropped, until `FINALISTS` are left, which answer all questions several times. The default is
never dropped, so tuning never makes decoding slower than it. The fastest tree is written into the drafter's config,
where `tree: tuned` finds it.

If the questions belong to several tasks, all tasks have equal weight, as in the headline of an evaluation: the fastest
tree has the largest mean over tasks of its speed over the default's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from draftsmith.cli.artifacts import resolve_tuned, tree_settings, write_tuned
from draftsmith.cli.console import console, print_table
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import answer_end_ids
from draftsmith.errors import UserError
from draftsmith.eval.bench.measured_methods import compile_decoder, drafter_folder, load_models
from draftsmith.eval.bench.spec_bench import first_turn_prompts
from draftsmith.eval.decoding.generate import AnswerRecord, generate
from draftsmith.eval.decoding.session import open_session
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.files import write_json
from draftsmith.models.base.registry import is_published
from draftsmith.models.decoding.decoders import StepwiseDecoder
from draftsmith.models.decoding.recurrent import chains_only
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.loading import load_target_config
from draftsmith.progress import progress_bar
from draftsmith.recipes.run_folder import RunFolder, with_run_lock
from draftsmith.recipes.schema import DRAFTER_KIND, MethodConfig, Recipe

GREEDY = Sampling()
SIZES = (2, 4, 8, 12, 15, 24, 48)  # nodes of best-first trees; 15 and the root are one tile of AMX
MOST_BRANCH = 8
FINALISTS = 3  # in addition to the default


class Figures(NamedTuple):
    """Figures of a draft tree: tokens per second, speedup over the default tree (mean over tasks), and tau."""

    tokens_per_s: float
    against_default: float
    tau: float


def candidates(deepest: int, is_stepwise: bool) -> list[MethodConfig]:
    """Return the draft trees to compare: chains and best-first trees of several sizes, some with lookups.

    Args:
        deepest: Largest depth that the drafter drafts.
        is_stepwise: Whether every depth costs a forward of the drafter; then trees of half that depth are added.
    """
    half = -(-deepest // 2)
    chains: list[dict[str, Any]] = [{"max_depth": depth} for depth in sorted({1, 2, 3, half} & set(range(1, deepest)))]
    trees: list[dict[str, Any]] = [{}, {"lookup": True}]
    trees += [{"max_depth": half}] if is_stepwise and half < deepest else []
    values = [{"tree": "chain", **each} for each in [*chains, {}]]
    for each in trees:
        values += [{"tree": "best_first", "nodes": size, "branch": min(size, MOST_BRANCH), **each} for size in SIZES]
    return [MethodConfig.model_validate({"name": "candidate", **each}) for each in values]


def halvings(trees: int) -> list[int]:
    """Return the number of trees left after each turn, when every turn drops the slower half down to `FINALISTS`."""
    left = []
    while trees > FINALISTS:
        trees = max(FINALISTS, trees // 2)
        left.append(trees)
    return left


@dataclass
class Tuned:
    """Result of tuning.

    measured: the default and each finalist with their figures, medians over turns; the tree with the largest speedup
    is chosen. tasks: number of tasks. saved: whether the chosen tree was written to the drafter's config.
    """

    default: MethodConfig
    chosen: MethodConfig
    measured: list[tuple[MethodConfig, Figures]]
    tasks: int
    saved: bool = True

    def as_json(self) -> dict[str, Any]:
        return {
            "chosen": tree_settings(self.chosen),
            "default": tree_settings(self.default),
            "tasks": self.tasks,
            "measured": [{**tree_settings(method), **figures._asdict()} for method, figures in self.measured],
        }

    def show(self) -> None:
        rows = [
            (describe(method), f"{figures.tau:.2f}", f"{figures.tokens_per_s:.0f}", f"{figures.against_default:.2f}x")
            for method, figures in sorted(self.measured, key=lambda each: -each[1].against_default)
        ]
        headings = ("tree", "tau", "tokens/s", "speedup over default")
        over = f"; last column: mean over {self.tasks} tasks of equal weight" if self.tasks > 1 else ""
        print_table(headings, rows, f"trees, measured side by side{over}")
        best = f"[bold]{describe(self.chosen)}[/bold]"
        if self.saved:
            console.print(f"{best} is the fastest; methods with `tree: tuned` now use it")
            return
        console.print(
            f"{best} is the fastest; to use it, add these keys to the recipe's method (Hub drafters are not changed):"
        )
        tree = {key: value for key, value in tree_settings(self.chosen).items() if value is not None}
        console.print(json.dumps(tree), markup=False)


def describe(method: MethodConfig) -> str:
    """Return a method's draft tree in words, such as "best_first of 15 nodes to depth 3 with lookups"."""
    depth = "" if method.max_depth is None else f" to depth {method.max_depth}"
    size = f" of {method.nodes} nodes" if method.tree == "best_first" else ""
    return f"{method.tree}{size}{depth}{' with lookups' if method.lookup else ''}"


@with_run_lock("tune")
def tune(recipe: Recipe, questions: int = 14, new_tokens: int = 96, turns: int = 5) -> Tuned:
    """Find the fastest draft tree and write it into the drafter's config.

    The drafter is the run's own, or the first method's if all methods name other drafters. Nothing is written to a
    drafter from the Hub.

    Raises:
        UserError: The target verifies chains only, there is no trained drafter, or no question fits the
            target's context.
    """
    drafted = [method for method in recipe.eval.methods if method.kind == DRAFTER_KIND] or [MethodConfig(name="chain")]
    default = next((method for method in drafted if method.drafter is None), drafted[0])
    folder = drafter_folder(recipe, default)
    default = resolve_tuned(default, folder)
    if why := chains_only(load_target_config(recipe.target)):
        raise UserError(f"{why}, and `draftsmith tune` compares trees: use tree: chain")
    only_own = recipe.eval.model_copy(update={"methods": [default]})
    target, tokenizer, drafters = load_models(recipe.model_copy(update={"eval": only_own}))
    drafter = drafters[folder]
    loaded = load_questions(recipe.eval.question_sets)
    task = {question.question_id: question.task_name for question in loaded}
    first_turns = first_turn_prompts(target, tokenizer, loaded, questions, new_tokens)
    prompts = [(task[name], ids) for name, ids in first_turns]
    end_ids = frozenset(answer_end_ids(target.generation_config, tokenizer))
    length = max(len(ids) for _, ids in prompts) + new_tokens
    decoder = compile_decoder(drafter.decoder(length), target.device, recipe.eval.compile)
    # The models are loaded outside inference mode: packed layers need their weights' version counters.
    with torch.inference_mode(), open_session(target, length, recipe.eval.compile) as session:
        session.read_layers(drafter.feature_layers)
        deepest = getattr(decoder, "num_depths", None) or drafter.config.num_depths
        found = candidates(deepest, isinstance(decoder, StepwiseDecoder))
        trees = [default, *(each for each in found if tree_settings(each) != tree_settings(default))]
        contest = [(tree, build_tree_drafter(tree, decoder, GREEDY)) for tree in trees]

        def measure(questions: Sequence[tuple[str, list[int]]], turn: int = 0) -> list[Figures]:
            """Answer each question with all trees, one after the other, in rotating order."""
            records: list[dict[str, list[AnswerRecord]]] = [{} for _ in contest]  # by task
            for index, (name, prompt) in enumerate(questions):
                shift = (turn + index) % len(contest)
                for place in [*range(shift, len(contest)), *range(shift)]:
                    record = generate(session, contest[place][1], prompt, GREEDY, new_tokens, end_ids)
                    records[place].setdefault(name, []).append(record)
                progress.update()
            return [compute_figures(each, records[0]) for each in records]

        some, halves = prompts[::2], halvings(len(contest) - 1)
        with progress_bar(1 + len(halves) * len(some) + turns * len(prompts), "measure", "question") as progress:
            measure(prompts[:1])  # warms up
            for turn, left in enumerate(halves):
                figures = measure(some, turn)
                fastest = sorted(range(1, len(contest)), key=lambda place: -figures[place].against_default)
                contest = [contest[0], *(contest[place] for place in fastest[:left])]
            repeated = [measure(prompts, turn) for turn in range(turns)]
    medians = [Figures(*map(statistics.median, zip(*each, strict=True))) for each in zip(*repeated, strict=True)]
    measured = [(tree, figures) for (tree, _), figures in zip(contest, medians, strict=True)]
    if all(figures.tau == 1 for _, figures in measured):
        console.print(f"No draft token of the drafter in {folder} was accepted: is it trained?")
    chosen = max(measured, key=lambda each: each[1].against_default)[0]
    saved = default.drafter is None or not is_published(default.drafter)
    tuned = Tuned(default, chosen, measured, len({name for name, _ in prompts}), saved)
    if saved:
        write_tuned(folder, chosen)
    write_json(RunFolder(recipe).eval / "tuned.json", tuned.as_json())
    return tuned


def compute_figures(records: dict[str, list[AnswerRecord]], reference: dict[str, list[AnswerRecord]]) -> Figures:
    """Compute the figures of a draft tree from its answers; the time of the prefill is not counted.

    Args:
        records: The tree's answers, by task.
        reference: The default tree's answers, by task. Tasks whose answers have no round, only the prefill's token,
            are left out of the mean.
    """

    def speed(answers: Sequence[AnswerRecord]) -> float:
        return sum(map(tokens, answers)) / sum(answer.wall_time_s - answer.prefill_s for answer in answers)

    def tokens(answer: AnswerRecord) -> int:
        return sum(answer.accept_lengths)

    every = [answer for answers in records.values() for answer in answers]
    gains = [speed(records[task]) / speed(own) for task, own in reference.items() if sum(map(tokens, own))]
    rounds = sum(answer.rounds for answer in every)
    return Figures(
        speed(every), statistics.fmean(gains) if gains else 1.0, sum(map(tokens, every)) / rounds if rounds else 1.0
    )
