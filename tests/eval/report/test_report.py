"""The report: complete, self-contained, and honest about what it did not find."""

import re
from pathlib import Path

import pytest
from rich.console import Console
from support.report_facts import BUG, CATEGORIES, SUMMARY, TIES, TIMING, facts, row

from draftsmith.eval.report.charts import draw_charts
from draftsmith.eval.report.page.forms import write_report
from draftsmith.eval.report.report import headline, next_steps, print_table
from draftsmith.eval.report.theory_charts import draw_theory
from draftsmith.recipes.schema import Recipe


@pytest.mark.parametrize("several_temperatures", [False, True])
def test_report(tmp_path: Path, several_temperatures: bool) -> None:
    summary = SUMMARY
    if several_temperatures:
        summary = SUMMARY + [entry | {"temperature": 1.0, "greedy_identical": None} for entry in SUMMARY]
    pictures = draw_charts(summary, tmp_path / "eval", "demo")
    assert [picture.name for picture in pictures] == ["speedup.png", "tau.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000 for picture in pictures)

    theory = draw_theory(TIMING, tmp_path / "eval")
    markdown, html = write_report(tmp_path, facts(summary), pictures, theory)
    text = markdown.read_text()
    assert text.index("times as fast as the autoregressive loop") < text.index("## Overall")
    assert "- T = 0: **too few questions**. tree, the fastest of 2 methods, reached 2.01 times the speed" in text
    assert "tau = mean tokens committed per round, including the one token that the target itself contributes" in text
    assert "the mean of the questions' tokens per second" in text
    assert "| tree | 0 | 2.50 | 2.31 to 2.74 | 2.61 | 1.50 | 2.01 | - | 0.100 | 1.73 | - | 1234 | yes |" in text
    assert "| writing | tree" in text
    assert "mt_bench" not in text
    assert "| tree | 0 | 432.1 | 12.30 | 2.10 | - |" in text
    assert "| tree | 0 | 4.00 | 1.00 | 4.50 | 0.200 | 0.123 | 0.25 | 1.90 | 1.80 | 0.95 |" in text
    assert "| tree | 0 | 4 | 0.71 | 0.69 | - | 0.062 | - | 2.40 | 2.50 | - | 1.25 | 5 |" in text
    assert "| tree | 0 | 4 | 0.71 | 0.062 | 1.92 | 1.80 |" in text
    assert "![speedup](eval/speedup.png)" in text
    assert text.index("## Theory") < text.index("![theory_tokens](eval/theory_tokens.png)")
    assert "draftsmith run runs/demo/recipe.yaml" in text
    assert "1 question(s), 2 later turn(s)" in text
    # Tables stay tables: no blank line between their rows, and each row has as many cells as its header.
    for table in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        lines = table.strip().split("\n")
        assert len(lines) > 2
        assert len({line.count("|") for line in lines}) == 1

    page = html.read_text()
    assert not re.search(r'\ssrc=|href="(?!#)|url\(|@import', page), "the page must not need any other file"
    # Methods and categories at each temperature; two of predictions, as a user sees it, what was measured.
    assert page.count("<table") == page.count("</table>") == 2 * (1 + several_temperatures) + 4


def test_a_draft_vocabulary_has_its_table(tmp_path: Path) -> None:
    reduced = {"decoded_coverage": 0.962, "rounds_ended_outside": 0.0714, "tau_lost_at_most": 0.126}
    summary = [*SUMMARY, row("small", "overall", **reduced)]
    markdown, html = write_report(tmp_path, facts(summary), [])
    assert "| small | 0 | 96.2% | 7.1% | 0.13 |" in markdown.read_text()
    assert "<td>96.2%</td><td>7.1%</td><td>0.13</td>" in html.read_text()
    for file in write_report(tmp_path, facts(SUMMARY), []):
        assert "Draft vocabulary" not in file.read_text()


def test_mt_bench_is_explained_where_it_stands(tmp_path: Path) -> None:
    for file in write_report(tmp_path, facts([*SUMMARY, row("tree", "mt_bench")]), []):
        assert "Spec-Bench's task of the eight MT-bench categories together" in file.read_text()


@pytest.mark.parametrize(
    ("kinds", "title"),
    [
        (["parallel"], "with a parallel drafter"),
        (["eagle"], "with an eagle drafter"),
        (["medusa", "parallel", "hydra"], "with medusa, parallel and hydra drafters"),
        ([], "with no trained drafter"),
    ],
)
def test_the_title_names_what_was_compared(tmp_path: Path, kinds: list[str], title: str) -> None:
    for file in write_report(tmp_path, {**facts(SUMMARY), "drafter_kinds": kinds}, []):
        assert title in file.read_text()


def test_names_are_text_not_markup(tmp_path: Path) -> None:
    """A category may be called anything; the tables stay tables, on screen too."""
    name = "[red]a|*b* _c_ <d>\n~~e~~ $f$ multi_turn"
    summary = [row | {"category": name if row["category"] == "writing" else row["category"]} for row in SUMMARY]
    markdown, html = write_report(tmp_path, facts(summary), [])
    shown = r"| \[red\]a\|\*b\* \_c\_ \<d\> \~\~e\~\~ \$f\$ multi_turn | tree"
    assert shown in markdown.read_text()
    assert "&lt;d&gt;" in html.read_text()
    console = Console(record=True, width=200)
    print_table(summary, console)
    assert "[red]a|*b*" in console.export_text()


def test_stop_strings_are_reported(tmp_path: Path) -> None:
    values = facts(SUMMARY)
    values["recipe"] = Recipe.model_validate({"name": "demo", "eval": {"stop": ["\n\n", "Q:"]}}).model_dump()
    markdown, _ = write_report(tmp_path, values, [])
    assert r'new tokens a turn (ended by "\n\n", "Q:" too), ' in markdown.read_text()


def test_headline() -> None:
    assert headline(SUMMARY) == (
        "tree generates 2.01 +- 0.10 times as fast as the autoregressive loop, at 2.50 tokens per round "
        "(1.50 without the target's own); every greedy answer is identical to the target's."
    )
    assert "NOT LOSSLESS" in headline([*SUMMARY, BUG])
    assert headline([*SUMMARY, TIES]).endswith(
        "; the greedy answers are the target's, but for 3 that part from it at a numerical tie."
    )
    assert "NOT LOSSLESS" in headline([*SUMMARY, TIES, BUG])
    assert headline(SUMMARY[:3]) == "Only the autoregressive baseline was measured."


def test_next_steps_follow_from_the_numbers() -> None:
    recipe = Recipe(name="demo").model_dump()
    steps = " ".join(next_steps(SUMMARY, TIMING, recipe))
    assert "kept in 50% of the rounds of tree" in steps
    assert "lost outside the models" not in steps
    slow = [TIMING[0] | {"loop_efficiency": 0.7, "cost_ratio": 0.5}]
    steps = " ".join(next_steps([BUG], slow, recipe))
    assert "30% of the possible speedup is lost outside the models" in steps
    assert "Drafting costs 0.50 of a target step" in steps
    assert "Greedy answers differ" in steps
    assert "Greedy answers differ" not in " ".join(next_steps([TIES], slow, recipe))


def test_terminal_table() -> None:
    console = Console(record=True, width=140)
    print_table(SUMMARY, console)
    text = console.export_text()
    assert "2.01 ± 0.10" in text
    assert re.search(r"tree +writing +2.50 +1.50 +2.01 ± 0.10 +1.73 +yes", text)
    assert "the mean of the questions' tokens per second" in " ".join(text.split())
    assert "1234" not in text, "a cell without a heading"
    console = Console(record=True, width=140)
    print_table([BUG, TIES], console)
    cells = console.export_text()
    assert re.search(r"bad .* NO\s", cells)
    assert re.search(r"rounded .* but for 3 ties", cells)
    assert "including the one token that the target itself contributes" in text
    assert "autoregressive" not in text


def test_a_long_method_name_hides_no_figure() -> None:
    console = Console(width=80, record=True, force_terminal=False, no_color=True)
    long = [row("a-recipe-with-a-rather-long-name/its-method-has-one-too", "overall", tau=2.71)]
    print_table([*SUMMARY, *long], console)
    text = console.export_text()
    assert "2.71" in text
    assert "no bonus" in text


def test_lenient_rows_are_marked_everywhere(tmp_path: Path) -> None:
    """And the headline names the fastest of the lossless methods, unless there is none."""
    lenient = [row("fast", name, speedup_mean=3.0, greedy_identical=None, lossless=False) for name in CATEGORIES]
    summary = [*SUMMARY, *lenient]
    assert headline(summary).startswith("tree generates 2.01")
    assert headline(lenient).startswith("fast (not lossless) generates 3.00")
    assert "identical" not in headline(lenient)
    markdown, html = write_report(tmp_path, facts(summary), [])
    for text in (markdown.read_text(), html.read_text()):
        assert "measured with lenience below 1" in text
        assert text.count("fast (not lossless)") >= 1
    assert markdown.read_text().count("fast (not lossless)") == 3
    assert "fast <small>not lossless</small>" in html.read_text()
    assert re.search(r"\| fast \| 0 \| .* \| not lossless \|", markdown.read_text())
    console = Console(record=True, width=140)
    print_table(summary, console)
    text = console.export_text()
    assert text.count("not lossless") >= 4
    assert "do not have the target's distribution" in " ".join(text.split())
    markdown, html = write_report(tmp_path, facts(SUMMARY), [])
    assert "lossless" not in markdown.read_text().lower()
    assert "not lossless" not in html.read_text().lower()


@pytest.mark.parametrize(
    "categories",
    [("$\\frac{$", "a$b$c", "$"), ("x" * 5000, "\u4f60\u597d"), tuple(f"category {n}" for n in range(700))],
)
@pytest.mark.filterwarnings("ignore:Glyph")
def test_categories_are_drawn_as_they_are_called(tmp_path: Path, categories: tuple[str, ...]) -> None:
    """Dollar signs are no mathematics, and no picture grows beyond what can be drawn."""
    rows = [row(name, category) for name in ("autoregressive", "a$_{$") for category in (*categories, "overall")]
    for picture in draw_charts(rows, tmp_path, "run $\\x$"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert [file.exists() for file in draw_theory([{**TIMING[0], "method": "a$_{$"}], tmp_path)] == [True] * 3
