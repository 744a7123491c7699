"""The report of a run, `report.html`: a single self-contained file.

Each section is a template; a section is left out if the run has no values for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup, escape

from draftsmith.data.sources.question_sets import set_name
from draftsmith.eval.bench.records import QuestionRecord
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report import bootstrap, sentences, text
from draftsmith.eval.report.summary import (
    MEAN_OF_TASKS,
    OVERALL,
    Row,
    by_temperature,
    drafted_rows,
    headline,
    method_key,
    method_settings,
    question_sums,
    seed_spread,
)
from draftsmith.files import write_atomically
from draftsmith.results import portable

TEMPLATES = Path(__file__).parent / "templates"
# Titles in the table of contents, by section; a section's name is that of its template and its anchor.
SECTIONS = {
    "methods": "Methods",
    "categories": "By category",
    "rounds": "Rounds",
    "training": "Training",
    "vocabulary": "Draft vocabulary",
    "served": "In engines",
    "data": "Data",
    "settings": "What was measured",
}


def write_report(root: Path, facts: dict[str, Any]) -> Path:
    """Write `report.html` into the run's folder. Returns the file.

    Args:
        facts: `summary`, `recipe`, `provenance` of the eval stage, `questions`, `left_out`,
            `tasks_left_out`, `turns_left_out`, `command`, `device`, `drafter_kinds`, `served` (measurements in engines,
            `eval/engines/load_test.py`), `baseline` (rows of `baseline_speeds`), `records`, reports of `trained`
            drafters by name, `inputs_sha256`; None if missing: `target_change`, `proof`, `data_card`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": text.number, "ms": text.milliseconds, "identity": text.identity}
    environment.filters |= {"percent": text.percent, "interval": text.interval, "code": _code}
    environment.filters |= {"verdict_word": sentences.verdict_word, "headline": headline, "method_key": method_key}
    environment.filters |= {"tasks_and_questions": sentences.tasks_and_questions}
    file = root / "report.html"
    write_atomically(file, environment.get_template("page.html.j2").render(report_values(facts)))
    return file


def report_values(facts: dict[str, Any]) -> dict[str, Any]:
    """Return `facts` (see `write_report`) and all other values that the templates of the report need."""
    summary, recipe, records, proof = facts["summary"], facts["recipe"], facts["records"], facts["proof"]
    overall = [row for row in summary if row["category"] == OVERALL]
    columns = list(dict.fromkeys(row["category"] for row in summary))
    columns += [MEAN_OF_TASKS] if any(row.get("over_tasks") for row in overall) else []
    kinds = facts["drafter_kinds"]
    drafters = f"{', '.join(kinds[:-1])} and {kinds[-1]} drafters" if kinds[1:] else "no trained drafter"
    if len(kinds) == 1:
        drafters = f"{'an' if kinds[0][0] in 'aeiou' else 'a'} {kinds[0]} drafter"
    settings = yaml.safe_dump(method_settings(recipe), sort_keys=False, allow_unicode=True)
    values = {
        **facts,
        "verdicts": sentences.verdicts(summary),
        "lossless": sentences.lossless(summary, proof, facts["questions"] * overall[0]["runs"]),
        "drafters": drafters,
        "target_name": recipe.target.gguf_file or recipe.target.display_name,
        "questions_name": ", ".join(map(set_name, recipe.eval.question_sets)),
        "command": portable(facts["command"]),
        "proof": sentences.proof_sentence(proof),
        "rows_over_tasks": [row for row in overall if row.get("over_tasks")],
        "lenience_warning": None if all(row["lossless"] for row in summary) else sentences.LENIENCE_WARNING,
        "overall": overall,
        "rounds": [row for row in overall if row["timing"]],
        "seed_spread": seed_spread(summary),
        # Rows of methods with a reduced draft vocabulary.
        "vocabulary": [row for row in overall if row.get("decoded_coverage") is not None],
        "baseline_sentences": sentences.baseline_sentences(facts["baseline"]),
        "embedded_meaning": sentences.EMBEDDED_MEANING if recipe.target.model == sentences.EMBEDDED else None,
        "methods": compare_methods(summary, records),
        "categories": columns,
        "method_settings": portable(settings).strip(),
        # SHA-256 of the inputs, by their names instead of their paths.
        "hashes": {text.drafter_name(name): value for name, value in facts["inputs_sha256"].items()},
        "why": sentences.WHY,
    }
    holds = {"training": "trained", "data": "data_card", "settings": "recipe"}
    holds["categories"] = "methods"
    values["sections"] = {name: title for name, title in SECTIONS.items() if values[holds.get(name, name)]}
    return values


def _code(sentence: str) -> Markup:
    """Convert text between backquotes to HTML code elements, and escape the rest."""
    parts = str(escape(sentence)).split("`")
    return Markup("".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)))


def compare_methods(summary: list[Row], records: Sequence[QuestionRecord] = ()) -> list[dict[str, Any]]:
    """Compare the methods of each temperature, the lowest first.

    Args:
        records: The records of the summary; without them there are no paired intervals.

    Returns:
        For each temperature: `rows` of the summary, the fastest first; `cells`, the rows of all categories by
        (`method@temperature`, category); `tasks` in the headline's mean, 0 if it is pooled; `against_best`, by
        `method@temperature` the 95 % interval of its speedup over the fastest one's.
    """
    cells = {(method_key(row), row["category"]): row for row in summary}
    cells |= {(method_key(row), MEAN_OF_TASKS): headline(row) for row in drafted_rows(summary)}
    tables = []
    for temperature, rows in by_temperature(drafted_rows(summary)).items():
        rows.sort(key=lambda row: -headline(row)["speedup_mean"])
        keys = [method_key(row) for row in rows if records]
        sums = {key: question_sums(list(records), key, over_tasks=True) for key in keys}
        best = sums.get(method_key(rows[0]))
        against = {
            key: None if best is None or each is best else bootstrap.paired_ratio(bootstrap.speedup, each, best)
            for key, each in sums.items()
        }
        baseline = cells.get((f"{AUTOREGRESSIVE}@{temperature:g}", OVERALL), {}).get("tokens_per_s")
        tasks = (rows[0].get("over_tasks") or {}).get("tasks", 0)
        table = {"temperature": temperature, "baseline_tokens_per_s": baseline, "rows": rows, "cells": cells}
        tables.append({**table, "tasks": tasks, "against_best": against})
    return tables
