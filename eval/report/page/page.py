"""Both forms of the report, from the same values: `report.md`, and `report.html`, a single file.

Each section of the page is a template; a section is left out if the run has no values for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from draftsmith.data.sources.question_sets import set_name
from draftsmith.eval.report import sentences, text
from draftsmith.eval.report.page import comparisons
from draftsmith.eval.report.summary import (
    MEAN_OF_TASKS,
    OVERALL,
    headline,
    seed_spread,
)
from draftsmith.files import write_atomically
from draftsmith.recipes.schema import DRAFTER_KIND, EvalRecipe
from draftsmith.results import portable

TEMPLATES = Path(__file__).parent / "templates"
# Titles in the table of contents, by section; a section's name is that of its template and its anchor.
SECTIONS = {
    "methods": "Methods",
    "categories": "By category",
    "depths": "Acceptance by depth",
    "phases": "Where the time goes",
    "training": "Training",
    "vocabulary": "Draft vocabulary",
    "served": "In engines",
    "data": "Data",
    "settings": "What was measured",
}


def write_report(root: Path, facts: dict[str, Any]) -> list[Path]:
    """Write `report.md` and `report.html` into the run's folder. Returns the two files.

    Args:
        facts: `summary`, `timing`, `recipe` (a dict), `provenance` of the eval stage, `questions`, `left_out`,
            `tasks_left_out`, `turns_left_out`, `command`, `device`, `drafter_kinds`, `served` (measurements in engines,
            `eval/engines/load_test.py`), `baseline` (rows of `baseline_speeds`), `records`, reports of `trained`
            drafters by name, `inputs_sha256`; None if missing: `target_change`, `proof`, `data_card`.
    """
    values = report_values(facts)
    forms = {
        "report.md": _environment().get_template("report.md.j2"),
        "report.html": _environment(autoescape=True).get_template("page.html.j2"),
    }
    for name, template in forms.items():
        write_atomically(root / name, template.render(values))
    return [root / name for name in forms]


def _environment(autoescape: bool = False) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": text.number, "ms": text.milliseconds, "identity": text.identity}
    environment.filters |= {"percent": text.percent, "interval": text.interval, "escaped": text.escaped}
    environment.filters |= {"code": _code, "tint": comparisons.tint, "verdict_word": sentences.verdict_word}
    environment.filters |= {"headline": headline, "tasks_and_questions": sentences.tasks_and_questions}
    return environment


def report_values(facts: dict[str, Any]) -> dict[str, Any]:
    """Return `facts` (see `write_report`) and all other values that the templates of the report need."""
    summary, timing, recipe = facts["summary"], facts["timing"], facts["recipe"]
    records, proof = facts["records"], facts["proof"]
    overall = [row for row in summary if row["category"] == OVERALL]
    verdicts = sentences.verdicts(summary, timing)
    columns = list(dict.fromkeys(row["category"] for row in summary))
    columns += [MEAN_OF_TASKS] if any(row.get("over_tasks") for row in overall) else []
    kinds = facts["drafter_kinds"]
    drafters = f"{', '.join(kinds[:-1])} and {kinds[-1]} drafters" if kinds[1:] else "no trained drafter"
    if len(kinds) == 1:
        drafters = f"{'an' if kinds[0][0] in 'aeiou' else 'a'} {kinds[0]} drafter"
    values = {
        **facts,
        "verdicts": verdicts,
        "lossless": sentences.lossless(summary, proof, facts["questions"] * overall[0]["runs"]),
        "drafters": drafters,
        "target_name": text.target_name(recipe["target"]),
        "questions_name": ", ".join(map(set_name, EvalRecipe.model_validate(recipe["eval"]).question_sets)),
        "command": portable(facts["command"]),
        "proof": sentences.proof_sentence(proof),
        "rows_over_tasks": [row for row in overall if row.get("over_tasks")],
        "lenience_warning": None if all(row["lossless"] for row in summary) else sentences.LENIENCE_WARNING,
        "overall": overall,
        "seed_spread": seed_spread(summary),
        # Rows of methods with a reduced draft vocabulary.
        "vocabulary": [row for row in overall if row.get("decoded_coverage") is not None],
        "baseline_sentences": sentences.baseline_sentences(facts["baseline"]),
        "embedded_meaning": sentences.EMBEDDED_MEANING if recipe["target"]["model"] == sentences.EMBEDDED else None,
        "next_steps": sentences.next_steps(summary, timing, recipe),
        "methods": comparisons.method_tables(summary, records),
        "categories": columns,
        "tables": comparisons.category_tables(summary, columns),
        "depths": comparisons.acceptance_depths(timing),
        "rounds": comparisons.mean_rounds(timing),
        "method_settings": method_settings(recipe),
        # SHA-256 of the inputs, by their names instead of their paths.
        "hashes": {text.drafter_name(name): value for name, value in facts["inputs_sha256"].items()},
        # Modules whose constants the templates read.
        "sentences": sentences,
        "page": comparisons,
    }
    holds = {
        "categories": "tables",
        "phases": "rounds",
        "training": "trained",
        "data": "data_card",
        "settings": "recipe",
    }
    values["sections"] = {name: title for name, title in SECTIONS.items() if values[holds.get(name, name)]}
    return values


def _code(sentence: str) -> Markup:
    """Convert text between backquotes to HTML code elements, and escape the rest."""
    parts = str(escape(sentence)).split("`")
    return Markup("".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)))


def method_settings(recipe: dict[str, Any]) -> list[dict[str, str]]:
    """Return each method's name, kind, tree, drafter and options, in the recipe's order, without local paths."""
    rows = []
    for method in recipe["eval"]["methods"]:
        drafts = method["kind"] == DRAFTER_KIND
        options = [f"{key}: {value}" for key, value in method["options"].items()]
        if method["lenience"] < 1:
            options.append(f"lenience: {method['lenience']:g}")
        tree = [method["tree"]]
        if method["tree"] not in ("chain", "static"):
            tree += [f"{method['nodes']} nodes", f"branch {method['branch']}"]
        if method["max_depth"] is not None:
            tree.append(f"depth {method['max_depth']}")
        if method["lookup"]:
            tree.append("with lookup")
        drafter = f"this run's, {recipe['drafter']['kind']}"
        if method["drafter"] is not None:
            drafter = text.drafter_name(method["drafter"])
        rows.append(
            {
                "name": method["name"],
                "kind": method["kind"],
                "tree": ", ".join(tree) if drafts else "-",
                "drafter": drafter if drafts else "",
                "options": portable(", ".join(options)),
            }
        )
    return rows
