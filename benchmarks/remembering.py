"""`draftsmith serve --remember` under traffic: tokens a round with and without what other conversations were told.

    python benchmarks/remembering.py --traffic FILE:COUNT ... [--recipe R] [--new-tokens 64] [--json FILE]

The same conversations twice through the server's own worker, with lookups in the conversation alone and with those in
all earlier ones too, which begin with nothing; each file by itself. Greedy answers are the same: so are the tokens.
"""

from typing import Any

import numpy as np
from parts.timing import benchmark_parser, write_figures
from parts.traffic import Traffic, conversations, interval, name_of

from draftsmith.eval.commands.artifacts import with_tuned_trees
from draftsmith.eval.commands.demo import shipped_recipe
from draftsmith.eval.decoding.loop import AnswerRecord
from draftsmith.eval.serving.server import Worker
from draftsmith.eval.trees.path_lookup import Memory
from draftsmith.recipes.loading import load_recipe

NODES, BRANCH = 6, 3


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--traffic", nargs="+", required=True)
    parser.add_argument("--recipe")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    recipe = with_tuned_trees(shipped_recipe() if options.recipe is None else load_recipe(options.recipe))
    tree = {"tree": "best_first", "nodes": NODES, "branch": BRANCH, "lookup": True}
    recipe.eval.methods = [recipe.eval.methods[0].model_copy(update=tree)]
    worker, figures = Worker(recipe, 4), dict[str, Any]()

    def asked(spec: str, memory: Memory | None) -> list[AnswerRecord]:
        worker.memory = memory
        traffic = Traffic(worker, options.new_tokens, 1.0)
        return [end.record for questions in conversations(spec) for end, _ in traffic.ask(questions)]

    def client() -> None:
        for spec in options.traffic:
            memory = Memory()
            plain, remembering = asked(spec, None), asked(spec, memory)
            assert [each.ids for each in plain] == [each.ids for each in remembering]
            told = [(a, b) for a, b in zip(plain, remembering, strict=True) if a.rounds]
            tokens = np.array([len(a.ids) - 1 for a, _ in told], dtype=float)
            rounds = [np.array([each[way].rounds for each in told], dtype=float) for way in (0, 1)]
            seconds = [sum(sum(each[way].round_s) for each in told) for way in (0, 1)]
            found: dict[str, Any] = {
                "tau": [float(tokens.sum() / each.sum()) for each in rounds],
                "tokens_per_s": [float(tokens.sum() / each) for each in seconds],
                "ngrams": len(memory),
                **interval(tokens, *rounds),
            }
            figures[name_of(spec)] = found
            low, high = found["low"], found["high"]
            print(
                f"{name_of(spec)}, {len(told)} answers: tau {found['tau'][0]:.2f} -> {found['tau'][1]:.2f}, "
                f"{found['ratio']:.3f}x ({low:.3f} to {high:.3f}); "
                f"{found['tokens_per_s'][0]:.0f} -> {found['tokens_per_s'][1]:.0f} tokens/s",
                flush=True,
            )

    worker.answer(client)
    write_figures(options, {"new_tokens": options.new_tokens, "nodes": NODES, "traffic": figures})


if __name__ == "__main__":
    main()
