"""How much data does a drafter need? tau against distilled answer tokens, on nested parts of one distilled set.

    python benchmarks/data_scaling.py smollm2-135m smollm2-135m-eagle smollm2-135m-medusa \\
        --json docs/results/drafters/data_scaling.json --picture docs/pictures/data_scaling.png

The first recipe must be distilled (`draftsmith distill`), with its features on disk where `data.features.source` is
`offline` (all layers that any of the recipes reads). Every recipe is trained on every part of its tokens
(`data.train_answer_tokens`), as its `train:` says (in epochs: less data are fewer steps; `train.max_steps=N` gives all
the same), all are measured side by side, and a line over log2 of the tokens is fitted (a power law's third
parameter is not determined by few sizes). What is trained or measured is not done again by the same command.

Also compared: the tau of a chain that follows from accuracies by depth, 1 + a1 + a1 a2 + ..., and the measured one.
Accuracies are on held-out examples if `data.eval_rows_frac` is set, else on training examples; EAGLE trains one depth,
which is used for all.
"""

import json
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
from parts.timing import benchmark_parser, write_figures

from draftsmith.data.distill.token_dataset import answer_lengths, load_tokens
from draftsmith.errors import UserError, exit_with_one_sentence
from draftsmith.eval.commands.compare import joint_recipe
from draftsmith.eval.commands.evaluate import evaluate
from draftsmith.eval.report.summary import OVERALL
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import DRAFTER_KIND, MethodConfig, Recipe
from draftsmith.train.drafter.rows import split_rows
from draftsmith.train.drafter.stage import train_drafter

SHAPES = ("chain", "tree")
REFERENCE_TOKENS = 100_000
LEAST_SIZES = 3


@dataclass(frozen=True)
class ScalingFit:
    """tau(n) = tau_at_100k + tau_per_doubling * log2(n / 100,000), n in answer tokens.

    `residual`: standard deviation of the points from the line, with n - 2 degrees of freedom.
    """

    tau_at_100k: float
    tau_per_doubling: float
    tau_per_doubling_error: float
    residual: float
    least_tokens: int
    most_tokens: int

    def tau(self, answer_tokens: float) -> float:
        return self.tau_at_100k + self.tau_per_doubling * float(np.log2(answer_tokens / REFERENCE_TOKENS))


def fit_scaling(answer_tokens: list[int], taus: list[float]) -> ScalingFit:
    """Fit the line by least squares to the tau of each training, of at least three different sizes.

    Raises:
        ValueError: Too few sizes.
    """
    if len(set(answer_tokens)) < LEAST_SIZES:
        raise ValueError(f"a line needs {LEAST_SIZES} sizes of data at least, not {sorted(set(answer_tokens))}")
    doublings = np.log2(np.array(answer_tokens, dtype=np.float64) / REFERENCE_TOKENS)
    slope, intercept = np.polyfit(doublings, np.array(taus, dtype=np.float64), 1)
    left = np.array(taus) - intercept - slope * doublings
    residual = float(np.sqrt((left**2).sum() / (len(taus) - 2)))
    spread = float(np.sqrt(((doublings - doublings.mean()) ** 2).sum()))
    return ScalingFit(
        float(intercept), float(slope), residual / spread, residual, min(answer_tokens), max(answer_tokens)
    )


def recipe_of_part(recipe: Recipe, size: int) -> Recipe:
    """Return the recipe under a separate name, measured with its chain and its first other tree.

    Raises:
        UserError: The recipe's methods have no chain, or no other tree.
    """
    own = [method for method in recipe.eval.methods if method.kind == DRAFTER_KIND and method.lenience == 1]
    methods: list[MethodConfig] = []
    for shape in SHAPES:
        method = next((method for method in own if (method.tree == "chain") == (shape == "chain")), None)
        if method is None:
            raise UserError(f"recipe {recipe.name} measures no {shape}: add one to its eval.methods")
        methods.append(method.model_copy(update={"name": shape}))
    evaluation = recipe.eval.model_copy(update={"methods": methods, "temperatures": recipe.eval.temperatures[:1]})
    data = recipe.data.model_copy(update={"train_answer_tokens": size})
    return recipe.model_copy(update={"name": f"{recipe.name}-{size}", "eval": evaluation, "data": data})


def train_all(recipes: list[Recipe], sizes: list[int]) -> list[tuple[Recipe, dict[str, Any]]]:
    """Train every recipe on every part of the first one's tokens, unless it is trained; with the figures of each."""
    tokens = load_tokens(RunFolder(recipes[0]), recipes[0].name)
    trained = []
    for size in sizes:
        part, _ = split_rows(tokens, recipes[0].data.eval_rows_frac, size)
        answer_tokens = sum(answer_lengths(part))
        for recipe in recipes:
            own = recipe_of_part(recipe, size)
            RunFolder(own).read_from(RunFolder(recipes[0]))
            report = train_drafter(own)
            config = json.loads((RunFolder(own).drafter / "config.json").read_text(encoding="utf-8"))
            depth = (
                config["num_masks"] + 1 if "num_masks" in config else config.get("num_heads") or config["draft_depth"]
            )
            row = {"run": own.name, "kind": own.drafter.kind, "answer_tokens": answer_tokens, "steps": report.steps}
            trained.append((own, {**row, "epochs": report.epochs, **depth_figures(report.history, depth)}))
            print(report.sentence(), flush=True)
    return trained


def expected_chain_tau(accuracies: list[float], depth: int) -> float:
    """Return 1 + a1 + a1 a2 + ..., tau of independent depths; a depth that was not trained counts as the last one."""
    by_depth = [*accuracies, *[accuracies[-1]] * (depth - len(accuracies))][:depth]
    return 1 + sum(accumulate(by_depth, mul))


def depth_figures(history: list[dict[str, float]], depth: int) -> dict[str, Any]:
    """Return the last accuracies that training logged, and the tau of a chain that they predict."""
    for prefix in ("eval_", ""):
        name = f"{prefix}accuracy_depth"
        log = next((entry for entry in reversed(history) if f"{name}1" in entry), None)
        if log is not None:
            accuracies = [log[f"{name}{d}"] for d in range(1, len(log) + 1) if f"{name}{d}" in log]
            return {
                "accuracy_on_rows_kept_out": bool(prefix),
                "accuracy_by_depth": accuracies,
                "chain_tau_expected": expected_chain_tau(accuracies, depth),
            }
    return {"accuracy_on_rows_kept_out": None, "accuracy_by_depth": [], "chain_tau_expected": None}


def fit_by_shape(rows: list[dict[str, Any]]) -> dict[str, dict[str, ScalingFit]]:
    """Fit a line for each shape and kind of drafter."""
    fits: dict[str, dict[str, ScalingFit]] = {shape: {} for shape in SHAPES}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        for shape in SHAPES:
            taus = [row[f"{shape}_tau"] for row in mine]
            fits[shape][kind] = fit_scaling([row["answer_tokens"] for row in mine], taus)
    return fits


def draw(rows: list[dict[str, Any]], fits: dict[str, dict[str, ScalingFit]], file: Path) -> None:
    """Draw tau against tokens with the fitted lines, and the chain's tau against what accuracies made one expect."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (scaling, expected) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for number, kind in enumerate(fits["tree"]):
        mine, colour = [row for row in rows if row["kind"] == kind], f"C{number}"
        tokens = [row["answer_tokens"] for row in mine]
        for shape, mark, style in (("tree", "o", "-"), ("chain", "x", ":")):
            taus = [row[f"{shape}_tau"] for row in mine]
            scaling.plot(tokens, taus, mark, color=colour, label=f"{kind}, {shape}")
            scaling.plot(tokens, [fits[shape][kind].tau(count) for count in tokens], style, color=colour)
        known = [row for row in mine if row["chain_tau_expected"] is not None]
        points = ([row[key] for row in known] for key in ("chain_tau_expected", "chain_tau"))
        expected.plot(*points, "x", color=colour, label=kind)
    ends = [end(row["chain_tau"] for row in rows) for end in (min, max)]
    expected.plot(ends, ends, "k:", linewidth=0.8)
    scaling.set(xlabel="distilled answer tokens", ylabel="tau", title="tau against data")
    scaling.set_xscale("log", base=2)
    expected.set(xlabel="1 + a1 + a1 a2 + ...", ylabel="tau of the chain", title="accuracy by depth against tau")
    for axes in (scaling, expected):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


@exit_with_one_sentence()
def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("recipes", nargs="+", help="the first is distilled; and section.key=value for all of them")
    parser.add_argument("--tokens", type=int, nargs="+", default=[50_000, 100_000, 200_000, 400_000])
    parser.add_argument("--name", default="data-scaling", help="the folder of the common table under runs_dir")
    parser.add_argument("--picture", type=Path, help="draw it there")
    options = parser.parse_args()
    overrides = [argument for argument in options.recipes if "=" in argument]
    recipes = [load_recipe(argument, overrides) for argument in options.recipes if "=" not in argument]
    if not recipes:
        raise UserError("name at least one recipe, for example smollm2-135m smollm2-135m-eagle smollm2-135m-medusa")
    trained = train_all(recipes, sorted(set(options.tokens)))
    summary = evaluate(joint_recipe([own for own, _ in trained], options.name))
    taus = {row["method"]: row["tau"] for row in summary if row["category"] == OVERALL}
    rows = [row | {f"{shape}_tau": taus[f"{own.name}/{shape}"] for shape in SHAPES} for own, row in trained]
    for row in rows:
        tokens, chain, tree = (row[key] for key in ("answer_tokens", "chain_tau", "tree_tau"))
        print(f"{row['run']}: {tokens:,} answer tokens, tau {chain:.2f} / {tree:.2f}")
    fits = fit_by_shape(rows)
    for kind, fit in fits["tree"].items():
        print(f"{kind}, tree: {fit.tau_per_doubling:+.2f} ± {fit.tau_per_doubling_error:.2f} for each doubling")
    if options.picture:
        draw(rows, fits, options.picture)
    as_values = {shape: {kind: vars(fit) for kind, fit in by_kind.items()} for shape, by_kind in fits.items()}
    target = recipes[0].target.gguf_file or recipes[0].target.model
    write_figures(options, {"target": target, "rows": rows, "fits": as_values})


if __name__ == "__main__":
    main()
