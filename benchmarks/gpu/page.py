"""The summary page, in Markdown, from the steps' figures. Needs no torch: it is written after every step."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ERROR, SKIPPED = ".error", ".skipped"  # as in `step.py`
MOST_CHARACTERS = 200  # of a line about an error
FACTS = {
    "copy_bytes_per_s": ("large copy, read and written", 1e-9, "GB/s"),
    "read_bytes_per_s": ("large read", 1e-9, "GB/s"),
    "bf16_flops_per_s": ("product of matrices in bf16", 1e-12, "TFLOP/s"),
    "head_1_rows_s": ("SmolLM2-135M's head, 1 row", 1e6, "us"),
    "head_8_rows_s": ("SmolLM2-135M's head, 8 rows", 1e6, "us"),
    "head_64_rows_s": ("SmolLM2-135M's head, 64 rows", 1e6, "us"),
    "launch_s": ("launch", 1e6, "us"),
    "launch_and_wait_s": ("launch and wait", 1e6, "us"),
    "item_s": ("`.item()`", 1e6, "us"),
    "to_device_s": ("copy of a small list by `to_device`", 1e6, "us"),
    "pageable_copy_s": ("the same from ordinary memory", 1e6, "us"),
    "graph_kernel_s": ("kernel of a CUDA graph", 1e6, "us"),
}


def load_figures(folder: Path, name: str) -> dict[str, Any]:
    """Read a step's figures; empty if it has none."""
    try:
        values = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:MOST_CHARACTERS] if lines else ""


def problems(figures: dict[str, Any]) -> list[str]:
    """Return a line for every part that failed, with its exception's last line, and for every part left out."""
    failed = [f"{key.removesuffix(ERROR)}: {last_line(str(figures[key]))}" for key in figures if key.endswith(ERROR)]
    skipped = [f"{key.removesuffix(SKIPPED)} left out: {figures[key]}" for key in figures if key.endswith(SKIPPED)]
    return failed + skipped


def number(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "NO", None: ""}[value]
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.3g}"
    return str(value).replace("|", "/").replace("\n", " ")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = ["| " + " | ".join(number(cell) for cell in row) + " |" for row in rows]
    return ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines, ""] if lines else []


def summary(title: str, outcomes: list[dict[str, Any]], figures: dict[str, dict[str, Any]]) -> str:
    """Write the page.

    Args:
        outcomes: Of each step that has run: its `step`, `exit` code, `seconds`, `limit_s` and `problems`.
        figures: The figures of each step.
    """
    lines = [f"# {title}", *facts_part(figures.get("facts", {}))]
    rows = [
        [each["step"], each["exit"], each["seconds"], each["limit_s"], "; ".join(each["problems"])] for each in outcomes
    ]
    lines += ["## Steps", *table(("step", "exit code", "seconds", "limit", "failed or left out"), rows)]
    kinds = {key: value for name in figures if name.startswith("kinds") for key, value in figures[name].items()}
    tests = {name: figures[name] for name in figures if name.startswith("tests")}
    lines += ["## Correctness", *tests_part(tests), *kinds_part(kinds), *quickstart_part(figures.get("quickstart", {}))]
    lines += ["## Costs", *costs_part(figures.get("step_cost", {}))]
    lines += rates_part(figures.get("distill", {}), figures.get("training", {}))
    return "\n".join(lines) + "\n"


def facts_part(facts: dict[str, Any]) -> list[str]:
    device, versions = facts.get("device", {}), facts.get("versions", {})
    names = ("python", "torch", "cuda", "triton", "transformers")
    first = ", ".join([str(device.get("name", "no GPU")), *(f"{name} {versions.get(name)}" for name in names)])
    rows = [
        (name, f"{number(facts[key] * scale)} {unit}") for key, (name, scale, unit) in FACTS.items() if key in facts
    ]
    return ["", first, *table(("fact", "measured"), rows)]


def tests_part(tests: dict[str, dict[str, Any]]) -> list[str]:
    keys = ("passed", "failed", "skipped", "not_run")
    rows = [(name, *(values.get(key, 0 if key != "not_run" else "") for key in keys)) for name, values in tests.items()]
    failures = [
        f"- {name}: {last_line(message)}"
        for each in tests.values()
        for name, message in each.get("failures", {}).items()
    ]
    return [*table(("tests", *keys[:3], "not run"), rows), *failures]


def kinds_part(kinds: dict[str, Any]) -> list[str]:
    rows = []
    for kind in dict.fromkeys(key.partition(".")[0] for key in kinds):
        parity, losses, answers = (kinds.get(f"{kind}.{what}") or {} for what in ("parity", "losses", "answers"))
        compared = {name: each["is_identical"] for name, each in answers.items() if "is_identical" in each}
        different = [name for name, is_identical in compared.items() if not is_identical]
        identical = f"{len(compared) - len(different)} of {len(compared)}" + "".join(
            f"; NOT {name}" for name in different
        )
        rows.append((kind, parity.get("worst"), parity.get("is_within_tolerance"), losses.get("falls"), identical))
    head = ("kind", "training against decoding", "within tolerance", "bf16 loss falls", "greedy answers identical")
    return table(head, rows)


def quickstart_part(quickstart: dict[str, Any]) -> list[str]:
    lines = []
    for part in ("fp32", "fp32, compiled", "bf16"):
        measured = quickstart.get(part)
        if not measured:
            continue
        rows = [
            [
                part,
                key,
                *(row.get(name) for name in ("answers", "as_on_cpu", "as_baseline", "tau", "cpu_tau", "tokens_per_s")),
            ]
            for key, row in measured["methods"].items()
        ]
        head = ("quickstart", "method", "answers", "as on CPU", "as baseline", "tau", "tau on CPU", "tokens/s")
        lines += table(head, rows)
        lines.append(
            f"{part}: {measured['different']} answers differ from the baseline's, {measured['ties']} of them at a tie."
        )
    return lines


def costs_part(costs: dict[str, Any]) -> list[str]:
    rows = []
    for part in ("uncompiled", "compiled", "compiled, more rows"):
        for count, each in costs.get(part, {}).get("rows", {}).items():
            rows.append((part, count, 1e3 * each["seconds"], 1e3 * each["fastest_s"], 1e3 * costs[part]["read_s"]))
    lines = [f"SmolLM2-135M's shape in bf16, weights: {costs.get('weights')}."] if costs else []
    lines += table(("step", "rows", "ms", "fastest", "reading the weights"), rows)
    loops: dict[str, Any] = {key: costs[key] for key in ("uncompiled loop", "compiled loop") if key in costs}
    drafts = {key: each for key, each in costs.items() if isinstance(each, dict) and "first_s" in each}
    loops |= {f"{key}: tree of 7": each["rounds"] for key, each in drafts.items()}
    phases = ("round_ms", "draft_ms", "verify_ms", "choose_ms", "commit_ms")
    rows = [
        (key, *(each[phase] for phase in phases), each["device"]["idle_ms"], each.get("loop_efficiency"))
        for key, each in loops.items()
    ]
    head = ("round", "ms", "draft", "verify", "choose", "commit", "device idle (host)", "loop efficiency")
    lines += table(head, rows)
    drafted = [(key, value["draft_ms"], value["first_s"]) for key, value in drafts.items()]
    lines += table(("draft of 12 nodes", "ms", "first answer, seconds"), drafted)
    profiled = costs.get("kernels", {"top": []})
    if profiled["top"]:
        lines.append("A step of 8 rows: {wall_ms:.2f} ms, its kernels {kernels_ms:.2f}, those:".format(**profiled))
    return lines + table(("kernel", "ms a step", "calls a step"), profiled["top"])


def rates_part(distill: dict[str, Any], training: dict[str, Any]) -> list[str]:
    rows = []
    if measured := distill.get("measured"):
        rows.append(("distilling, engine: transformers", measured["tokens_per_s"], f"{measured['answers']} answers"))
    if measured := training.get("folded"):
        parts = ", ".join(f"{name} {1e3 * measured[f'{name}_s']:.1f}" for name in ("step", "target", "layer", "loss"))
        rows.append(("training, 135M, 2,048 tokens a step", measured["tokens_per_s"], f"ms: {parts}"))
    return table(("rate", "tokens/s", "of"), rows)
