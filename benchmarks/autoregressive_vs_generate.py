"""Is our autoregressive baseline an honest one? Our loop against `generate` of transformers: same model, same process.

    python benchmarks/autoregressive_vs_generate.py [RECIPE] --json benchmarks/results/autoregressive_vs_generate.json

The ratio is the median over alternating pairs of generate's seconds over ours; >= 1: ours is at least as fast.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.chat_tokens import prompt_token_ids
from draftsmith.data.conversations import Turn
from draftsmith.eval.decoding import generate
from draftsmith.eval.methods.method import Autoregressive
from draftsmith.eval.question_list import load_questions
from draftsmith.eval.sampling import Sampling
from draftsmith.eval.session import TargetSession
from draftsmith.models.target import load_target
from draftsmith.recipes.errors import exit_with_one_sentence
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import write_atomically


def transformers_generate(target: Any, prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
    """Greedy ids and seconds, not stopped by an end token."""
    began = time.perf_counter()
    ids = target.generate(
        torch.tensor([prompt], device=target.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=target.device),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens = ids[0, len(prompt) :].tolist()
    return tokens, time.perf_counter() - began


def measure(target: Any, prompt: list[int], new_tokens: int, repeats: int) -> dict[str, Any]:
    with TargetSession(target, len(prompt) + new_tokens) as session:
        generate(session, Autoregressive(), prompt, Sampling(), new_tokens)
    transformers_generate(target, prompt, new_tokens)
    ours, theirs, loop = [], [], []
    for _ in range(repeats):
        # The session's feature hook must not slow `generate` down: it is taken off in between.
        with TargetSession(target, len(prompt) + new_tokens) as session:
            out = generate(session, Autoregressive(), prompt, Sampling(), new_tokens)
        ids, seconds = transformers_generate(target, prompt, new_tokens)
        if ids != out.ids:
            raise SystemExit("error: our greedy tokens differ from those of transformers: that is a bug")
        ours.append(out.wall_time_s)
        theirs.append(seconds)
        loop.append((out.wall_time_s - out.prefill_s - out.draft_s - out.verify_s) / max(1, out.rounds))
    return {
        "ours_s": statistics.median(ours),
        "transformers_generate_s": statistics.median(theirs),
        "ratio": statistics.median(their / our for their, our in zip(theirs, ours, strict=True)),
        "loop_python_ms_per_token": 1000 * statistics.median(loop),
        "new_tokens": new_tokens,
        "prompt_tokens": len(prompt),
        "repeats": repeats,
    }


@exit_with_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="quickstart", help="whose target and questions to use")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    target, tokenizer = load_target(recipe.target)
    question = load_questions(recipe.eval.questions)[0]
    prompt = prompt_token_ids(tokenizer, [Turn("user", question.turns[0])])
    result = measure(target, prompt, arguments.new_tokens, arguments.repeats)
    result |= {"target": recipe.target.model, "threads": torch.get_num_threads(), "platform": platform.platform()}
    print(json.dumps(result, indent=2))
    if arguments.json:
        write_atomically(arguments.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
