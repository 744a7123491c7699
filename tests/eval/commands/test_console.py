"""How wide tables and rules are: as the terminal, or, where there is none, as they need."""

import sys

import pytest
from rich.table import Table
from support.terminal import in_terminal

from draftsmith.eval.commands.console import PlainConsole, heading

NAME = "a-method-whose-name-is-longer-than-a-terminal-is-wide-" + "with-many-options-" * 5
PRINT_IT = f"""
from rich.table import Table
from draftsmith.eval.commands.console import PlainConsole
table = Table("method", "tau", show_header=False)
table.add_row({NAME!r}, "3.21")
PlainConsole(soft_wrap=False).print(table)
"""


@pytest.fixture(autouse=True)
def no_width_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def table() -> Table:
    shown = Table("method", "tau", box=None)
    shown.add_column("definition", overflow="fold")
    shown.add_row(NAME, "3.21", "x" * 300)
    shown.add_row("short", "3.2", "of a few words")
    return shown


def test_a_table_in_a_file_is_as_wide_as_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    PlainConsole().print(table())
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    places = [0, len(NAME) + 2, len(NAME) + 2 + len("3.21") + 2]  # a space on both sides of each column
    rows = (("method", "tau", "definition"), (NAME, "3.21", "x" * 300), ("short", "3.2", "of a few words"))
    assert lines == [f" {a:{places[1]}}{b:{places[2] - places[1]}}{c}" for a, b, c in rows]


def test_columns_are_obeyed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    PlainConsole(soft_wrap=False).print(table())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert 50 < max(map(len, lines)) <= 60


def test_in_a_terminal_it_is_folded() -> None:
    shown = in_terminal([sys.executable, "-c", PRINT_IT], TERM="xterm", NO_COLOR="1").decode()
    assert NAME not in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert "3.21" in shown


def test_a_rule_in_a_file_is_no_wider_than_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    heading("train", "a [recipe]")
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) == 80
    assert " train  a [recipe] " in line
