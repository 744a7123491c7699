"""`report.html`: what is on it, section by section. What a run does not hold is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from draftsmith.eval.report import text
from draftsmith.eval.report.page import plot
from draftsmith.eval.report.page.answers import shown_answers
from draftsmith.eval.report.page.category_table import LEVELS, category_tables, mt_bench_tables
from draftsmith.eval.report.page.depths import depths_of
from draftsmith.eval.report.page.lossless import lossless
from draftsmith.eval.report.page.measured import hashes, method_settings
from draftsmith.eval.report.page.methods import method_tables
from draftsmith.eval.report.page.phases import PHASES, mean_rounds, timeline
from draftsmith.eval.report.page.predicted import predictions, theory_charts
from draftsmith.eval.report.page.training import compared_drafters, training_curves
from draftsmith.eval.report.page.verdict import fastest_trained, verdicts

TEMPLATES = Path(__file__).parent / "templates"
# By section, which is a template and an anchor: how the list of contents calls it.
SECTIONS = {
    "methods": "Methods",
    "categories": "By category",
    "depths": "Acceptance by depth",
    "phases": "Where the time goes",
    "answers": "Answers, round by round",
    "predicted": "Predicted and measured",
    "training": "Training",
    "clock": "As a user sees it",
    "data": "Data",
    "settings": "What was measured",
}


def render_page(facts: dict[str, Any]) -> str:
    """The whole page.

    Args:
        facts: As `report.py` prepares them for both forms of the report.
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
    summary, timing = facts["summary"], facts["timing"]
    records = facts.get("records") or []
    told = verdicts(summary, timing)
    page = {
        "verdicts": told,
        "trained_row": fastest_trained(told[0], summary, facts["recipe"]) if told else None,
        "lossless": lossless(summary, facts.get("proof_figures"), facts["questions"] * facts["overall"][0]["runs"]),
        "methods": method_tables(summary, records),
        "categories": category_tables(summary),
        "mt_bench": mt_bench_tables(summary),
        "levels": LEVELS,
        "depths": depths_of(timing),
        "phases": PHASES,
        "rounds": mean_rounds(timing),
        "timeline": timeline(records),
        "answers": shown_answers(facts.get("traced") or []),
        "predictions": predictions(timing),
        "theory_charts": theory_charts(timing),
        "training": training_curves(facts.get("trained") or {}),
        "compared": compared_drafters(facts.get("trained") or {}, facts["recipe"], summary),
        "data_card": facts.get("data_card"),
        "method_settings": method_settings(facts["recipe"]),
        "hashes": hashes(facts.get("inputs_sha256", {})),
        "plot": plot,
    }
    empty = {
        "methods": not page["methods"],
        "categories": not page["categories"],
        "depths": not page["depths"],
        "phases": not page["rounds"],
        "answers": not page["answers"],
        "predicted": page["predictions"] is None,
        "training": not page["training"],
        "data": page["data_card"] is None,
    }
    page["sections"] = {name: title for name, title in SECTIONS.items() if not empty.get(name)}
    return environment.get_template("page.html.j2").render(facts | page)


def _code(sentence: str) -> Markup:
    """What stands between backquotes as code; the rest is text."""
    parts = str(escape(sentence)).split("`")
    return Markup("".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)))
