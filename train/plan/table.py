"""A plan for people: one table, each line with how it was computed, then the verdict."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftsmith.recipes.run_folder import bytes_text, scaled
from draftsmith.train.plan.plan import USABLE_FRAC, Line, Plan, SetUp

GROUPS = {
    "parameters": "Parameters",
    "batches": "Batches",
    "memory": "Memory, when most is in use",
    "disk": "Disk",
    "flops_per_token": "Computation",
    "throughput": "Speed",
}


def show_plan(plan: Plan, console: Console, memory_gib: float | None = None) -> None:
    """Print it; memory_gib: of the device, which set-ups that do not fit are marked by."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", "amount", "how it was computed"):
        table.add_column(heading, justify="right" if heading == "amount" else "left", overflow="fold")
    for group, heading in GROUPS.items():
        table.add_row(f"[bold]{heading}[/bold]")
        for line in getattr(plan, group):
            table.add_row(f"  {line.what}", amount_of(line), escape(line.how))
        if group == "memory":
            phases = ", ".join(f"{name} {bytes_text(size)}" for name, size in plan.phase_peak_bytes.items())
            table.add_row("  peaks", "", phases)
    console.print(table, soft_wrap=False)  # folded at the terminal's width
    if plan.set_ups:
        console.print(_of_set_ups(plan.set_ups, memory_gib))
    for note in plan.notes:
        console.print(f"Note: {escape(note)}.")
    if plan.verdict is not None:
        colour = "green" if plan.verdict.sentence.startswith("fits") else "yellow" if plan.verdict.fits else "red"
        console.print(f"[bold {colour}]{plan.verdict.sentence}[/bold {colour}]")


def _of_set_ups(set_ups: list[SetUp], memory_gib: float | None) -> Table:
    """A row for each launch, a column for each place of the target: bytes, a cross where these do not fit, a dash."""
    title = f"Memory of each of {set_ups[0].processes} processes, by where the target is"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", title=title, title_justify="left")
    table.add_column("")
    for placement in dict.fromkeys(each.target for each in set_ups):
        table.add_column(placement, justify="right")
    room_bytes = float("inf") if memory_gib is None else USABLE_FRAC * memory_gib * 2**30
    cells = {
        (each.launch, each.target): "-"
        if each.bytes is None
        else bytes_text(each.bytes) + ("" if each.bytes <= room_bytes else " ✗")
        for each in set_ups
    }
    for launch in dict.fromkeys(each.launch for each in set_ups):
        table.add_row(f"  {launch}", *(cell for (name, _), cell in cells.items() if name == launch))
    return table


def amount_of(line: Line) -> str:
    """`15.0 GiB`, `7.9 MFLOP/token`, `3 h 20 min`."""
    if line.unit.startswith("bytes"):
        return bytes_text(line.amount) + line.unit.removeprefix("bytes")
    if line.unit == "seconds":
        minutes = round(line.amount / 60)
        return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min" if minutes else "< 1 min"
    if line.unit.startswith("tokens"):
        return f"{line.amount:,.0f} {line.unit}"
    amount, prefix = scaled(line.amount, 1000, ("", "k", "M", "G", "T", "P"))
    if line.unit == "parameters":
        return f"{amount:.3g} {prefix.replace('G', 'B')}"
    return f"{amount:.3g} {prefix}FLOP/token"
