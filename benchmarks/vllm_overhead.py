"""What our vllm engine costs: its tokens per second against the same prompts given to `LLM.generate` at once.

    make vllm-env
    .venv-vllm/bin/python benchmarks/vllm_overhead.py --json docs/results/machinery/vllm_overhead.json

One process, one LLM, the same sampling parameters (greedy, no detokenising), alternating, with an emptied prefix cache
before each pass. `LLM.generate` has all prompts from the beginning; our engine gets them as the distiller gives them:
never more than its concurrency in flight. On a CPU set `VLLM_ENABLE_V1_MULTIPROCESSING=0` and `OMP_NUM_THREADS`.
"""

import argparse
import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

from draftsmith.data.engines.engine import Completion, EngineSetting, GenerationSettings, Request
from draftsmith.data.engines.vllm_engine import VllmEngine, sampling_parameters
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.data.tokens.end_ids import answer_end_ids
from draftsmith.models.target.loading import load_generation_config, load_tokenizer, target_location
from draftsmith.recipes.errors import exit_with_one_sentence
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.results import write_result


def through_our_engine(engine: VllmEngine, requests: list[Request]) -> list[list[int]]:
    waiting, answers = deque(requests), dict[str, list[int]]()
    in_flight = 0
    while waiting or in_flight:
        while waiting and in_flight < engine.concurrency:
            engine.submit(waiting.popleft())
            in_flight += 1
        for key, outcome in engine.collect():
            in_flight -= 1
            assert isinstance(outcome, Completion)
            answers[key] = outcome.token_ids or []
    return [answers[request.key] for request in requests]


def through_generate(engine: VllmEngine, requests: list[Request]) -> list[list[int]]:
    outputs = engine.llm.generate(
        [{"prompt_token_ids": request.prompt_ids} for request in requests],
        [sampling_parameters(request, engine.end_ids) for request in requests],
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def measure(engine: VllmEngine, requests: list[Request], runs: int) -> dict[str, Any]:
    """Tokens per second of both, run by run; ratios above 1: we are faster."""
    rates: dict[str, list[float]] = {"engine": [], "generate": []}
    different = 0
    for run in range(runs + 1):
        answers = {}
        # Who begins alternates too.
        sides = [("engine", through_our_engine), ("generate", through_generate)]
        for name, side in sides if run % 2 else reversed(sides):
            engine.llm.reset_prefix_cache()
            began = time.perf_counter()
            answers[name] = side(engine, requests)
            seconds = time.perf_counter() - began
            if run > 0:  # the first warms up
                rates[name].append(sum(map(len, answers[name])) / seconds)
        different = sum(ours != theirs for ours, theirs in zip(answers["engine"], answers["generate"], strict=True))
    ratios = [ours / theirs for ours, theirs in zip(rates["engine"], rates["generate"], strict=True)]
    return {
        "ratio_median": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "answers_that_differ": different,
        "answers": len(requests),
    }


@exit_with_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="quickstart", help="whose target and questions to use")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--kv-cache-mib", type=int, default=256)
    arguments = parser.parse_args()
    options = {
        "concurrency": arguments.concurrency, "enforce_eager": True, "max_model_len": 1024,
        "kv_cache_memory_bytes": arguments.kv_cache_mib << 20,
    }  # fmt: skip
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    tokenizer = load_tokenizer(recipe.target)
    end_ids = tuple(answer_end_ids(load_generation_config(recipe.target), tokenizer))
    setting = EngineSetting(recipe, tokenizer, target_location(recipe.target), end_ids)
    engine = VllmEngine.make(VllmEngine.Options.model_validate(options), setting)
    assert isinstance(engine, VllmEngine)
    turns = [turn for question in load_questions(recipe.eval.questions) for turn in question.turns]
    sampling = GenerationSettings(max_new_tokens=arguments.new_tokens)
    requests = [
        Request(str(n), prompt_token_ids(tokenizer, [Turn("user", turns[n % len(turns)])]), [], sampling, n)
        for n in range(arguments.prompts)
    ]
    result = measure(engine, requests, arguments.runs)
    result |= {"target": recipe.target.model, "threads": os.environ.get("OMP_NUM_THREADS")}
    result["options"] = vars(arguments) | {"json": None}
    engine.close()
    low, high = result["ratio_spread"]
    print(f"our engine: {result['ratio_median']:.3f}x LLM.generate ({low:.3f} to {high:.3f}), tokens/s:", end=" ")
    print(", ".join(f"{name} {rate:.0f}" for name, rate in result["tokens_per_s"].items()))
    if arguments.json:
        write_result(arguments.json, result)


if __name__ == "__main__":
    main()
