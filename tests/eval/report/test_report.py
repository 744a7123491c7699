"""The report: complete, self-contained, and honest about what it did not find."""

import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith.data.sources.questions import task_of
from draftsmith.eval.report.charts import draw_charts
from draftsmith.eval.report.page.forms import write_report
from draftsmith.eval.report.report import headline, next_steps, print_table
from draftsmith.eval.report.theory_charts import draw_theory
from draftsmith.recipes.schema import Recipe


def row(method: str, category: str, temperature: float = 0.0, **changes: Any) -> dict[str, Any]:
    values = {
        "method": method,
        "temperature": temperature,
        "category": category,
        "task": None if category == "overall" else task_of(category),
        "tau": 2.5,
        "tau_interval": [2.31, 2.74],
        "tau_by_question": 2.61,
        "tau_without_bonus": 1.5,
        "speedup_mean": 1.8,
        "speedup_interval": None,
        "speedup_std": 0.05,
        "speedup_by_question_mean": 1.73,
        "speedup_by_question_std": None,
        "runs": 3,
        "tokens": 1234,
        "lossless": True,
        "tokens_per_s": 432.1,
        "first_token_s": 0.0123,
        "latency_p50_s": 0.0021,
        "latency_p90_s": None,
        "greedy_identical": True if temperature == 0 else None,
        "different_answers": 0 if temperature == 0 else None,
        "numerical_ties": 0 if temperature == 0 else None,
    }
    return values | changes


BUG = row("bad", "overall", greedy_identical=False, different_answers=3, numerical_ties=2)
TIES = row("rounded", "overall", greedy_identical=False, different_answers=3, numerical_ties=3)
CATEGORIES = ("writing", "math", "overall")
SUMMARY = [
    *(row("autoregressive", name, tau=1.0, tau_without_bonus=0.0, speedup_mean=1.0) for name in CATEGORIES),
    *(row("chain", name) for name in CATEGORIES),
    *(row("tree", name, speedup_mean=2.01, speedup_std=0.1) for name in CATEGORIES),
]
TIMING = [
    {
        "method": "tree",
        "temperature": 0.0,
        "lossless": True,
        "tau": 2.5,
        "t_target_step_s": 0.004,
        "t_draft_s": 0.001,
        "t_verify_forward_s": 0.0045,
        "t_choose_s": 0.0002,
        "t_commit_s": 0.000123,
        "cost_ratio": 0.25,
        "speedup_predicted": 1.9,
        "speedup_decoding": 1.8,
        "speedup_with_prefill": 1.7,
        "loop_efficiency": 0.95,
        "loop_efficiency_with_prefill": 0.9,
        "acceptance_by_depth": [0.5, 0.4],
        "sequential": True,
        "gamma": 4,
        "alpha": 0.71,
        "alpha_overlap": 0.69,
        "alpha_drafter": None,
        "c": 0.0625,
        "c_operations": None,
        "tau_predicted_iid": 2.4,
        "speedup_predicted_iid": 1.92,
        "operations_factor": None,
        "operations_measured": 1.25,
        "best_gamma": 5,
    }
]


def facts(summary: list[dict[str, Any]]) -> dict[str, Any]:
    machine = {"platform": "Linux", "processor": "x86_64", "cpu_count": 2, "omp_num_threads": "2"}
    return {
        "summary": summary,
        "timing": TIMING,
        "recipe": Recipe(name="demo").model_dump(),
        "provenance": {
            "machine": machine,
            "versions": {"torch": "2.13.0"},
            "commit": "abc",
            "time_utc": "2026-01-01T00:00:00Z",
        },
        "questions": 80,
        "left_out": 1,
        "turns_left_out": 2,
        "device": "",
        "drafter_kinds": ["parallel"],
        "command": "draftsmith run runs/demo/recipe.yaml",
    }


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
