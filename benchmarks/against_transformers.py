"""Our decoding against what transformers has of its own: `generate`, assisted generation, prompt lookup.

    python benchmarks/against_transformers.py --json docs/results/machinery/against_transformers.json
    python benchmarks/against_transformers.py smollm2-135m-draft_model --ours smollm2-135m smollm2-135m-eagle

One process, the same target, prompts, token limit and end tokens, greedy; all sides take turns prompt by prompt, and
every answer is compared with `generate`'s: exit code 1 if one differs. transformers' target is a copy as a user has it,
ours is packed as in an evaluation. Assisted generation uses the draft model of the first recipe, if it was trained
(`draftsmith train embedded-draft_model`), else some layers of the target, which draft badly for both sides. It runs
with `--gamma` tokens a round, as ours does, and with transformers' defaults. `--ours`: recipes whose trained drafters
and other methods stand for us; their best over transformers' best speculation is what a user gains by changing.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.end_ids import answer_end_ids
from draftsmith.eval.bench.arms import Arm, load_models, make_arms
from draftsmith.eval.bench.costs import give_costs
from draftsmith.eval.bench.divergence import divergence_at, first_difference
from draftsmith.eval.bench.spec_bench import first_turn_prompts
from draftsmith.eval.commands.compare import joint_recipe
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
from draftsmith.models.target.features import FINAL_FEATURES
from draftsmith.models.target.loading import load_target, longest_sequence_tokens
from draftsmith.recipes.errors import UserError, exit_with_one_sentence
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.results import write_result
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import MethodRecipe, Recipe

GREEDY = Sampling()
BASELINE = "transformers: generate"
# Ours with the same draft: of the same model, or of the same n-grams.
SAME_DRAFT = {
    "ours: autoregressive": BASELINE,
    "ours: speculative sampling": "transformers: assisted generation",
    "ours: prompt lookup": "transformers: prompt lookup",
}


@dataclass
class Timed:
    """What one side did in one run. `accept_lengths`: tokens of each round; transformers does not say its own."""

    tokens: int = 0
    seconds: float = 0.0
    accept_lengths: list[int] = field(default_factory=list)


Answer = tuple[list[int], float, list[int]]  # ids, seconds, tokens of each round
Side = Callable[[list[int]], Answer]


def transformers_side(
    target: PreTrainedModel, tokens: int, end_ids: frozenset[int], draft: Any = None, **how: Any
) -> Side:
    """`generate` with these arguments; of assisted generation `draft` is (model, its settings)."""

    if draft is not None:
        how["assistant_model"] = draft[0]

    def answer(prompt: list[int]) -> Answer:
        if draft is not None:  # whose settings another side may have changed
            draft[0].generation_config = draft[1]
        begin_s = time.perf_counter()
        ids = target.generate(
            torch.tensor([prompt], device=target.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=target.device),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=sorted(end_ids) or None,
            pad_token_id=0,
            **how,
        )
        return ids[0, len(prompt) :].tolist(), time.perf_counter() - begin_s, []

    return answer


def our_side(
    session: TargetSession, method: Method, layers: tuple[int, ...], tokens: int, end_ids: frozenset[int]
) -> Side:
    def answer(prompt: list[int]) -> Answer:
        session.read_layers(layers)
        out = generate(session, method, prompt, GREEDY, tokens, end_ids)
        return out.ids, out.wall_time_s, out.accept_lengths

    return answer


def take_turns(
    sides: dict[str, Side], prompts: list[list[int]], runs: int, is_tie: Callable[[int, list[int], list[int]], bool]
) -> dict[str, Any]:
    """By side: tokens/s of each run, tau, and how many answers of the first run are not the baseline's.

    Args:
        is_tie: Given a prompt's number, the baseline's answer and one that differs.
    """
    timed: dict[str, list[Timed]] = {name: [] for name in sides}
    different: dict[str, list[tuple[int, list[int], list[int]]]] = {name: [] for name in sides}
    for run in range(runs + 1):
        for name in sides:
            timed[name].append(Timed())
        for number, prompt in enumerate(prompts):
            expected: list[int] = []
            for name, side in sides.items():
                ids, seconds, accept_lengths = side(prompt)
                expected = ids if name == BASELINE else expected
                if run == 0 and ids != expected:
                    different[name].append((number, expected, ids))
                mine = timed[name][-1]
                mine.tokens += len(ids)
                mine.seconds += seconds
                mine.accept_lengths += accept_lengths
    found = {}
    for name, all_runs in timed.items():
        counted = all_runs[1:]  # the first warms up
        lengths = [length for one in counted for length in one.accept_lengths]
        found[name] = {
            "tokens_per_s": statistics.median(one.tokens / one.seconds for one in counted),
            "tokens_per_s_of_runs": [one.tokens / one.seconds for one in counted],
            "tau": statistics.fmean(lengths) if lengths else None,
            "different_answers": len(different[name]),
            "numerical_ties": sum(is_tie(*answers) for answers in different[name]),
        }
    return found


def ratio(sides: dict[str, Any], ours: str, theirs: str) -> dict[str, Any]:
    """Of tokens/s, run by run: above 1 we are faster."""
    speeds = (sides[name]["tokens_per_s_of_runs"] for name in (ours, theirs))
    ratios = [mine / other for mine, other in zip(*speeds, strict=True)]
    return {"ours": ours, "theirs": theirs, "ratio_median": statistics.median(ratios), "ratios": ratios}


def conclusions(sides: dict[str, Any], our_drafters: list[str]) -> dict[str, Any]:
    """The same draft on both sides; and our best method over transformers' best that speculates."""
    pairs = [ratio(sides, ours, theirs) for ours, theirs in SAME_DRAFT.items() if ours in sides]
    speculative = [name for name in sides if name.startswith("transformers: ") and name != BASELINE]
    speed = {name: side["tokens_per_s"] for name, side in sides.items()}
    their_best = max(speculative, key=speed.__getitem__)
    our_best = max(our_drafters, key=speed.__getitem__)
    return {"same_draft": pairs, "best": ratio(sides, our_best, their_best)}


def draft_model_of(recipe: Recipe, target: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
    """The recipe's draft model as a model of its own, attached to this target, and whether it was trained."""
    folder = RunFolder(recipe).drafter
    trained = (folder / "config.json").is_file()
    drafter = load_drafter(folder, target) if trained else DraftModel.from_target(target, recipe.drafter.options)
    if not isinstance(drafter, DraftModel):
        raise UserError(f"recipe {recipe.name} has a {recipe.drafter.kind} drafter: name one with a draft_model first")
    return drafter.causal_lm(target), trained


def settings_of(draft: PreTrainedModel, gamma: int) -> dict[str, GenerationConfig]:
    """Of assisted generation: gamma in every round, and what transformers does unless told otherwise."""
    constant = GenerationConfig.from_dict(draft.generation_config.to_dict())
    constant.num_assistant_tokens = gamma
    constant.num_assistant_tokens_schedule = "constant"
    constant.assistant_confidence_threshold = 0.0
    return {"assisted generation": constant, "assisted generation, defaults": draft.generation_config}


@exit_with_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="embedded-draft_model", help="of a draft model")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for every recipe")
    parser.add_argument("--ours", nargs="+", default=[], help="recipes of trained drafters that stand for us")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gamma", type=int, default=4, help="tokens that the draft model drafts in a round")
    arguments = parser.parse_args()
    overrides = [*arguments.overrides, "eval.temperatures=[0.0]"]
    recipe = load_recipe(arguments.recipe, overrides)
    ours = [load_recipe(name, overrides) for name in arguments.ours]
    for other in ours:
        if other.target != recipe.target:
            raise UserError(f"recipes {recipe.name} and {other.name} have different targets: override target.model")
    joint = joint_recipe(ours, "ours") if ours else None
    theirs, _ = load_target(recipe.target)
    target, tokenizer, drafters = load_models(
        joint or recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"methods": []})})
    )
    questions = load_questions(recipe.eval.questions, 1)
    tokens, limit = arguments.new_tokens, longest_sequence_tokens(target)
    prompts = [ids for _, ids in first_turn_prompts(tokenizer, questions, arguments.prompts, tokens, limit)]
    longest = max(map(len, prompts)) + tokens
    end_ids = frozenset(answer_end_ids(target.generation_config, tokenizer))
    draft, trained = draft_model_of(recipe, theirs)
    decoder = DraftModelDecoder(draft, arguments.gamma, longest, target.config.vocab_size)
    our_methods: dict[str, tuple[Method, tuple[int, ...]]] = {
        name: (method, (FINAL_FEATURES,))
        for name, method in (
            ("autoregressive", Autoregressive()),
            (
                "speculative sampling",
                DrafterMethod("sps", decoder, tree_builder(MethodRecipe(name="s"), decoder), GREEDY),
            ),
            ("prompt lookup", PromptLookup("pld", max_ngram=3, num_tokens=10, match="earliest", partial=True)),
        )
    }
    drafting = list(our_methods)[1:]
    arms: list[Arm] = []
    if joint is not None:
        arms = [arm for arm in make_arms(joint, drafters, target, tokenizer, longest) if arm.lenience == 1][1:]
        our_methods |= {arm.method.name: (arm.method, arm.feature_layers) for arm in arms}
        drafting = [arm.method.name for arm in arms]
    with TargetSession(target, longest) as session:
        give_costs(session, arms, prompts[0])
        sides = {BASELINE: transformers_side(theirs, tokens, end_ids)}
        for name, settings in settings_of(draft, arguments.gamma).items():
            sides[f"transformers: {name}"] = transformers_side(theirs, tokens, end_ids, (draft, settings))
        sides["transformers: prompt lookup"] = transformers_side(
            theirs, tokens, end_ids, prompt_lookup_num_tokens=10, max_matching_ngram_size=3
        )
        for name, (method, layers) in our_methods.items():
            sides[f"ours: {name}"] = our_side(session, method, layers, tokens, end_ids)

        def is_tie(number: int, expected: list[int], ids: list[int]) -> bool:
            where = first_difference(expected, ids)
            return (
                where is not None
                and divergence_at(where, theirs, session, number, prompts[number], expected, ids).is_tie
            )

        found = take_turns(sides, prompts, arguments.runs, is_tie)
    result = {
        "target": recipe.target.gguf_file or recipe.target.model,
        "draft_model_trained": trained,
        "prompts": len(prompts),
        "new_tokens": tokens,
        "gamma": arguments.gamma,
        "threads": torch.get_num_threads(),
        "sides": found,
        **conclusions(found, [f"ours: {name}" for name in drafting]),
    }
    report(result)
    if arguments.json:
        write_result(arguments.json, result)
    if any(side["different_answers"] != side["numerical_ties"] for side in found.values()):
        raise SystemExit("error: greedy answers differ from those of `generate` (above), and not at a numerical tie")


def report(result: dict[str, Any]) -> None:
    for name, side in result["sides"].items():
        tau = "" if side["tau"] is None else f", tau {side['tau']:.2f}"
        print(
            f"{name}: {side['tokens_per_s']:.1f} tokens/s{tau}, {side['different_answers']} different answers, "
            f"of which {side['numerical_ties']} at a numerical tie"
        )
    for pair in [*result["same_draft"], result["best"]]:
        print(f"{pair['ours']} over {pair['theirs']}: {pair['ratio_median']:.2f}x")


if __name__ == "__main__":
    main()
