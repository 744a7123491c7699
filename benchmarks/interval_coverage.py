"""How often an interval of 95 % holds the truth: the studentised bootstrap of the report beside the percentile one.

    python benchmarks/interval_coverage.py [--trials 1000] [--json FILE]

Questions are drawn from populations whose truth is known: lengths of answers are log-normal, tau varies from question
to question (a mean of 2.2 and a standard deviation of 0.6 in the first task, further ones draft a little better), and
so do seconds. Settings are what evaluations ask: a few questions pooled, and n of each of six tasks that count alike.
"""

from typing import Any

import numpy as np
from parts.timing import benchmark_parser, write_figures
from tqdm import tqdm

from draftsmith.eval.report.bootstrap import LEVEL, Figure, QuestionSums, figure_of, interval, resamples, speedup, tau

POPULATION = 200_000
SETTINGS = {
    "5 pooled": (5,),
    "13 pooled": (13,),
    "80 pooled": (80,),
    "2 of 6 tasks": (2,) * 6,
    "10 of 6 tasks": (10,) * 6,
}


def draw(counts: tuple[int, ...], chance: np.random.Generator) -> QuestionSums:
    """Draw so many questions of each task."""
    columns, tasks = [], []
    for task, count in enumerate(counts):
        length = chance.lognormal(4.5, 0.6, count)
        tau_q = 1 + chance.gamma(4.0, 0.3, count) * (1 + 0.15 * task)
        step_q = tau_q * chance.lognormal(0.0, 0.12, count) * 0.85  # tokens for the seconds of one plain step
        columns.append([length, length / tau_q, length, length / step_q, length, length])
        tasks += [str(task)] * count
    kept, rounds, tokens, seconds, baseline_tokens, baseline_seconds = np.concatenate(columns, axis=1)
    of_tasks = tuple(tasks) if len(counts) > 1 else None
    return QuestionSums(kept, rounds, tokens, seconds, baseline_tokens, baseline_seconds, of_tasks)


def percentile_interval(figure: Figure, sums: QuestionSums) -> list[float]:
    """Take the resampled figures' own quantiles."""
    counts_rq = resamples(sums.strata)
    figures_r = np.zeros(len(counts_rq))
    parts = list(sums.by_task())
    for places, own in parts:
        over_r, under_r = (
            np.prod([counts_rq[:, places] @ getattr(own, name) for name in names], axis=0)
            for names in (figure.over, figure.under)
        )
        figures_r += over_r / under_r / len(parts)
    low, high = np.percentile(figures_r, [100 * (1 - LEVEL) / 2, 100 * (1 + LEVEL) / 2])
    return [float(low), float(high)]


def coverage(counts: tuple[int, ...], trials: int) -> dict[str, Any]:
    """Return, of both figures, how many of the intervals hold the truth, and the median width of each kind."""
    truth_sums = draw(tuple(POPULATION for _ in counts), np.random.default_rng(0))
    chance, figures = np.random.default_rng(1), {"tau": tau, "speedup": speedup}
    truths = {name: figure_of(figure, truth_sums) for name, figure in figures.items()}
    found: dict[str, dict[str, list[tuple[bool, float]]]] = {name: {} for name in figures}
    for _ in tqdm(range(trials), desc=f"{counts[0]} x {len(counts)}"):
        sums = draw(counts, chance)
        for name, figure in figures.items():
            for kind, ends in (
                ("studentised", interval(figure, sums)),
                ("percentile", percentile_interval(figure, sums)),
            ):
                assert ends is not None
                found[name].setdefault(kind, []).append((ends[0] <= truths[name] <= ends[1], ends[1] - ends[0]))
    return {
        name: {
            kind: {
                "coverage": sum(holds for holds, _ in each) / trials,
                "width_median": float(np.median([width for _, width in each])),
            }
            for kind, each in kinds.items()
        }
        for name, kinds in found.items()
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    arguments = parser.parse_args()
    figures = {name: coverage(counts, arguments.trials) for name, counts in SETTINGS.items()}
    for name, rows in figures.items():
        for figure, kinds in rows.items():
            shares = ", ".join(f"{kind} {100 * each['coverage']:.1f} %" for kind, each in kinds.items())
            print(f"{name:>14} {figure:>8}: {shares}")
    write_figures(arguments, {"trials": arguments.trials, "settings": figures})


if __name__ == "__main__":
    main()
