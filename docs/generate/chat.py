"""The moving picture at the top of the README: one answer without the drafter and with it, accepted drafts in colour.

    python -m generate.chat RUN     # in docs/: one answer out of the run that docs/results/smollm2/shipped.json is of
    make reference                  # writes docs/pictures/chat-{light,dark}.svg, from docs/results/smollm2/chat.json

Both panels play the answer's pieces at the times of the run's records, `SLOWER` times slower so that eyes can follow.
Where nothing moves (print, a preview) all of it is there.
"""

import json
import sys
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
RESULT = DOCS / "results" / "smollm2" / "chat.json"
MEASURED = DOCS / "results" / "smollm2" / "shipped.json"
QUESTION = 410  # of Spec-Bench: its decoding speedup is near the median of the run
PANELS = {"autoregressive@0": "without a drafter", "tree-7-lookup@0": "with the drafter that ships"}
SLOWER = 4
COLUMNS, CHAR, LINE, MARGIN, GAP = 52, 8.43, 21, 20, 34
PAUSE_S = 4.0  # after the slower answer, before both begin again
COLOURS = {
    "light": {"ground": "#ffffff", "text": "#1f2328", "faint": "#59636e", "drafted": "#1a7f37", "line": "#d1d9e0"},
    "dark": {"ground": "#0d1117", "text": "#f0f6fc", "faint": "#9198a1", "drafted": "#3fb950", "line": "#3d444d"},
}


def record(run: Path) -> dict[str, Any]:
    """Read the first answer to the question from a run's records.

    Returns its pieces by method: text, the number of characters that were drafted, seconds since the question.
    """
    from draftsmith.data.sources.questions import load_questions
    from draftsmith.models.target.loading import load_tokenizer
    from draftsmith.recipes.loading import load_recipe

    recipe = load_recipe(run / "recipe.yaml")
    tokenizer: Any = load_tokenizer(recipe.target)
    questions = {each.question_id: each.turns[0] for each in load_questions(recipe.eval.questions)}
    lines = (run / "eval" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    answers = next(each["answers"] for each in map(json.loads, lines) if each["question_id"] == QUESTION)
    figures: dict[str, Any] = {"question": questions[QUESTION]}
    for name in PANELS:
        turn = answers[name]["turns"][0]
        # The prefill gives the first token, and each round its accepted drafts and one of the target's own.
        ends = list(accumulate([1, *turn["accept_lengths"]]))
        texts = [tokenizer.decode(turn["ids"][:end], skip_special_tokens=True) for end in ends]
        drafted = [tokenizer.decode(turn["ids"][: end - 1], skip_special_tokens=True) for end in ends]
        seconds = accumulate([turn["prefill_s"], *turn["round_s"]])
        figures[name] = [
            [text[len(before) :], max(0, len(own) - len(before)), round(at_s, 4)]
            for before, text, own, at_s in zip(["", *texts], texts, drafted, seconds, strict=False)
        ]
        figures[f"{name} tokens"] = len(turn["ids"])
    return figures


def split_runs(pieces: list[list[Any]], columns: int) -> list[tuple[int, int, str, bool, float]]:
    """Break the text into lines at words. Returns runs (line, column, text, whether it was drafted, seconds)."""
    letters = []  # each with its piece
    for text, drafted, at_s in pieces:
        letters += [(letter, place < drafted, at_s) for place, letter in enumerate(text)]
    whole = "".join(letter for letter, _, _ in letters).rstrip()
    starts, begin = [], 0  # of the lines
    while begin < len(whole):
        cut = whole.find("\n", begin, begin + columns + 1)
        if cut < 0 and len(whole) - begin > columns:
            cut = whole.rfind(" ", begin, begin + columns + 1)
        end = len(whole) if cut < 0 else cut
        starts.append((begin, end))
        begin = end + 1
    runs: list[tuple[int, int, str, bool, float]] = []
    for number, (begin, end) in enumerate(starts):
        for place in range(begin, end):
            letter, drafted, at_s = letters[place]
            if runs and runs[-1][0] == number and runs[-1][3:] == (drafted, at_s):
                runs[-1] = (*runs[-1][:2], runs[-1][2] + letter, drafted, at_s)
            else:
                runs.append((number, place - begin, letter, drafted, at_s))
    return runs


def draw(figures: dict[str, Any], colours: dict[str, str]) -> str:
    """Return the SVG of the question and of its answer in both panels, which begin together."""
    question_runs = split_runs([[f"> {figures['question']}", 0, 0.0]], 2 * COLUMNS)
    runs = {name: split_runs(figures[name], COLUMNS) for name in PANELS}
    first = question_runs[-1][0] + 4
    last = first + max(run[0] for panel in runs.values() for run in panel)
    width, height = round(2 * (MARGIN + COLUMNS * CHAR) + GAP), 2 * MARGIN + (last + 5) * LINE
    seconds = {name: figures[name][-1][2] for name in PANELS}
    slowest_s = max(seconds.values())
    speeds = {
        name: f"{figures[f'{name} tokens']} tokens in {each_s:.2f} s"
        + f": {slowest_s / each_s:.2f}x" * (each_s < slowest_s)
        for name, each_s in seconds.items()
    }
    caption = f"SmolLM2-135M-Instruct on two CPU cores, played {SLOWER} times slower. In colour: accepted drafts."

    def text(x: float, line: int, words: str, colour: str, at_s: float = 0.0) -> str:
        hidden = f'<set attributeName="visibility" to="hidden" begin="all.begin" dur="{at_s * SLOWER:.2f}s"/>'
        return (
            f'<text x="{x:.1f}" y="{MARGIN + (line + 1) * LINE - 6}" fill="{colour}" '
            f'textLength="{len(words) * CHAR:.1f}" xml:space="preserve">{escape(words)}{hidden if at_s else ""}</text>'
        )

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14">',
        f"<title>{escape('; '.join(f'{PANELS[name]}: {speeds[name]}' for name in PANELS))}</title>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{colours["ground"]}" '
        f'stroke="{colours["line"]}"/>',
        '<rect width="0" height="0"><animate id="all" attributeName="x" from="0" to="0" '
        f'dur="{slowest_s * SLOWER + PAUSE_S:.2f}s" begin="0s;all.end"/></rect>',
        *(text(MARGIN + column * CHAR, line, words, colours["faint"]) for line, column, words, _, _ in question_runs),
        text(MARGIN, last + 4, caption, colours["faint"]),
    ]
    for x, (name, panel) in zip((MARGIN, MARGIN + COLUMNS * CHAR + GAP), runs.items(), strict=True):
        lines.append(text(x, first - 2, PANELS[name], colours["faint"]))
        for line, column, words, is_drafted, at_s in panel:
            lines.append(
                text(x + column * CHAR, first + line, words, colours["drafted" if is_drafted else "text"], at_s)
            )
        lines.append(text(x, last + 2, speeds[name], colours["text"], seconds[name]))
    return "\n".join([*lines, "</svg>", ""])


def pictures() -> dict[Path, str]:
    """Return the content of each picture by its file."""
    figures = json.loads(RESULT.read_text(encoding="utf-8"))["figures"]
    return {DOCS / "pictures" / f"chat-{name}.svg": draw(figures, colours) for name, colours in COLOURS.items()}


if __name__ == "__main__":
    from draftsmith.results import folded_json

    folder, result = Path(sys.argv[1]), json.loads(MEASURED.read_text(encoding="utf-8"))
    measured = json.loads((folder / "eval" / "result.json").read_text(encoding="utf-8"))
    assert measured["date"] == result["date"], f"{folder} is not the run of {MEASURED}"
    RESULT.write_text(folded_json({**result, "figures": record(folder)}) + "\n", encoding="utf-8")
