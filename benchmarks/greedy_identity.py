"""Greedy answers of every method of a recipe, token by token against the autoregressive loop's, on many questions.

    make table
    python benchmarks/greedy_identity.py runs/table/recipe.yaml --prompts 80

`draftsmith prove` shows the same, tells ties from bugs and tests sampled answers too; this only counts, and is quick
enough for every drafter on every question.
"""

import argparse
from pathlib import Path

from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.end_ids import answer_end_ids
from draftsmith.eval.bench.arms import load_models, make_arms
from draftsmith.eval.bench.spec_bench import first_turn_prompts
from draftsmith.eval.decoding.loop import generate
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.models.target.loading import longest_sequence_tokens
from draftsmith.recipes.errors import exit_with_one_sentence
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.results import write_result


@exit_with_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="whose target, methods and questions to use")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--prompts", type=int, default=80, help="first turns")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, help="write the result there too")
    options = parser.parse_args()
    recipe = load_recipe(options.recipe, [*options.overrides, "eval.temperatures=[0.0]"])
    target, tokenizer, drafters = load_models(recipe)
    questions = load_questions(recipe.eval.questions, None)
    limit = longest_sequence_tokens(target)
    asked = first_turn_prompts(tokenizer, questions, options.prompts, options.new_tokens, limit)
    prompts = [ids for _, ids in asked]
    longest = max(map(len, prompts)) + options.new_tokens
    end_ids = frozenset(answer_end_ids(target.generation_config, tokenizer))
    expected: list[list[int]] = []  # the first arm is the baseline
    result = {}
    with TargetSession(target, longest) as session:
        for arm in make_arms(recipe, drafters, target, tokenizer, longest):
            session.read_layers(arm.feature_layers)
            outs = [generate(session, arm.method, ids, arm.sampling, options.new_tokens, end_ids) for ids in prompts]
            answers = [out.ids for out in outs]
            expected = expected or answers
            different = sum(answer != other for answer, other in zip(answers, expected, strict=True))
            rounds = sum(out.rounds for out in outs)
            tau = sum(sum(out.accept_lengths) for out in outs) / rounds
            result[arm.method.name] = {"tokens": sum(map(len, answers)), "different_answers": different, "tau": tau}
            print(f"{arm.method.name}: {different} of {len(answers)} answers differ, tau {tau:.2f}", flush=True)
    if options.json:
        write_result(options.json, result)


if __name__ == "__main__":
    main()
