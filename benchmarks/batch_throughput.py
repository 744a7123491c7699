"""Tokens per second at batch sizes beyond 1: batched speculative against batched autoregressive decoding.

    python benchmarks/batch_throughput.py [RECIPE] --json docs/results/machinery/batch_throughput.json
    python benchmarks/batch_throughput.py quickstart --drafter runs/quickstart/drafter --batch-sizes 1 8 32

Both sides are the same loop (`eval/decoding/batch_loop.py`) with the same prompts, through a queue: a row whose answer
has ended takes the next prompt. Prefills are included and run one prompt at a time on both sides. Runs alternate, the
first of each warms up. The methods are those of the recipe that draft with its drafter. Answers that differ from the
baseline's are counted: 0 in fp32 but for ties; 16-bit floats round differently for every number of rows.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.end_ids import answer_end_ids
from draftsmith.eval.bench.spec_bench import first_turn_prompts
from draftsmith.eval.decoding.answer import AnswerRecord
from draftsmith.eval.decoding.batch_loop import generate_batch
from draftsmith.eval.decoding.batch_session import BatchSession
from draftsmith.eval.decoding.method import AUTOREGRESSIVE, Autoregressive, Method
from draftsmith.eval.kept.tuned_tree import resolve_tuned
from draftsmith.eval.methods.drafter import DrafterMethod
from draftsmith.eval.trees.builders import tree_builder
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.decoding.protocols import SequenceDecoder
from draftsmith.models.target.loading import load_target, longest_sequence_tokens
from draftsmith.models.target.packed_linear import pack_linears
from draftsmith.recipes.errors import UserError, exit_with_one_sentence
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.results import write_result
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import DRAFTER_KIND, MethodRecipe

GREEDY = Sampling()
Measured = tuple[list[AnswerRecord], float]


def measure(target: Any, drafter: Drafter, recipes: list[MethodRecipe], batch_size: int, job: dict[str, Any]) -> Any:
    """Rows of the table for one batch size. job: prompts, new_tokens, end_ids, runs."""
    length = max(map(len, job["prompts"])) + job["new_tokens"]
    decoders = drafter.batch_decoders(length, batch_size)
    sides: dict[str, Callable[[], list[Method]]] = {AUTOREGRESSIVE: lambda: [Autoregressive() for _ in decoders]}
    for recipe in recipes:
        sides[recipe.name] = partial(drafting, recipe, decoders)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    taus: dict[str, float] = {}
    tokens: dict[str, int] = {}
    expected: list[list[int]] | None = None
    differing: dict[str, int] = {}
    # Both sides hand the features over; the baseline's cost of that is a view.
    with BatchSession(target, length, batch_size, drafter.feature_layers) as session:
        for run in range(job["runs"] + 1):
            for name, methods_of in sides.items():
                outs, took = timed(session, methods_of(), job)
                ids = [out.ids for out in outs]
                expected = expected or ids
                differing[name] = sum(mine != theirs for mine, theirs in zip(ids, expected, strict=True))
                tokens[name] = sum(map(len, ids))
                taus[name] = statistics.fmean(kept for out in outs for kept in out.accept_lengths)
                if run > 0:  # the first warms up
                    seconds[name].append(took)
    return [
        {"batch_size": batch_size, "method": name, "tau": taus[name], "answers_differing": differing[name]}
        | speed_of(name, tokens, seconds)
        for name in sides
    ]


def drafting(recipe: MethodRecipe, decoders: Sequence[SequenceDecoder]) -> list[Method]:
    """A method for each row."""
    return [DrafterMethod(recipe.name, decoder, tree_builder(recipe, decoder), GREEDY) for decoder in decoders]


def timed(session: BatchSession, methods: list[Method], job: dict[str, Any]) -> Measured:
    session.synchronize()
    began = time.perf_counter()
    outs = generate_batch(session, methods, job["prompts"], GREEDY, job["new_tokens"], job["end_ids"])
    session.synchronize()
    return outs, time.perf_counter() - began


def speed_of(name: str, tokens: dict[str, int], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Tokens per second of a side; `ratio`: to the baseline's run beside it, above 1 where drafting pays."""
    rates, plain_rates = ([tokens[side] / took for took in seconds[side]] for side in (name, AUTOREGRESSIVE))
    ratios = [mine / plain for mine, plain in zip(rates, plain_rates, strict=True)]
    return {
        "tokens_per_s_median": statistics.median(rates),
        "tokens_per_s_std": statistics.stdev(rates) if len(rates) > 1 else None,
        "ratio_median": statistics.median(ratios),
        "ratio_std": statistics.stdev(ratios) if len(ratios) > 1 else None,
    }


@exit_with_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="quickstart", help="whose target, methods and questions to use")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--drafter", type=Path, help="folder of a trained drafter; by default the recipe's run's")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompts", type=int, default=32, help="in the queue, at every batch size")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    folder = arguments.drafter or RunFolder(recipe).drafter
    target, tokenizer = load_target(recipe.target)
    drafter = load_drafter(folder, target)
    pack_linears(target)
    pack_linears(drafter)
    methods = [resolve_tuned(method, folder) for method in recipe.eval.methods if method.kind == DRAFTER_KIND]
    if not methods:
        raise UserError(f"recipe {recipe.name} has no method that drafts with its drafter: add one to eval.methods")
    questions = load_questions(recipe.eval.questions, recipe.eval.limit_per_category, recipe.eval.limit_per_task)
    limit = longest_sequence_tokens(target)
    prompts = first_turn_prompts(tokenizer, questions, arguments.prompts, arguments.new_tokens, limit)
    job = {
        "prompts": [ids for _, ids in prompts],
        "new_tokens": arguments.new_tokens,
        "end_ids": frozenset(answer_end_ids(target.generation_config, tokenizer)),
        "runs": arguments.runs,
    }
    rows = []
    for batch_size in arguments.batch_sizes:
        for row in measure(target, drafter, methods, batch_size, job):
            rows.append(row)
            print(
                f"batch {batch_size:3d}  {row['method']:20s} tau {row['tau']:.2f}  "
                f"{row['tokens_per_s_median']:8.1f} tokens/s  {row['ratio_median']:.2f}x autoregressive, "
                f"{row['answers_differing']} answers differ"
            )
    result = {
        "rows": rows,
        "prompts": len(prompts),
        "new_tokens": arguments.new_tokens,
        "runs": arguments.runs,
        "target": recipe.target.model,
        "drafter": str(folder),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
    }
    if arguments.json:
        write_result(arguments.json, result)


if __name__ == "__main__":
    main()
