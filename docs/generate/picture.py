"""The picture at the top of the README and of the home page: speedup and tau of the methods on a real model.

make reference      # writes docs/pictures/speedup-{light,dark}.svg

Its figures are those of docs/results/smollm2/shipped.json; a test keeps the files so.
Bars are speedups over our own loop without a draft, the mean of the tasks, whiskers their 95 % intervals.
"""

import json
from html import escape
from pathlib import Path
from typing import Any

from generate import chat, engines

DOCS = Path(__file__).parents[1]
RESULT = DOCS / "results" / "smollm2" / "shipped.json"
# Rows of the result, from the baseline down, and what they are called in the picture.
NAMES = {
    "autoregressive@0": "no draft",
    "prompt-lookup@0": "prompt lookup, no training",
    "chain@0": "the drafter, chain of 5",
    "tree-7@0": "the drafter, tree of 7",
    "tree-7-lookup@0": "the drafter, tree of 7 with lookups",
}
COLOURS = {
    "light": {**chat.COLOURS["light"], "bar": "#8c959f", "best": "#0969da"},
    "dark": {**chat.COLOURS["dark"], "bar": "#6e7681", "best": "#4493f8"},
}
WIDTH, LEFT, RIGHT, TOP, STEP, BAR = 720, 232, 124, 46, 32, 17


def draw(rows: dict[str, dict[str, Any]], questions: int, colours: dict[str, str]) -> str:
    """Return the SVG. Bars start at 0, so that their lengths have the right ratios."""
    alone: dict[str, Any] = {"speedup_mean": 1.0, "tau": 1.0, "speedup_interval": None}
    chosen = {name: rows[name]["over_tasks"] or alone for name in NAMES}
    described = [f"{NAMES[name]} {row['speedup_mean']:.2f}x at tau {row['tau']:.2f}" for name, row in chosen.items()]
    most = max((row["speedup_interval"] or [0, row["speedup_mean"]])[1] for row in chosen.values())
    scale = (WIDTH - LEFT - RIGHT) / most
    height = TOP + STEP * len(chosen) + 30
    fastest = max(chosen, key=lambda name: chosen[name]["speedup_mean"])
    baseline = LEFT + scale
    bottom = TOP + STEP * len(chosen)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="system-ui, sans-serif" font-size="14">',
        f"<title>{escape('Speedup on a CPU: ' + ', '.join(described))}</title>",
        f'<text x="{LEFT}" y="20" fill="{colours["faint"]}">speedup, mean of six tasks, with its 95 % interval</text>',
        f'<text x="{WIDTH - 8}" y="20" text-anchor="end" fill="{colours["faint"]}">tau</text>',
        f'<line x1="{baseline:.1f}" x2="{baseline:.1f}" y1="{TOP - 12}" y2="{bottom}" stroke="{colours["line"]}" '
        'stroke-dasharray="3 3"/>',
    ]
    for number, (name, row) in enumerate(chosen.items()):
        middle = TOP + STEP * number + BAR / 2
        colour = colours["best" if name == fastest else "bar"]
        end = LEFT + scale * row["speedup_mean"]
        lines += [
            f'<text x="{LEFT - 10}" y="{middle + 5:.0f}" text-anchor="end" fill="{colours["text"]}">'
            f"{escape(NAMES[name])}</text>",
            f'<rect x="{LEFT}" y="{middle - BAR / 2:.0f}" width="{end - LEFT:.1f}" height="{BAR}" rx="2" '
            f'fill="{colour}"/>',
        ]
        after = end
        if row["speedup_interval"]:
            low, after = (LEFT + scale * value for value in row["speedup_interval"])
            lines.append(
                f'<path d="M{low:.1f} {middle:.0f}H{after:.1f}M{low:.1f} {middle - 4:.0f}v8M{after:.1f} '
                f'{middle - 4:.0f}v8" stroke="{colours["text"]}" fill="none"/>'
            )
        lines += [
            f'<text x="{after + 8:.1f}" y="{middle + 5:.0f}" font-weight="600" fill="{colours["text"]}">'
            f"{row['speedup_mean']:.2f}x</text>",
            f'<text x="{WIDTH - 8}" y="{middle + 5:.0f}" text-anchor="end" fill="{colours["text"]}">'
            f"{row['tau']:.2f}</text>",
        ]
    lines += [
        f'<text x="{WIDTH - 8}" y="{height - 8}" text-anchor="end" fill="{colours["faint"]}" font-size="12">'
        f"SmolLM2-135M-Instruct, bf16, two threads of a CPU, T = 0, {questions} of Spec-Bench's questions</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def pictures() -> dict[Path, str]:
    """Return the content of each picture by its file."""
    folder, figures = DOCS / "pictures", json.loads(RESULT.read_text(encoding="utf-8"))["figures"]
    speedups = {
        folder / f"speedup-{name}.svg": draw(figures["rows"], figures["asked"], colours)
        for name, colours in COLOURS.items()
    }
    return speedups | chat.pictures() | engines.pictures()


if __name__ == "__main__":
    for file, text in pictures().items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
