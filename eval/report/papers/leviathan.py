"""Leviathan et al.'s tables (arXiv 2211.17192): from the formulas, of n-gram drafters, expected and measured."""

from __future__ import annotations

from pathlib import Path

from draftsmith.eval.bench.theory import expected_tokens, operations_factor
from draftsmith.eval.report.papers.quoted import place, table

# Table 1's alphas and gammas.
TABLE_1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))
NGRAMS = ("unigram", "bigram", "trigram")


def operations_and_speed() -> str:
    """Table 1: arithmetic and speed of a drafter that costs nothing, from theorems 3.8 and 3.11."""
    rows = []
    for alpha, gamma in TABLE_1:
        operations, speed = operations_factor(alpha, gamma, 0.0), expected_tokens(alpha, gamma)
        rows.append([f"{alpha}", str(gamma), f"{operations:.2f}x", f"{speed:.2f}x"])
    return table(["alpha", "gamma", "operations", "speed"], rows)


def ngram_alphas(results: Path, rows_of: list[tuple[str, str, str, float]]) -> str:
    """Table 3's last rows: alpha of n-grams that are counted in the target's own answers.

    Args:
        rows_of: What the page calls the target, result file, what stands before a method's name there, temperature.
    """
    rows = []
    for target, file, before, temperature in rows_of:
        alphas = (place(results, file, before + name, temperature).quoted("timing.alpha") for name in NGRAMS)
        rows.append([target, f"{temperature:g}", *alphas])
    return table(["target", "T", *NGRAMS], rows, labels=2)


def expected_and_measured(results: Path, rows_of: list[tuple[str, str, str, float]]) -> str:
    """Table 4: theorem 3.8 with the measured alpha and c, beside the measured speedup of decoding.

    Args:
        rows_of: What the page calls it, result file, method, temperature.
    """
    rows = []
    for name, file, method, temperature in rows_of:
        found = place(results, file, method, temperature)
        figures = [
            found.quoted("timing.gamma", "{:d}"),
            found.quoted("timing.alpha"),
            found.quoted("timing.c"),
            found.quoted("timing.speedup_predicted_iid", "{:.2f}x"),
            found.quoted("timing.speedup_decoding", "{:.2f}x"),
        ]
        rows.append([name, f"{temperature:g}", *figures])
    return table(["drafter", "T", "gamma", "alpha", "c", "expected", "measured"], rows, labels=2)
