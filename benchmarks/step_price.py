"""Cost of a step of the target compared with reading its weights, of more nodes of a draft tree, and of prompts.

    python benchmarks/step_price.py smollm2-135m target.dtype=float32 --json docs/results/step/step_price_float32.json
    python benchmarks/step_price.py --shape 8b --rows 1 16 48 64 --json FILE      # random weights, on the GPU if any

In one process, taking turns: torch's own operations (`torch`) and the step that an evaluation has, which is one call of
`models/kernels/cpu_layers.h` on a CPU and a compiled forward elsewhere (`evaluation`). After each turn the weights are
read once, which is the least that a step can cost. Medians over turns, and the fastest turn. Then prompts, in turns
too.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from parts.shapes import SHAPES, random_target
from parts.timing import Work, benchmark_parser, in_turns, write_figures

from draftsmith.errors import exit_with_one_sentence
from draftsmith.eval.bench.bandwidth import WeightReading
from draftsmith.eval.decoding.session import TargetSession, open_session
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.kernels.cpu_kernels import pack_linears
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.loading import load_recipe

WARM_UP_TURNS = 3
PROMPT_TOKENS = (64, 500)


def bushy(size: int) -> TreeShape:
    """Return a tree of `size` nodes with the root, with two children per node."""
    return TreeShape.of((-1, *((node - 1) // 2 for node in range(1, size))))


def step_prices(
    sessions: dict[str, TargetSession],
    reading: WeightReading,
    rows: list[int],
    context_tokens: int,
    turns: int,
    prompts_tokens: Sequence[int] = (),
) -> dict[str, Any]:
    """Return medians over turns of the seconds of every session's forward by rows, of prompts and of a read."""
    works: dict[str, Work] = {}
    for name, session in sessions.items():
        session.prefill([1] * context_tokens)
        # A warm-up, as the caches hold another session's weights.
        works[f"{name} again"] = partial(session.forward_tree, DraftTree([1], bushy(1)))
        for count in rows:
            works[f"{name} {count}"] = partial(session.forward_tree, DraftTree([1] * count, bushy(count)))
    reads: list[float | None] = []
    works["read"] = lambda: reads.append(reading.seconds())
    device = next(iter(sessions.values())).device
    times_s = in_turns(works, device, turns, WARM_UP_TURNS)
    prompts: dict[str, Work] = {
        f"{name} {count}": partial(session.prefill, [1] * count)
        for count in prompts_tokens
        for name, session in sessions.items()
    }
    prompts_s = in_turns(prompts, device, turns, WARM_UP_TURNS)
    assert reading.bytes is not None  # only a mixture of experts has none
    read_s = median(filter(None, reads))
    figures: dict[str, Any] = {
        "weights_bytes": reading.bytes,
        "read_s": read_s,
        "read_bytes_per_s": reading.bytes / read_s,
    }
    for name in sessions:
        medians = {count: median(times_s[f"{name} {count}"]) for count in rows}
        fastest = {count: min(times_s[f"{name} {count}"]) for count in rows}
        single = medians[min(medians)]
        figures[name] = {
            "step_s": single,
            "tokens_per_s": 1 / single,
            "share_of_reading": read_s / single,
            "rows": {
                str(count): {"seconds": spent, "steps": spent / single, "fastest_s": fastest[count]}
                for count, spent in medians.items()
            },
            "prompts": {str(count): {"seconds": median(prompts_s[f"{name} {count}"])} for count in prompts_tokens},
        }
    return figures


@exit_with_one_sentence()
def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("recipe", nargs="?", default="quickstart")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape in place of the recipe's target")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 5, 8, 13, 16, 32])
    parser.add_argument("--context", type=int, default=224, help="tokens in the cache")
    parser.add_argument("--turns", type=int, default=15)
    arguments = parser.parse_args()
    rows = sorted({1, *arguments.rows})
    recipe = load_recipe(arguments.recipe, arguments.overrides).target
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plain, target = (
        random_target(arguments.shape, device) if arguments.shape else load_target(recipe)[0] for _ in range(2)
    )
    plain.set_attn_implementation(recipe.attn_implementation)
    pack_linears(target)
    length = max(arguments.context + 2 * max(rows), *PROMPT_TOKENS)
    sessions = {
        "torch": TargetSession(plain, length),
        "evaluation": open_session(target, length, None, same_size=False),
    }
    result = {
        "target": arguments.shape or recipe.gguf_file or recipe.model,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "context_tokens": arguments.context,
        **step_prices(sessions, WeightReading(target), rows, arguments.context, arguments.turns, PROMPT_TOKENS),
    }
    print(f"reading {result['weights_bytes'] / 1e6:.0f} MB: {1e3 * result['read_s']:.2f} ms")
    for name in sessions:
        side = result[name]
        costs = ", ".join(f"{count}: {each['steps']:.2f}" for count, each in side["rows"].items())
        prompts = ", ".join(f"{count}: {1e3 * each['seconds']:.0f} ms" for count, each in side["prompts"].items())
        print(
            f"{name}: a step {1e3 * side['step_s']:.2f} ms ({side['tokens_per_s']:.1f}/s, "
            f"{side['share_of_reading']:.0%} of it reading); rows in steps: {costs}; prompts: {prompts}"
        )
    write_figures(arguments, result)


if __name__ == "__main__":
    main()
