"""`draftsmith tune`: find the fastest draft tree for this drafter on this machine.

1. Trace: greedy answers with one large tree (`TRACED_NODES`), recording which of its nodes were accepted and how
   confident the drafter was of them. The best smaller tree consists of the most confident nodes, so the trace shows how
   many tokens any size and depth would have accepted: tau(size, depth). The same is done with the longest chain, for
   shorter chains, and with lookups among the tree's paths.
2. Cost: seconds of a verification forward by its number of nodes, and of a draft by its depth.
3. Measure: the shapes of the largest tau / (draft + verification), the adaptive tree, whose size changes every round,
   and the current default are measured in turns; the fastest is written into the drafter's config, where `tree: tuned`
   finds it. So tuning never makes decoding slower than the default.

If the questions belong to several tasks, all tasks have equal weight, as in the headline of an evaluation: tau is the
mean of the tasks' taus, and the fastest tree has the largest mean over tasks of its speed over the default's.

The trace is an approximation: with another tree, rounds would start at other positions. That is why step 3 measures.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import answer_end_ids
from draftsmith.errors import UserError
from draftsmith.eval.bench.costs import SIZES, MeasuredCosts, draft_seconds
from draftsmith.eval.bench.measured_methods import compile_decoder, drafter_folder, load_models
from draftsmith.eval.bench.spec_bench import first_turn_prompts
from draftsmith.eval.commands.artifacts import resolve_tuned, tree_settings, write_tuned
from draftsmith.eval.commands.console import console, print_table
from draftsmith.eval.decoding.generate import AnswerRecord, Round, generate
from draftsmith.eval.decoding.method import Method
from draftsmith.eval.decoding.session import open_session
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.eval.trees.adaptive import Curve, on_curve
from draftsmith.files import write_atomically
from draftsmith.models.base.registry import is_published
from draftsmith.models.decoding.recurrent import chains_only
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.loading import load_target_config, longest_sequence_tokens
from draftsmith.progress import progress_bar
from draftsmith.recipes.run_folder import RunFolder, with_run_lock
from draftsmith.recipes.schema import DRAFTER_KIND, MethodConfig, Recipe

GREEDY = Sampling()
TRACED_NODES, TRACED_BRANCH = 48, 8
FINALISTS = 3
ADAPTIVE_NODES = 32


Rounds = list[list[int]]  # for every round the accepted path, as each node's rank by confidence, from 0
Trace = list[Rounds]  # one for every task


@dataclass(frozen=True)
class Candidate:
    """A tree with its tau estimated from the trace and its estimated costs in seconds per round."""

    method: MethodConfig
    tau: float
    t_draft_s: float
    t_verify_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tau / (self.t_draft_s + self.t_verify_s)

    @property
    def figures(self) -> dict[str, float]:
        return {"tau": self.tau, "t_draft_s": self.t_draft_s, "t_verify_s": self.t_verify_s}


def traced_path(round_: Round) -> list[int]:
    """Return the accepted nodes without the root, as ranks from 0 by confidence; in a chain, by depth."""
    tree = round_.tree
    order = list(range(1, len(tree)))
    if tree.log_confidence is not None:
        order.sort(key=tree.log_confidence.__getitem__, reverse=True)
    return [order.index(node) for node in round_.verification.path[1:]]


def expected_tau(trace: Trace, depth: int, nodes: int) -> float:
    """Return the tau, a mean over tasks, that a smaller tree or chain within the traced one would have had.

    Args:
        depth: Depth of the smaller tree.
        nodes: Number of its nodes, without the root.
    """

    def accepted(rounds: Rounds) -> float:
        return statistics.fmean(len(list(takewhile(lambda rank: rank < nodes, path[:depth]))) for path in rounds)

    return 1 + statistics.fmean(accepted(rounds) for rounds in trace if rounds)


def candidates(
    trace: Trace,
    chain_trace: Trace,
    lookup_trace: Trace,
    depths: Sequence[int],
    verify_curve: Curve,
    draft_s: dict[int, float],
) -> list[Candidate]:
    """Return every shape of tree with its estimates, the fastest first.

    Args:
        trace, chain_trace, lookup_trace: Traces of the large tree, of the longest chain, of the tree with lookups.
        depths: Depths of the drafter, ascending.
        verify_curve: (number of nodes with the root, seconds of a verification forward), ascending.
        draft_s: Seconds of a draft, by depth.
    """
    shapes = []
    for depth in depths:
        cut = None if depth == depths[-1] else depth
        chain = MethodConfig(name="chain", tree="chain", max_depth=cut)
        trees = [(chain, depth, expected_tau(chain_trace, depth, depth))]
        for nodes in SIZES:
            branch = min(nodes, TRACED_BRANCH)
            name = f"best-first-{nodes}"
            tree = MethodConfig(name=name, tree="best_first", nodes=nodes, branch=branch, max_depth=cut)
            if nodes > depth:
                trees.append((tree, nodes, expected_tau(trace, depth, nodes)))
            if cut is None:
                looking = tree.model_copy(update={"name": f"{tree.name}-lookup", "lookup": True})
                # No limit on depth: lookups may be deeper than the drafter's depths.
                trees.append((looking, nodes, expected_tau(lookup_trace, nodes, nodes)))
        for method, size, tau in trees:
            shapes.append(Candidate(method, tau, draft_s[depth], on_curve(verify_curve, size + 1)))
    return sorted(shapes, key=lambda candidate: -candidate.tokens_per_s)


@dataclass
class Tuned:
    """Result of tuning.

    measured: for the default and each finalist (method, tokens per second, mean over tasks of its speed over the
    default's), medians over turns; the last figure decides. tasks: number of tasks. promised: all estimates.
    saved: the chosen tree was written to the drafter's config.
    """

    default: MethodConfig
    chosen: MethodConfig
    measured: list[tuple[MethodConfig, float, float]]
    tasks: int
    promised: list[Candidate]
    verify_curve: Curve
    saved: bool = True

    def as_json(self) -> dict[str, Any]:
        return {
            "chosen": tree_settings(self.chosen),
            "default": tree_settings(self.default),
            "tasks": self.tasks,
            "measured": [
                {**tree_settings(method), "tokens_per_s": speed, "against_default": gain}
                for method, speed, gain in self.measured
            ],
            "promised": [{**tree_settings(each.method), **each.figures} for each in self.promised],
            "verify_curve": self.verify_curve,
        }

    def show(self) -> None:
        promised = {describe(c.method): f"{c.tau:.2f}" for c in self.promised}
        rows = [
            (name := describe(method), promised.get(name, "-"), f"{speed:.0f}", f"{gain:.2f}x")
            for method, speed, gain in sorted(self.measured, key=lambda each: -each[2])
        ]
        headings = ("tree", "tau from the trace", "tokens/s", "against the default")
        over = f"; tau and the last column: means over {self.tasks} tasks of equal weight" if self.tasks > 1 else ""
        print_table(headings, rows, f"trees, measured side by side{over}")
        best = f"[bold]{describe(self.chosen)}[/bold]"
        if self.saved:
            console.print(f"{best} is now used by methods with `tree: tuned`")
            return
        console.print(
            f"{best}; the drafter is from the Hub, so its config is not changed: put into the recipe's method"
        )
        tree = {key: value for key, value in tree_settings(self.chosen).items() if value is not None}
        console.print(json.dumps(tree), markup=False)


def describe(method: MethodConfig) -> str:
    """Describe a method's tree in words."""
    depth = "" if method.max_depth is None else f" to depth {method.max_depth}"
    size = f" of {method.nodes} nodes" if method.best_first else ""
    return f"{method.tree}{size}{depth}{' with lookups' if method.lookup else ''}"


@with_run_lock("tune")
def tune(recipe: Recipe, questions: int = 14, new_tokens: int = 96, turns: int = 5) -> Tuned:
    """Find the fastest tree and write it into the drafter's config.

    The drafter is the run's own, or the first method's if all methods name other drafters. Nothing is written to a
    drafter from the Hub.

    Args:
        questions: Number of questions, spread over the recipe's.
        new_tokens: Longest answer.
        turns: Measurements of each finalist.

    Raises:
        UserError: The target verifies chains only, there is no trained drafter, no draft was accepted, or no question
            fits the target's context.
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
    limit = longest_sequence_tokens(target)
    loaded = load_questions(recipe.eval.question_sets)
    task = {question.question_id: question.task_name for question in loaded}
    first_turns = first_turn_prompts(tokenizer, loaded, questions, new_tokens, limit)
    prompts, tasks = [ids for _, ids in first_turns], [task[name] for name, _ in first_turns]
    end_ids = frozenset(answer_end_ids(target.generation_config, tokenizer))
    length = max(map(len, prompts)) + new_tokens
    decoder = compile_decoder(recipe, drafter.decoder(length))
    # The models are loaded outside inference mode: packed layers need their weights' version counters.
    with torch.inference_mode(), open_session(target, length, recipe.eval.compile) as session:
        session.read_layers(drafter.feature_layers)
        large = MethodConfig(name="large", tree="best_first", nodes=TRACED_NODES, branch=TRACED_BRANCH)
        looking = large.model_copy(update={"name": "large-lookup", "lookup": True})

        def answer(
            drafting: Method, prompt: list[int], on_round: Callable[[Round], None] | None = None
        ) -> AnswerRecord:
            return generate(session, drafting, prompt, GREEDY, new_tokens, end_ids, on_round=on_round)

        def traced(method: MethodConfig) -> Trace:
            drafting = build_tree_drafter(method, decoder, GREEDY)
            by_task: dict[str, Rounds] = {name: [] for name in tasks}
            with progress_bar(len(prompts), f"trace {method.name}", "question") as progress:
                for name, prompt in zip(tasks, prompts, strict=True):
                    rounds: list[Round] = []
                    answer(drafting, prompt, rounds.append)
                    by_task[name] += map(traced_path, rounds)
                    progress.update()
            return list(by_task.values())

        trace, chain_trace, lookup_trace = map(traced, (large, MethodConfig(name="chain"), looking))
        if not any(map(any, trace)):
            raise UserError(f"no draft token of the drafter in {folder} was accepted: train it first")
        deepest = getattr(decoder, "num_depths", None) or drafter.config.num_depths
        depths = list(range(1, deepest + 1))
        costs = MeasuredCosts(session, prompts[0])
        draft_s = {depth: draft_seconds(session, decoder, depth, prompts[0], new_tokens) for depth in depths}
        promised = candidates(trace, chain_trace, lookup_trace, depths, costs.curve, draft_s)
        finalists = [default]
        adaptive = MethodConfig(name="adaptive", tree="adaptive", nodes=ADAPTIVE_NODES, branch=TRACED_BRANCH)
        adaptive = adaptive.model_copy(update={"lookup": promised[0].method.lookup})
        for method in [*(candidate.method for candidate in promised), adaptive]:
            is_new = tree_settings(method) not in map(tree_settings, finalists)
            if is_new and (len(finalists) <= FINALISTS or method is adaptive):
                finalists.append(method)
        methods = [build_tree_drafter(finalist, decoder, GREEDY) for finalist in finalists]
        for drafting in methods:
            costs.set_costs(drafting)
        speeds = _speeds(answer, methods, list(zip(tasks, prompts, strict=True)), turns)
    measured = [(method, *figures) for method, figures in zip(finalists, speeds, strict=True)]
    chosen = max(measured, key=lambda each: each[2])[0]
    saved = default.drafter is None or not is_published(default.drafter)
    tuned = Tuned(default, chosen, measured, len(set(tasks)), promised, costs.curve, saved)
    if saved:
        write_tuned(folder, chosen)
    write_atomically(RunFolder(recipe).eval / "tuned.json", json.dumps(tuned.as_json(), indent=2) + "\n")
    return tuned


def _speeds(
    answer: Callable[[Method, list[int]], AnswerRecord],
    methods: Sequence[Method],
    prompts: list[tuple[str, list[int]]],
    turns: int,
) -> list[tuple[float, float]]:
    """Measure each method's tokens per second, and the mean over tasks of its speed over the first's, without prefill.

    Both are medians over turns; in a turn the methods answer each question one after the other.

    Args:
        prompts: (task, prompt ids).
    """
    speeds: list[list[tuple[float, float]]] = [[] for _ in methods]
    with progress_bar(turns + 1, "measure", "turn") as progress:
        for turn in range(turns + 1):
            counted = [{task: [0.0, 0.0] for task, _ in prompts} for _ in methods]  # tokens and seconds
            for index, (task, prompt) in enumerate(prompts):
                shift = (turn + index) % len(methods)
                for place in [*range(shift, len(methods)), *range(shift)]:
                    out = answer(methods[place], prompt)
                    counted[place][task][0] += sum(out.accept_lengths)
                    counted[place][task][1] += out.wall_time_s - out.prefill_s
            if turn > 0:  # the first warms up
                for figures, sums in zip(speeds, counted, strict=True):
                    figures.append(speed_and_gain(sums, counted[0]))
            progress.update()
    return [
        (statistics.median(speed for speed, _ in figures), statistics.median(gain for _, gain in figures))
        for figures in speeds
    ]


def speed_and_gain(sums: dict[str, list[float]], reference: dict[str, list[float]]) -> tuple[float, float]:
    """Return tokens per second over all tasks, and the mean over tasks of the speed over the first method's.

    Args:
        sums: [tokens, seconds] of the method, by task.
        reference: The same of the first method. Tasks without tokens, whose answers are the prefill's token alone, are
            left out of the mean.
    """
    tokens, seconds = map(sum, zip(*sums.values(), strict=True))
    decoded = [task for task, (count, _) in reference.items() if count]
    gains = [sums[task][0] / sums[task][1] * reference[task][1] / reference[task][0] for task in decoded]
    return tokens / seconds, statistics.fmean(gains) if gains else 1.0
