"""The page itself: a template whose tables are made of the result files that are there."""

from __future__ import annotations

from pathlib import Path

import jinja2
from generate.papers.pictures import draw_rounds, draw_theory
from generate.papers.tables import (
    EMBEDDED,
    SMOLLM2,
    Place,
    expected_and_measured,
    main_table,
    ngram_alphas,
    number_of_masks,
    operations_and_speed,
    place,
    ratio,
)

from draftsmith.files import write_atomically

PICTURES = "pictures"  # in the page's folder
ANSWER = "paper_answer.svg"
MASKS = range(1, 7)
TEMPERATURES = (0.0, 1.0)
# Of the picture of a round, on SmolLM2.
ROUNDS = {
    "EAGLE, tree of 12": "smollm2-135m-eagle/eagle-tree",
    "EAGLE-ParallelSpec, tree of 12": "smollm2-135m-two_stage/two-stage-tree",
    "Medusa, shared head, tree of 12": "smollm2-135m-medusa/medusa-tree",
    "Medusa-ParallelSpec, tree of 12": "smollm2-135m/smollm2-tree",
}
# Chains, which theory is about: name on the page, recipe and method, and the same for the embedded target.
CHAINS = (
    ("EAGLE-ParallelSpec", "-two_stage/two-stage-chain", "eagle-parallel-chain"),
    ("Medusa-ParallelSpec", "/smollm2-chain", "parallel-chain"),
    ("EAGLE", "-eagle/eagle-chain", "eagle-chain"),
    ("Medusa", "-medusa/medusa-chain", "medusa-chain"),
    ("draft model", "-draft_model/draft-model-chain", "draft-model-chain"),
    ("bigram", "-draft_model/bigram", "bigram"),
    ("trigram", "-draft_model/trigram", "trigram"),
)
TARGETS = ((SMOLLM2, "smollm2-135m"), (EMBEDDED, ""))  # and the prefix of a method's name in its file
EXPECTED = [
    (f"{name}, {target.name}", target.file, before + methods[number], temperature)
    for number, (target, before) in enumerate(TARGETS)
    for name, *methods in CHAINS
    for temperature in TEMPERATURES
]
NGRAM_ROWS = [
    (target.name, target.file, f"{before}-draft_model/" if before else "", temperature)
    for target, before in TARGETS
    for temperature in TEMPERATURES
]


def write_page(results: Path, page: Path) -> Path:
    """Write the page and its pictures.

    Args:
        results: The folder of result files, in the page's folder.
        page: The Markdown file.
    """
    folder = page.parent / PICTURES
    draw_rounds({name: _smollm2_place(results, name) for name in ROUNDS}, folder / "paper_round.svg")
    chains = [(name, place(results, file, method, temperature).row) for name, file, method, temperature in EXPECTED]
    points = [{**row["timing"], "method": name} for name, row in chains if row and "timing" in row]
    if points:
        draw_theory(points, folder)
    write_atomically(page, page_text(results))
    return page


def page_text(results: Path) -> str:
    """Return the page in Markdown."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )

    def figure(name: str, path: str, form: str = "{:.2f}") -> str:
        return _smollm2_place(results, name).text(path, form)

    def over(above: str, below: str, path: str) -> str:
        return ratio(_smollm2_place(results, above), _smollm2_place(results, below), path, "{:.2f}")

    return environment.get_template("paper.md.j2").render(
        tables={
            (target.name, temperature): main_table(results, target, temperature)
            for target in (SMOLLM2, EMBEDDED)
            for temperature in TEMPERATURES
        },
        smollm2=SMOLLM2.name,
        embedded=EMBEDDED.name,
        masks=number_of_masks(results, MASKS),
        operations=operations_and_speed(),
        ngrams=ngram_alphas(results, NGRAM_ROWS),
        expected=expected_and_measured(results, EXPECTED),
        pictures=PICTURES,
        answer=ANSWER if (results.parent / PICTURES / ANSWER).exists() else None,
        figure=figure,
        over=over,
    )


def _smollm2_place(results: Path, name: str) -> Place:
    """Return a row of the picture of a round, by its name in the picture."""
    return place(results, SMOLLM2.file, ROUNDS[name], 0.0)
