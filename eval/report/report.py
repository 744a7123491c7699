"""The report of one evaluation: what both its forms are made of, and the table in the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report import text
from draftsmith.eval.report.baseline import MEANING, baseline_sentences
from draftsmith.eval.report.categories import parts_of_mt_bench, shown_categories
from draftsmith.eval.report.charts import series_name
from draftsmith.eval.report.seed_spread import seed_spread
from draftsmith.eval.report.summary import OVERALL
from draftsmith.eval.report.text import NOT_LOSSLESS, identity, number, only_ties

TAU_DEFINITION = (
    "tau = mean tokens committed per round, including the one token that the target itself contributes; "
    "without that bonus token the figure is tau_without_bonus"
)

SPEEDUP_DEFINITION = (
    "speedup = all tokens over all seconds, against the same of the baseline; by question, as Spec-Bench has it: the "
    "mean of the questions' tokens per second, against the baseline's; tau by question: the mean of the questions' tau"
)

LENIENCE_WARNING = (
    f"Rows marked {NOT_LOSSLESS!r} were measured with lenience below 1 (arXiv 2211.17192, A.5): their answers do not "
    "have the target's distribution, and their speedup was bought with that."
)


def headline(summary: list[dict[str, Any]]) -> str:
    """One sentence: the best method, how much faster, and whether the output stayed the same."""
    rows = [row for row in summary if row["category"] == OVERALL and row["method"] != AUTOREGRESSIVE]
    if not rows:
        return "Only the autoregressive baseline was measured."
    # What is not lossless only wins where nothing else was measured.
    best = max(rows, key=lambda row: (row["lossless"], row["speedup_mean"]))
    spread = "" if best["speedup_std"] is None else f" +- {best['speedup_std']:.2f}"
    sentence = (
        f"{series_name(best, summary)} generates {best['speedup_mean']:.2f}{spread} times as fast as the "
        f"autoregressive loop, at {best['tau']:.2f} tokens per round "
        f"({best['tau_without_bonus']:.2f} without the target's own)"
    )
    greedy = [row for row in rows if row["greedy_identical"] is not None]
    if not greedy:
        return sentence + "."
    whose = "the changed target's" if best.get("target_change") else "the target's"
    if all(row["greedy_identical"] for row in greedy):
        return sentence + f"; every greedy answer is identical to {whose}."
    if all(only_ties(row) for row in greedy):
        ties = sum(row["numerical_ties"] for row in greedy)
        return sentence + f"; the greedy answers are {whose}, but for {ties} that part from it at a numerical tie."
    return sentence + f"; NOT LOSSLESS: some greedy answers differ from {whose}."


def report_values(
    root: Path, facts: dict[str, Any], pictures: Iterable[Path], theory_pictures: Iterable[Path] = ()
) -> dict[str, Any]:
    """The facts, and what both forms of the report make of them; arguments as of `page/forms.py`."""
    summary, recipe = facts["summary"], facts["recipe"]
    return {
        **facts,
        "headline": headline(summary),
        "drafters": _drafters(facts["drafter_kinds"]),
        "target_name": text.target_name(recipe["target"]),
        "questions_name": text.place_name(recipe["eval"]["questions"]),
        "command": text.without_places(facts["command"], root),
        "target_change": facts.get("target_change"),
        "proof": proof_sentence(facts.get("proof")),
        "proof_figures": facts.get("proof"),
        "tau_definition": TAU_DEFINITION,
        "speedup_definition": SPEEDUP_DEFINITION,
        "lenience_warning": None if all(row["lossless"] for row in summary) else LENIENCE_WARNING,
        "overall": [row for row in summary if row["category"] == OVERALL],
        "seed_spread": seed_spread(summary),
        "by_category": _by_category(summary, [*shown_categories(summary), OVERALL]),
        "by_part": _by_category(summary, parts_of_mt_bench(summary)),
        "reduced": _with_draft_vocabulary(summary),
        "served": facts.get("served", []),
        "baseline_sentences": baseline_sentences(facts.get("baseline", [])),
        "baseline_meaning": MEANING,
        "theory": [row for row in facts["timing"] if row["method"] != AUTOREGRESSIVE],
        "pictures": _shown(root, pictures),
        "theory_pictures": _shown(root, theory_pictures),
        "next_steps": next_steps(summary, facts["timing"], recipe),
    }


def _with_draft_vocabulary(summary: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The overall rows of methods that cannot draft every token; earlier versions noted nothing of it."""
    overall = (row for row in summary if row["category"] == OVERALL)
    return [row for row in overall if row.get("decoded_coverage") is not None]


def _drafters(kinds: list[str]) -> str:
    """`an eagle drafter`, `medusa and parallel drafters`."""
    if not kinds:
        return "no trained drafter"
    if len(kinds) == 1:
        return f"{'an' if kinds[0][0] in 'aeiou' else 'a'} {kinds[0]} drafter"
    return f"{', '.join(kinds[:-1])} and {kinds[-1]} drafters"


def proof_sentence(proof: dict[str, Any] | None) -> str | None:
    """What `draftsmith prove` found, from its JSON."""
    if proof is None:
        return None
    greedy, sampled = proof["greedy"], proof["distribution"]
    left_out = proof.get("left_out", [])
    different = sum(len(row["divergences"]) for row in greedy)
    ties = sum(row["ties"] for row in greedy)
    lowest = min((row["p_value"] for row in sampled), default=1.0)
    impossible = sum(row["impossible"] for row in sampled)
    return (
        f"{'Proved' if proof['holds'] else 'NOT PROVED'}: {sum(row['tokens'] for row in greedy)} greedy tokens of "
        f"{len(greedy)} method(s), {different} different answer(s), of which {ties} at a numerical tie; "
        f"{sum(row['tokens'] for row in sampled)} sampled tokens, {impossible} impossible, smallest p-value "
        f"{lowest:.3f} (a test fails below {proof['significance']:.0e}); verifier by enumeration: error "
        f"{proof['enumeration_error']:.0e}." + (f" Not lossless, left out: {', '.join(left_out)}." if left_out else "")
    )


def next_steps(summary: list[dict[str, Any]], timing: list[dict[str, Any]], recipe: dict[str, Any]) -> list[str]:
    """What would make it faster, read off the numbers."""
    steps = []
    drafted = [row for row in timing if row["method"] != AUTOREGRESSIVE]
    if drafted:
        best = max(drafted, key=lambda row: row["speedup_with_prefill"])
        first = best["acceptance_by_depth"][:1]
        if not first or first[0] < 0.6:
            share = f"{first[0]:.0%}" if first else "none"
            steps.append(
                f"The first drafted token is kept in {share} of the rounds of {best['method']}: train on more "
                "conversations (data.conversations.limit) or for longer (train.num_train_epochs)."
            )
        if best["cost_ratio"] > 0.35:
            steps.append(
                f"Drafting costs {best['cost_ratio']:.2f} of a target step: fewer drafter layers or masks, or a larger "
                "target, would pay."
            )
        if best["loop_efficiency"] < 0.85:
            steps.append(
                f"{1 - best['loop_efficiency']:.0%} of the possible speedup is lost outside the models: measure on an "
                "idle machine, or with fewer threads (OMP_NUM_THREADS)."
            )
    if recipe["eval"]["runs"] < 3:
        steps.append("Set eval.runs=3 or more, so that the spread of the speedup means something.")
    if any(row["greedy_identical"] is False and not only_ties(row) for row in summary):
        steps.append(
            "Greedy answers differ, and not only at numerical ties: `draftsmith prove` shows where, and "
            "target.dtype=float64 whether rounding is the cause."
        )
    steps.append("Try other tree shapes (eval.methods) under another recipe name; the drafter needs no new training.")
    return steps


def print_table(
    summary: list[dict[str, Any]], console: Console | None = None, baseline: list[dict[str, Any]] | None = None
) -> None:
    """The summary in the terminal, and how good the baseline is.

    Args:
        baseline: Rows of `baseline_speeds`.
    """
    table = Table(title="acceptance and speedup", title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    # A long method wraps; figures never do.
    table.add_column("method", overflow="fold")
    table.add_column("category", no_wrap=True)
    for name in ("tau", "no bonus", "speedup", "by\nquestion", "same\ngreedy"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, rows in _by_method(summary).items():
        for row in rows:
            spread = "" if row["speedup_std"] is None else f" ± {row['speedup_std']:.2f}"
            cells = [number(row["tau"]), number(row["tau_without_bonus"]), f"{row['speedup_mean']:.2f}{spread}"]
            cells.append(number(row["speedup_by_question_mean"]))
            last = row is rows[-1]
            table.add_row(
                escape(name),
                escape(row["category"]),
                *cells,
                identity(row),
                end_section=last,
                style="bold" if last else "",
            )
    console = console or Console()
    console.print(table)
    over_seeds = seed_spread(summary)
    if over_seeds:
        title = "over training seeds (mean ± standard deviation)"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for heading in ("method", "T", "seeds", "tau", "speedup"):
            table.add_column(heading, overflow="fold")
        for found in over_seeds:
            figures = (f"{found[f'{key}_mean']:.2f} ± {found[f'{key}_std']:.2f}" for key in ("tau", "speedup"))
            table.add_row(escape(found["method"]), f"{found['temperature']:g}", str(found["seeds"]), *figures)
        console.print(table)
    sentences = baseline_sentences(baseline or [])
    for sentence in sentences:
        console.print(sentence)
    console.print(TAU_DEFINITION, style="italic")
    console.print(SPEEDUP_DEFINITION, style="italic")
    if sentences:
        console.print(MEANING, style="italic")
    if not all(row["lossless"] for row in summary):
        console.print(LENIENCE_WARNING, style="bold")
    for sentence in {row["target_change"] for row in summary if row.get("target_change")}:
        console.print(sentence, style="bold")


def _by_method(summary: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The baseline is 1 by definition and only shown when it is alone."""
    methods: dict[str, list[dict[str, Any]]] = {}
    for row in summary:
        methods.setdefault(series_name(row, summary), []).append(row)
    drafted = {name: rows for name, rows in methods.items() if rows[0]["method"] != AUTOREGRESSIVE}
    return drafted or methods


def _by_category(summary: list[dict[str, Any]], categories: list[str]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Of these categories every method's row, with the method's name."""
    named = [(name, row) for name, rows in _by_method(summary).items() for row in rows]
    return {category: [pair for pair in named if pair[1]["category"] == category] for category in categories}


def _shown(root: Path, pictures: Iterable[Path]) -> list[tuple[str, str]]:
    """Name and path for Markdown."""
    return [(file.stem, file.relative_to(root).as_posix()) for file in pictures]
