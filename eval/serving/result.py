"""What a measurement in an engine found, in the run's folder and as tables for terminal and report."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftsmith.eval.serving.asking import DRAFTING
from draftsmith.recipes.run_folder import RunFolder, read_json
from draftsmith.recipes.schema import Recipe

# In the run's eval folder: of servers that were started for it, and of given ones.
STARTED, GIVEN = "vllm.json", "vllm-server.json"
DEFINITIONS = (
    "tau = 1 + accepted / drafts as vLLM counts them, over all drafts together; by question: the mean of the "
    "questions' tau, asked one at a time; committed: without what was accepted past an answer's end, which is "
    "draftsmith's tau. Kept at depth 1, 2, ...: share of drafts; given the one before: of those whose token one depth "
    "before was kept. At once: questions in flight; first token and ms per token: medians over answers."
)


@dataclass
class ServedRow:
    """Hold one side at one temperature and concurrency; see `asking` for the figures. `failures` are by reason."""

    arm: str
    temperature: float
    concurrency: int
    tokens_per_s: float | None
    time_per_output_token_s: float | None
    first_token_s: float | None
    tau: float | None
    tau_by_question: float | None
    tau_committed: float | None
    acceptance_by_depth: list[float]
    acceptance_conditional: list[float | None]
    speedup: float | None = None
    failures: dict[str, int] = field(default_factory=dict)


@dataclass
class Served:
    """Hold a measurement.

    place: what was measured, in words; notes: what a reader must know of it; own: our decoder's rows.
    """

    place: str
    rows: list[ServedRow]
    own: list[ServedRow]
    notes: list[str]

    @property
    def definitions(self) -> str:
        return DEFINITIONS

    def tables(self) -> list[tuple[tuple[str, ...], list[list[str]]]]:
        """Return headings and cells of two tables: the clock, and the drafts."""
        named = [("vLLM", row) for row in self.rows] + [("draftsmith", row) for row in self.own]
        clock = [{"who": who, **clock_cells(row)} for who, row in named]
        drafts = [{"who": who, **draft_cells(row)} for who, row in named if row.arm == DRAFTING]
        return [(tuple(cells[0]), [list(row.values()) for row in cells]) for cells in (clock, drafts) if cells]

    def show(self, console: Console) -> None:
        for headings, rows in self.tables():
            table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
            for name in headings:
                table.add_column(name, overflow="fold", no_wrap=name in ("who", "arm"))
            for cells in rows:
                table.add_row(*map(escape, cells))
            console.print(table)
        console.print(DEFINITIONS, style="italic")
        for note in self.notes:
            console.print(note, markup=False)


@dataclass
class _ResultFile:
    figures: Served


def recorded_served(recipe: Recipe) -> list[Served]:
    """Read what earlier measurements in engines wrote.

    Raises:
        UserError: A file is damaged.
    """
    files = [RunFolder(recipe).eval / name for name in (STARTED, GIVEN)]
    way_out = "delete {} and run `draftsmith eval --engine vllm` again"
    return [read_json(file, _ResultFile, way_out.format(file.name)).figures for file in files if file.is_file()]


def clock_cells(row: ServedRow) -> dict[str, str]:
    return {
        "arm": row.arm,
        "T": f"{row.temperature:g}",
        "at once": str(row.concurrency),
        "tokens/s": _number(row.tokens_per_s, 1),
        "speedup": _number(row.speedup),
        "ms per token": _number(row.time_per_output_token_s, 2, 1000),
        "first token, ms": _number(row.first_token_s, 1, 1000),
        "failed": str(sum(row.failures.values())),
    }


def draft_cells(row: ServedRow) -> dict[str, str]:
    return {
        "T": f"{row.temperature:g}",
        "at once": str(row.concurrency),
        "tau": _number(row.tau),
        "by question": _number(row.tau_by_question),
        "committed": _number(row.tau_committed),
        "kept at depth": " ".join(map(_number, row.acceptance_by_depth)) or "-",
        "given the one before": " ".join(map(_number, row.acceptance_conditional)) or "-",
    }


def _number(value: float | None, digits: int = 2, times: float = 1) -> str:
    return "-" if value is None else f"{value * times:.{digits}f}"
