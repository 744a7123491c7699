"""Drafting in engines: the picture and the tables of docs/measured/engines.md, and the README's table of evidence.

make reference      # writes docs/pictures/engines-{light,dark}.svg and the tables

Figures are those of docs/results/engines: what `draftsmith bench` wrote, named ENGINE_KIND.json, and the steps of
`benchmarks/vllm_step.py`, named step_KIND.json. Without a file its rows are missing.
"""

import json
import math
import re
from html import escape
from pathlib import Path
from typing import Any

from generate.chat import COLOURS

DOCS = Path(__file__).parents[1]
RESULTS = DOCS / "results" / "engines"
# Of several results with the same rows the first counts.
SPEEDS = {
    "vllm_parallel": ("vLLM", "`parallel`, by the plugin"),
    "vllm_parallel_many": ("vLLM", "`parallel`, by the plugin"),
    "vllm_eagle": ("vLLM", "`eagle`"),
    "llamacpp": ("llama.cpp", ""),
}
# Results with a run's own drafter in an engine: which engine, and which drafter.
EVIDENCE = {
    "vllm_fp32": ("vLLM 0.32, CPU", "`parallel`, by the plugin"),
    "vllm_parallel": ("vLLM 0.32, CPU", "`parallel`, by the plugin"),
    "vllm_eagle": ("vLLM 0.32, CPU", "`eagle`"),
}
STEPS = {
    "step_plain": "nothing",
    "step_parallel": "`parallel`, by the plugin",
    "step_peagle": "`peagle`, two layers, not trained",
    "step_eagle": "`eagle`",
}
PLAIN, NGRAM = "without drafter", "n-gram lookup"
LINES = {
    "no draft": "#8c959f",
    "n-gram lookup": "#bf8700",
    "`parallel`, by the plugin": "#0969da",
    "`eagle`": "#1a7f37",
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 64, 186, 34, 52


def figures(name: str) -> dict[str, Any] | None:
    """Return a result's figures with its dtype; None if there is no such file."""
    file = RESULTS / f"{name}.json"
    if not file.is_file():
        return None
    result = json.loads(file.read_text(encoding="utf-8"))
    dtype = re.search(r"target\.dtype=(\w+)", result["command"])
    return {**result["figures"], "dtype": "" if dtype is None else dtype[1]}


def series() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the rows by engine and by what drafts; the plain server's once, of an engine's first result."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name, (engine, kind) in SPEEDS.items():
        for row in (figures(name) or {"rows": []})["rows"]:
            label = {PLAIN: "no draft", NGRAM: NGRAM}.get(row["arm"], kind)
            rows = found.setdefault((engine, label), [])
            if all(row["concurrency"] != each["concurrency"] for each in rows):
                rows.append(row)
    return found


def engines_speed() -> list[str]:
    """Return the table of tokens per second, by engine, by what drafts and by the number of requests."""
    levels = sorted({row["concurrency"] for rows in series().values() for row in rows})
    head = " | ".join(f"{level} request{'s' * (level > 1)}" for level in levels)
    lines = [f"| engine | drafts | tau | {head} |", "|---|---|---|" + "---|" * len(levels)]
    for (engine, label), rows in series().items():
        by_level = {row["concurrency"]: row for row in rows}
        cells = [_speed(by_level[level]) if level in by_level else "-" for level in levels]
        taus = [row["tau_committed"] for row in rows if row["tau_committed"]]
        lines.append(f"| {engine} | {label} | {f'{taus[0]:.2f}' if taus else '-'} | {' | '.join(cells)} |")
    return lines


def _speed(row: dict[str, Any]) -> str:
    faster = f", **{row['speedup']:.2f}x**" if row["speedup"] else ""
    return f"{row['tokens_per_s']:.0f} ({row['user_tokens_per_s']:.0f}){faster}"


def engines_step() -> list[str]:
    """Return the table of what a round costs in vLLM, in ms."""
    parts = {
        "target": "target's layers",
        "head": "its LM head",
        "drafter": "drafter",
        "sampling": "sampling",
        "rest": "vLLM's own",
        "step": "whole round",
    }
    lines = [
        f"| drafts | rows | {' | '.join(parts.values())} | tau | tokens/s |",
        "|---|---|" + "---|" * (len(parts) + 2),
    ]
    for name, label in STEPS.items():
        step = figures(name)
        if step is not None:
            cells = [f"{step[part]:.1f}" if part in step else "-" for part in parts]
            lines.append(
                f"| {label} | {step['rows']} | {' | '.join(cells)} | {step['tau']:.2f} | {step['tokens_per_s']:.0f} |"
            )
    return lines


def engines_evidence() -> list[str]:
    """Return the README's table of drafters that were run in an engine on a real target, with the acceptance there."""
    from draftsmith.eval.bench.divergence import Divergence

    lines = [
        "| run in | drafter | target | answers as without it | tau there | tau of our chain |",
        "|---|---|---|---|---|---|",
    ]
    for name, (engine, drafter) in EVIDENCE.items():
        result = figures(name)
        own = None if result is None else result["own_chain"]
        if result is not None and own is not None:
            proof = next(each for each in result["greedy"] if each["method"].startswith("with drafter"))
            ties = [Divergence(**each).is_tie for each in proof["divergences"]]
            same = f"{proof['prompts'] - len(ties)} of {proof['prompts']}"
            same += f"; {sum(ties)} of {len(ties)} differ at a numerical tie" if ties else ""
            target = f"SmolLM2-135M, {result['dtype']}"
            lines.append(
                f"| {engine} | {drafter} | {target} | {same} | {own['engine_tau']:.3f} | {own['own_tau']:.3f} |"
            )
    return lines


def draw(colours: dict[str, str]) -> str:
    """Return the SVG: tokens/s of a user against tokens/s in all, both on a logarithmic axis, in vLLM."""
    lines = {label: rows for (engine, label), rows in series().items() if engine == "vLLM"}
    points = [(row["user_tokens_per_s"], row["tokens_per_s"]) for rows in lines.values() for row in rows]
    bounds = [(min(each) / 1.2, max(each) * 1.2) for each in zip(*points, strict=True)] if points else [(1, 10)] * 2

    def place(value: float, axis: int) -> float:
        low, high = bounds[axis]
        share = math.log(value / low) / math.log(high / low)
        return LEFT + share * (WIDTH - LEFT - RIGHT) if axis == 0 else HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    said = "Tokens per second in vLLM on two cores: of a user, and of all requests together"
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(said)}</title>",
    ]
    for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
        for axis, (low, high) in enumerate(bounds):
            if low < tick < high:
                at = place(tick, axis)
                path = f"M{at:.0f} {TOP}V{HEIGHT - BOTTOM}" if axis == 0 else f"M{LEFT} {at:.0f}H{WIDTH - RIGHT}"
                x, y = (at, HEIGHT - BOTTOM + 18) if axis == 0 else (LEFT - 8, at + 4)
                anchor = "middle" if axis == 0 else "end"
                text += [
                    f'<path d="{path}" stroke="{colours["line"]}"/>',
                    f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colours["faint"]}">{tick}</text>',
                ]
    for number, (label, rows) in enumerate(lines.items()):
        points_of = [(place(row["user_tokens_per_s"], 0), place(row["tokens_per_s"], 1)) for row in rows]
        colour, y = LINES[label], TOP + 10 + 22 * number
        text.append(
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points_of)}" fill="none" stroke="{colour}" '
            'stroke-width="2"/>'
        )
        for (x, level_y), row in zip(points_of, rows, strict=True):
            text.append(f'<circle cx="{x:.1f}" cy="{level_y:.1f}" r="4" fill="{colour}"/>')
            if number == 0:
                text.append(
                    f'<text x="{x - 8:.1f}" y="{level_y + 16:.1f}" text-anchor="end" font-size="12" '
                    f'fill="{colours["faint"]}">{row["concurrency"]}</text>'
                )
        text += [
            f'<circle cx="{WIDTH - RIGHT + 12}" cy="{y - 4}" r="4" fill="{colour}"/>',
            f'<text x="{WIDTH - RIGHT + 22}" y="{y}" fill="{colours["text"]}">{escape(label.replace("`", ""))}</text>',
        ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    text += [
        f'<text x="{LEFT}" y="20" fill="{colours["faint"]}">tokens/s in all; numbers: requests at a time</text>',
        f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle" fill="{colours["faint"]}">'
        "tokens/s of a user</text>",
        "</svg>",
    ]
    return "\n".join(text) + "\n"


def pictures() -> dict[Path, str]:
    """Return the content of each picture by its file."""
    return {DOCS / "pictures" / f"engines-{name}.svg": draw(colours) for name, colours in COLOURS.items()}
