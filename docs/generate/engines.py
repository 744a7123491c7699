"""Drafting in engines: the picture and the tables of docs/measured/engines.md, and the README's table of evidence.

make reference      # writes docs/pictures/engines-{light,dark}.svg and the tables

Figures are those of docs/results/engines: what `draftsmith bench` wrote, named ENGINE_KIND.json, and the steps of
`benchmarks/vllm_step.py`, named step_KIND.json. Without a file its rows are missing; a file that no entry names is an
error. Each processor has its table and its panel, and each row names its target with the dtype.
"""

import json
import math
import re
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from generate.chat import COLOURS

DOCS = Path(__file__).parents[1]
RESULTS = DOCS / "results" / "engines"
SMOLLM2, CODER = "SmolLM2-135M", "Qwen2.5-Coder-0.5B"
# Result files name no more than the processor's family.
PROCESSORS = {"Zen 4": "Zen 4, AVX-512 with bf16", "Zen 3": "Zen 3, AVX2 without bf16"}
VLLM, LLAMACPP = "vLLM 0.32", "llama.cpp"
PLUGIN = "`parallel`, by the plugin"


class Entry(NamedTuple):
    """Facts that a result file lacks. drafter: the one of the rows "with drafter"."""

    target: str
    engine: str
    drafter: str
    processor: str


# Of several results with the same rows the first counts.
SPEEDS = {
    "vllm_parallel": Entry(SMOLLM2, VLLM, PLUGIN, "Zen 4"),
    "vllm_eagle3": Entry(SMOLLM2, VLLM, "`eagle3`", "Zen 4"),
    "vllm_peagle": Entry(SMOLLM2, VLLM, "`peagle`", "Zen 4"),
    "llamacpp": Entry(SMOLLM2, LLAMACPP, "", "Zen 4"),
    "llamacpp_eagle3": Entry(SMOLLM2, LLAMACPP, "`eagle3`", "Zen 4"),
    "llamacpp_dflash2": Entry(SMOLLM2, LLAMACPP, "`dflash2`", "Zen 4"),
    "vllm_coder": Entry(CODER, VLLM, PLUGIN, "Zen 4"),
    "llamacpp_coder": Entry(CODER, LLAMACPP, "", "Zen 4"),
}
# Results with a drafter in an engine: answers and acceptance were compared. Those in fp32 count for that alone.
EVIDENCE = {
    "vllm_fp32": Entry(SMOLLM2, VLLM, PLUGIN, "Zen 4"),
    "vllm_coder_fp32": Entry(CODER, VLLM, PLUGIN, "Zen 3"),
} | {name: entry for name, entry in SPEEDS.items() if entry.drafter}
STEPS = {
    "step_plain": Entry(SMOLLM2, VLLM, "nothing", "Zen 4"),
    "step_parallel": Entry(SMOLLM2, VLLM, PLUGIN, "Zen 4"),
    "step_peagle": Entry(SMOLLM2, VLLM, "`peagle`", "Zen 4"),
    "step_eagle3": Entry(SMOLLM2, VLLM, "`eagle3`", "Zen 4"),
}
PLAIN, NGRAM = "without drafter", "n-gram lookup"
NO_DRAFT = "no draft"
LINES = {
    NO_DRAFT: "#8c959f",
    NGRAM: "#bf8700",
    PLUGIN: "#0969da",
    "`eagle3`": "#1a7f37",
    "`peagle`": "#8250df",
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 64, 186, 56, 52
# A target's dtype is an override, an option, or the end of a converted file's name; of llama.cpp's, its file's type.
DTYPE = re.compile(r"(?:target\.dtype=|--dtype |-[0-9a-f]{16}-)(bfloat16|float16|float32)\b")
GGUF_TYPE = re.compile(r"^Target .*[-.](\w+)\.gguf\.$", re.MULTILINE)


class Series(NamedTuple):
    """Whose rows are one line: of this processor, target with its dtype, engine, and what drafts."""

    processor: str
    target: str
    engine: str
    label: str


def figures(name: str, entry: Entry) -> dict[str, Any] | None:
    """Return a result's figures with `target` (and its dtype) and `machine`; None if there is no such file.

    Raises:
        ValueError: The file does not say its target's dtype.
    """
    file = RESULTS / f"{name}.json"
    if not file.is_file():
        return None
    result = json.loads(file.read_text(encoding="utf-8"))
    made = result["figures"]
    of_file = entry.engine == LLAMACPP
    dtypes = GGUF_TYPE.findall("\n".join(made["notes"])) if of_file else DTYPE.findall(result["command"])
    if not dtypes:
        raise ValueError(f"{file.name} does not say its target's {'GGUF file' if of_file else 'dtype'}")
    dtype = dtypes[-1].upper() if of_file else dtypes[-1]
    machine = (
        f"{result['machine']['processor']} ({PROCESSORS[entry.processor]}), {result['machine']['cpu_count']} cores"
    )
    # `target` is a time in a step's figures.
    return {**made, "of_target": f"{entry.target}, {dtype}", "machine": machine}


def check_names() -> None:
    """Check that every file of results is in a table.

    Raises:
        ValueError: No entry names the file.
    """
    unknown = sorted({file.stem for file in RESULTS.glob("*.json")} - {*SPEEDS, *EVIDENCE, *STEPS})
    if unknown:
        raise ValueError(f"no entry of {Path(__file__).name} names {', '.join(unknown)}: add one, or rename the files")


def series() -> dict[Series, list[dict[str, Any]]]:
    """Return the rows by line; the plain server's and the lookups' once, of the first result that has them."""
    check_names()
    found: dict[Series, list[dict[str, Any]]] = {}
    for name, entry in SPEEDS.items():
        result = figures(name, entry)
        if result is None:
            continue
        for row in result["rows"]:
            label = {PLAIN: NO_DRAFT, NGRAM: NGRAM}.get(row["arm"], entry.drafter)
            rows = found.setdefault(Series(result["machine"], result["of_target"], entry.engine, label), [])
            if all(row["concurrency"] != each["concurrency"] for each in rows):
                rows.append(row)
    for rows in found.values():
        rows.sort(key=lambda row: row["concurrency"])
    return found


def engines_speed() -> list[str]:
    """Return a table for each processor: tokens per second, by target, engine, what drafts and number of requests."""
    found = series()
    lines = []
    for machine in dict.fromkeys(key.processor for key in found):
        here = {key: rows for key, rows in found.items() if key.processor == machine}
        levels = sorted({row["concurrency"] for rows in here.values() for row in rows})
        head = " | ".join(f"{level} request{'s' * (level > 1)}" for level in levels)
        lines += [f"**{machine}**", ""]
        lines += [f"| target | engine | drafts | tau | {head} |", "|---|---|---|---|" + "---|" * len(levels)]
        servers = list(dict.fromkeys((key.target, key.engine) for key in here))
        for key in sorted(here, key=lambda each: servers.index((each.target, each.engine))):
            rows = here[key]
            by_level = {row["concurrency"]: row for row in rows}
            cells = [_speed(by_level[level]) if level in by_level else "-" for level in levels]
            taus = [f"{row['tau_committed']:.2f}" for row in rows if row["tau_committed"]]
            words = (key.target, key.engine, key.label, *(taus[:1] or ["-"]), *cells)
            lines.append(f"| {' | '.join(words)} |")
        lines.append("")
    return lines


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.{0 if tokens_per_s >= 10 else 1}f}"


def _speed(row: dict[str, Any]) -> str:
    faster = f", **{row['speedup']:.2f}x**" if row["speedup"] else ""
    return f"{_rate(row['tokens_per_s'])} ({_rate(row['user_tokens_per_s'])}){faster}"


def engines_step() -> list[str]:
    """Return a table for each processor and target: what a round costs in vLLM, in ms."""
    parts = {
        "target": "target's layers",
        "head": "its LM head",
        "drafter": "drafter",
        "sampling": "sampling",
        "rest": "vLLM's own",
        "step": "whole round",
    }
    tables: dict[str, list[str]] = {}
    for name, entry in STEPS.items():
        step = figures(name, entry)
        if step is not None:
            cells = [f"{step[part]:.1f}" if part in step else "-" for part in parts]
            tables.setdefault(f"**{step['of_target']}, on {step['machine']}**", []).append(
                f"| {entry.drafter} | {step['rows']} | {' | '.join(cells)} | {step['tau']:.2f} | "
                f"{_rate(step['tokens_per_s'])} |"
            )
    head = f"| drafts | rows | {' | '.join(parts.values())} | tau | tokens/s |"
    rule = "|---|---|" + "---|" * (len(parts) + 2)
    return [line for title, rows in tables.items() for line in (title, "", head, rule, *rows, "")]


def engines_evidence() -> list[str]:
    """Return the README's table of drafters that were run in an engine on a real target, with the acceptance there.

    Raises:
        ValueError: A result has no comparison with our own chain, or vLLM's answers were not compared with plain ones.
    """
    lines = [
        "| run in | drafter | target | answers as without it | tau there | tau of our chain |",
        "|---|---|---|---|---|---|",
    ]
    for name, entry in EVIDENCE.items():
        result = figures(name, entry)
        if result is None:
            continue
        own, same = result["own_chain"], _same_answers(result)
        if own is None or (same is None and entry.engine != LLAMACPP):
            raise ValueError(f"{name}.json has no evidence of its drafter: measure it again, or take it out of SPEEDS")
        cells = (f"{entry.engine}, CPU ({entry.processor})", entry.drafter, result["of_target"], same or "not provable")
        lines.append(f"| {' | '.join(cells)} | {own['engine_tau']:.3f} | {own['own_tau']:.3f} |")
    return lines


def _same_answers(result: dict[str, Any]) -> str | None:
    """Return how many answers with the drafter were plain ones; None where differences cannot be judged."""
    from draftsmith.eval.bench.divergence import Divergence

    proof = next((each for each in result["greedy"] if each["method"].startswith("with drafter")), None)
    if proof is None:
        return None
    ties = [Divergence(**each).is_tie for each in proof["divergences"]]
    same = f"{proof['prompts'] - len(ties)} of {proof['prompts']}"
    return same + (f"; {sum(ties)} of {len(ties)} differ at a numerical tie" if ties else "")


def draw(colours: dict[str, str]) -> str:
    """Return the SVG: a panel for each target and processor, one above the other."""
    panels: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for key, rows in series().items():
        if key.engine == VLLM:
            panels.setdefault(f"{key.target}, on {key.processor}", {})[key.label] = rows
    height = HEIGHT * max(1, len(panels))
    said = "Tokens per second in vLLM on two cores: of a user, and of all requests together"
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(said)}</title>",
    ]
    for number, (caption, lines) in enumerate(panels.items()):
        text += [
            f'<g transform="translate(0 {HEIGHT * number})">',
            f'<text x="{LEFT}" y="20" font-size="14" fill="{colours["text"]}">{escape(caption)}</text>',
            *_panel(lines, colours),
            "</g>",
        ]
    return "\n".join([*text, "</svg>"]) + "\n"


def _panel(lines: dict[str, list[dict[str, Any]]], colours: dict[str, str]) -> list[str]:
    """Return one panel: tokens/s of a user against tokens/s in all, both on a logarithmic axis."""
    points = [(row["user_tokens_per_s"], row["tokens_per_s"]) for rows in lines.values() for row in rows]
    bounds = [(min(each) / 1.2, max(each) * 1.2) for each in zip(*points, strict=True)]

    def place(value: float, axis: int) -> float:
        low, high = bounds[axis]
        share = math.log(value / low) / math.log(high / low)
        return LEFT + share * (WIDTH - LEFT - RIGHT) if axis == 0 else HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    text = []
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
        f'<text x="{LEFT}" y="{TOP - 14}" fill="{colours["faint"]}">'
        "tokens/s in all; numbers: requests at a time</text>",
        f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle" fill="{colours["faint"]}">'
        "tokens/s of a user</text>",
    ]
    return text


def pictures() -> dict[Path, str]:
    """Return the content of each picture by its file."""
    return {DOCS / "pictures" / f"engines-{name}.svg": draw(colours) for name, colours in COLOURS.items()}
