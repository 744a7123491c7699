"""Our loop against transformers' own decoding: speculative sampling, prompt lookup, and no drafting at all.

    python benchmarks/against_transformers.py --json benchmarks/results/against_transformers.json

Same target, same draft model, same prompts, same number of tokens, greedy, one process, alternating. The draft model is
the one of `recipes/embedded-draft_model.yaml` if that was trained (`draftsmith train embedded-draft_model`), else some
layers of the target, which draft badly: both sides then draft equally badly.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.eval.decoding.loop import generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.draft_model import DraftModelDecoder
from draftsmith.eval.methods.drafter import DrafterMethod
from draftsmith.eval.methods.prompt_lookup import PromptLookup
from draftsmith.eval.trees.builders import tree_builder
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.drafters.draft_model import DraftModel
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.errors import exit_with_one_sentence
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import RunFolder, write_atomically
from draftsmith.recipes.schema import MethodRecipe

GREEDY = Sampling()


def transformers_seconds(target: Any, prompt: list[int], new_tokens: int, **how: Any) -> tuple[list[int], float]:
    """Greedy ids and seconds, not stopped by an end token."""
    began = time.perf_counter()
    ids = target.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **how,
    )
    return ids[0, len(prompt) :].tolist(), time.perf_counter() - began


def compare(
    target: Any, method_of: Callable[[], Method], how: dict[str, Any], prompts: list[list[int]], tokens: int, runs: int
) -> dict[str, Any]:
    """Seconds of both sides over all prompts, alternating; ratios above 1: we are faster."""
    longest = max(map(len, prompts)) + tokens
    ratios, tau = [], []
    for run in range(runs + 1):
        ours = theirs = 0.0
        for prompt in prompts:
            # The session's feature hook must not slow `generate` down: it is taken off in between.
            with TargetSession(target, longest) as session:
                out = generate(session, method_of(), prompt, GREEDY, tokens)
            ids, seconds = transformers_seconds(target, prompt, tokens, **how)
            if ids != out.ids:
                raise SystemExit("error: our greedy tokens differ from those of transformers: that is a bug")
            ours += out.wall_time_s
            theirs += seconds
            tau += out.accept_lengths
        if run > 0:  # the first warms up
            ratios.append(theirs / ours)
    return {"ratio_median": statistics.median(ratios), "ratios": ratios, "tau": statistics.fmean(tau)}


@exit_with_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="embedded-draft_model", help="of a draft model")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gamma", type=int, default=4, help="tokens that the draft model drafts in a round")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    target, tokenizer = load_target(recipe.target)
    folder = RunFolder(recipe).drafter
    trained = (folder / "config.json").is_file()
    drafter = load_drafter(folder, target) if trained else DraftModel.from_target(target, recipe.drafter.options)
    assert isinstance(drafter, DraftModel)
    draft = drafter.causal_lm(target)
    # transformers changes this number from round to round unless told not to.
    draft.generation_config.num_assistant_tokens = arguments.gamma
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    questions = load_questions(recipe.eval.questions, 1)[: arguments.prompts]
    prompts = [prompt_token_ids(tokenizer, [Turn("user", question.turns[0])]) for question in questions]
    longest = max(map(len, prompts)) + arguments.new_tokens
    decoder = DraftModelDecoder(draft, arguments.gamma, longest, target.config.vocab_size)
    builder = tree_builder(MethodRecipe(name="sps"), decoder)
    cases: dict[str, tuple[Callable[[], Method], dict[str, Any]]] = {
        "autoregressive": (Autoregressive, {}),
        "speculative_sampling": (
            lambda: DrafterMethod("sps", decoder, builder, GREEDY),
            {"assistant_model": draft},
        ),
        "prompt_lookup": (
            lambda: PromptLookup("pld", max_ngram=3, num_tokens=10, match="earliest", partial=True),
            {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3},
        ),
    }
    result: dict[str, Any] = {
        "target": recipe.target.model,
        "draft_model_trained": trained,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "torch": torch.__version__,
    }
    for name, (method_of, how) in cases.items():
        result[name] = compare(target, method_of, how, prompts, arguments.new_tokens, arguments.runs)
        print(f"{name}: {result[name]['ratio_median']:.2f}x transformers (tau {result[name]['tau']:.2f})")
    if arguments.json:
        write_atomically(arguments.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
