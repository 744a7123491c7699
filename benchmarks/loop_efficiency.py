"""How much of the possible speedup reaches the user: measured / (tau * t_target_step / (t_draft + t_verify_forward)).

    python benchmarks/loop_efficiency.py [RECIPE] --json docs/results/machinery/loop_efficiency.json

Uses the recipe's trained drafter (`runs/<name>/drafter`), or an untrained one of the recipe's kind where there is none:
what the loop itself costs does not depend on how good the drafter is.
"""

import json
import tempfile
from pathlib import Path

import torch
from parts.timing import benchmark_parser, write_figures

from draftsmith.data.sources.questions import load_questions
from draftsmith.eval.bench.measured_methods import compiles, load_models, measured_methods
from draftsmith.eval.bench.records import RecordLog
from draftsmith.eval.bench.spec_bench import SpecBench
from draftsmith.eval.report.summary import summarize_timing
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.loading import load_target
from draftsmith.models.target.packed_linear import pack_linears
from draftsmith.recipes.errors import exit_with_one_sentence
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import RunFolder


@exit_with_one_sentence()
def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("recipe", nargs="?", default="quickstart", help="whose target, drafter and questions to use")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--questions-per-category", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    folder = RunFolder(recipe)
    trained = (folder.drafter / "config.json").is_file()
    if trained:
        target, tokenizer, drafters = load_models(recipe)
    else:
        target, tokenizer = load_target(recipe.target)
        pack_linears(target)
        torch.manual_seed(recipe.seed)
        kind = load_drafter_class(recipe.drafter.kind)
        drafters = {folder.drafter: kind.from_target(target, recipe.drafter.options).to(target.device).eval()}
    questions = load_questions(recipe.eval.questions, arguments.questions_per_category)
    tokens, seed = recipe.eval.max_new_tokens, recipe.seed
    bench = SpecBench(target, tokenizer, questions, tokens, seed, compiles=compiles(recipe))
    methods = measured_methods(recipe, drafters, target, tokenizer, bench.session.max_length_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        log = RecordLog(Path(scratch) / "records.jsonl")
        bench.run(methods, log, arguments.repeats, warmup_questions=2)
        timing = summarize_timing(list(log))
    setting = {"trained": trained, "target": recipe.target.model, "threads": torch.get_num_threads()}
    result = {"timing": timing, **setting}
    print(json.dumps(result, indent=2))
    write_figures(arguments, result)


if __name__ == "__main__":
    main()
