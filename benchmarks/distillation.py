"""The `transformers` engine against `generate` of transformers in padded batches: tokens/s on the same prompts.

    python benchmarks/distillation.py smollm2-135m --json docs/results/machinery/distillation.json

Greedy, one process, alternating. The prompts are the first turns of the recipe's conversations; an answer ends with its
end token or after `data.distill.max_new_tokens`. `generate` gets batches of prompts of like length, padded on the left,
and waits for the slowest row of each; its answers count to their end tokens. Answers are compared token by token: in
fp32 a near-tie may fall either way, as between any two batches of `generate` itself.
"""

import argparse
import statistics
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.engines.engine import Completion, GenerationSettings, Request
from draftsmith.data.engines.transformers_engine import TransformersEngine
from draftsmith.data.sources.counts import SourceCounts
from draftsmith.data.sources.mixture import load_conversations
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.data.tokens.end_ids import answer_end_ids
from draftsmith.eval.commands.target_decoder import TargetDecoder
from draftsmith.models.target.loading import load_generation_config, load_target
from draftsmith.models.target.packed_linear import pack_linears
from draftsmith.recipes.errors import exit_with_one_sentence
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.results import write_result

Answers = list[list[int]]


def by_the_engine(target: Any, prompts: Answers, settings: GenerationSettings, end_ids: Any, batch: int) -> Answers:
    """In the order of the prompts."""
    longest = max(map(len, prompts))
    engine = TransformersEngine(TargetDecoder(target, batch, longest, settings.max_new_tokens, end_ids), batch)
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), prompt, [], settings, 0))
    answers: dict[str, list[int]] = {}
    while len(answers) < len(prompts):
        for key, outcome in engine.collect():
            assert isinstance(outcome, Completion)
            answers[key] = outcome.token_ids or []
    return [answers[str(number)] for number in range(len(prompts))]


def by_generate(target: Any, prompts: Answers, settings: GenerationSettings, end_ids: Any, batch: int) -> Answers:
    """In the order of the prompts, each to its first end token."""
    answers: dict[int, list[int]] = {}
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for start in range(0, len(prompts), batch):
        numbers = by_length[start : start + batch]
        width = max(len(prompts[number]) for number in numbers)
        ids = torch.tensor([[end_ids[0]] * (width - len(prompts[n])) + prompts[n] for n in numbers])
        mask = torch.tensor([[0] * (width - len(prompts[n])) + [1] * len(prompts[n]) for n in numbers])
        out = target.generate(
            ids, attention_mask=mask, max_new_tokens=settings.max_new_tokens, do_sample=False,
            eos_token_id=list(end_ids), pad_token_id=end_ids[0],
        )[:, width:].tolist()  # fmt: skip
        for number, answer in zip(numbers, out, strict=True):
            end = next((place for place, token in enumerate(answer) if token in end_ids), len(answer))
            answers[number] = answer[: end + 1]
    return [answers[number] for number in range(len(prompts))]


@exit_with_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="quickstart", help="whose target, prompts and settings to use")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=40, help="of both sides")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    settings = GenerationSettings(max_new_tokens=recipe.data.distill.max_new_tokens)
    # transformers as it is loaded by its own means: with attention that repeats keys and values.
    theirs, tokenizer = load_target(recipe.target)
    theirs.set_attn_implementation("sdpa")
    ours, _ = load_target(recipe.target)
    pack_linears(ours)
    end_ids = tuple(answer_end_ids(load_generation_config(recipe.target), tokenizer))
    conversations = islice(load_conversations(recipe, SourceCounts(), tokenizer), arguments.prompts)
    prompts = [prompt_token_ids(tokenizer, conversation.turns[:1]) for conversation in conversations]
    sides = {"engine": (by_the_engine, ours), "generate": (by_generate, theirs)}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    answers: dict[str, Answers] = {}
    for run in range(arguments.runs):
        for side in list(sides)[:: 1 if run % 2 == 0 else -1]:
            answer, target = sides[side]
            answer(target, prompts[:2], GenerationSettings(max_new_tokens=4), end_ids, 2)  # warm-up
            began = time.perf_counter()
            with torch.inference_mode():
                answers[side] = answer(target, prompts, settings, end_ids, arguments.batch_size)
            rates[side].append(sum(map(len, answers[side])) / (time.perf_counter() - began))
            print(f"run {run + 1}, {side}: {rates[side][-1]:.0f} tokens/s", flush=True)
    ratios = [ours_ / theirs_ for ours_, theirs_ in zip(rates["engine"], rates["generate"], strict=True)]
    equal = sum(a == b for a, b in zip(answers["engine"], answers["generate"], strict=True))
    figures = {
        "tokens_per_s": rates,
        "ratio_median": statistics.median(ratios),
        "ratios": ratios,
        "prompts": len(prompts),
        "equal_answers": equal,
        "batch_size": arguments.batch_size,
        "max_new_tokens": settings.max_new_tokens,
    }
    print(f"{figures['ratio_median']:.2f}x; {equal} of {len(prompts)} answers equal")
    if arguments.json:
        write_result(arguments.json, figures)


if __name__ == "__main__":
    main()
