"""Both forms of the report, from the same facts: `report.md` beside its pictures, and `report.html`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2

from draftsmith.eval.report import text
from draftsmith.eval.report.page.page import TEMPLATES, render_page
from draftsmith.eval.report.page.verdict import verdicts
from draftsmith.eval.report.report import report_values
from draftsmith.recipes.run_folder import write_atomically


def write_report(
    root: Path, facts: dict[str, Any], pictures: Iterable[Path], theory_pictures: Iterable[Path] = ()
) -> list[Path]:
    """Write `report.md` and `report.html` into the run's folder.

    Args:
        root: The run's folder.
        facts: `summary`, `timing`, `recipe` (a dict), `provenance` of the eval stage, `questions`, `left_out`,
            `turns_left_out`, `command`, `drafter_kinds`, `target_change` if the drafter comes with another target,
            `proof` if there is one, `served`, measurements in engines (`eval/serving/result.py`), and `baseline`, rows
            of `baseline_speeds`. For the page alone, where there are such: `records`, `traced` answers, logs of
            `trained` drafters by name, `data_card`, `inputs_sha256`.
        pictures: PNG files below `root`, which `report.md` shows.
        theory_pictures: The same, for the section on theory.
    """
    values = report_values(root, facts, pictures, theory_pictures)
    forms = {"report.md": render_markdown(values), "report.html": render_page(values)}
    for name, content in forms.items():
        write_atomically(root / name, content)
    return [root / name for name in forms]


def render_markdown(values: dict[str, Any]) -> str:
    """`report.md`, from `report_values`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": text.number, "ms": text.milliseconds, "identity": text.identity}
    environment.filters |= {"percent": text.percent, "interval": text.interval, "escaped": text.escaped}
    told = verdicts(values["summary"], values["timing"])
    return environment.get_template("report.md.j2").render(values, verdicts=told)
