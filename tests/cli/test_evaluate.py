"""The table in the terminal, and the GPUs of several processes."""

import re
from typing import Any

import pytest
from support.report_facts import BASELINE, BUG, SUMMARY, TIES, TIMING, row

from draftsmith.cli import console
from draftsmith.cli.evaluate import show_table


def test_terminal_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line per method, the fastest first: the tree takes 0.25 steps to draft, 4.5 ms over 4 ms to verify."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(console, "console", console.PlainConsole())  # another test's may be narrow

    def shown(summary: list[dict[str, Any]], is_embedded: bool = False) -> str:
        show_table(summary, BASELINE, TIMING, is_embedded)
        return capsys.readouterr().out.replace("|", " ")

    lenient = row("fast", "overall", speedup_mean=3.0, greedy_identical=None, lossless=False)
    text = shown([*SUMMARY, BUG, TIES, lenient])
    assert re.search(r"tree +2.01x +too few questions +2.50 +1.38: 0.25 \+ 1.12 +yes", text)
    assert re.search(r"bad .* NO\s", text)
    assert re.search(r"rounded .* but for 3 ties", text)
    assert re.search(r"fast .* not lossless\s", text)
    names = re.findall(r"^ *(fast|tree|chain|bad|rounded|autoregressive)\b", text, flags=re.MULTILINE)
    assert names == ["fast", "tree", "chain", "bad", "rounded"]
    assert "do not have the target's distribution" in text
    assert ("GB/s" in text, "four million parameters" in text) == (True, False)
    embedded = shown(SUMMARY, is_embedded=True)
    assert ("GB/s" in embedded, "four million parameters" in embedded) == (False, True)
    # A long name hides no figure, and a name is text, not markup.
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console, "console", console.PlainConsole())
    text = shown([*SUMMARY, row("a-recipe-with-a-rather-long-name/[red]its-method", "overall", tau=2.71)])
    assert "2.71" in text
    assert "[red]" in re.sub(r"\s", "", text)
