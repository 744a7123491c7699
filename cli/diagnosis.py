"""Findings of `draftsmith doctor`, and how they are printed, with examples of the data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch
from rich.text import Text

from draftsmith.cli.console import console
from draftsmith.data.tokens.loss_mask import TokenizedConversation
from draftsmith.errors import UserError

Severity = Literal["ok", "warning", "defect"]
STYLES = {"ok": "green", "warning": "yellow", "defect": "bold red"}
PREVIEW_TOKENS = 400


@dataclass(frozen=True)
class Finding:
    """One line of the checklist.

    check: name of the check. severity: a defect would waste the training; a warning may be intended.
    sentence: the result, with the way out. figures: the result as numbers, for `--json`.
    """

    check: str
    severity: Severity
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(check: str, fine: str, figures: dict[str, Any], *faults: tuple[Any, Severity, str]) -> Finding:
        """Build a finding from the first fault that applies, or from the sentence `fine`.

        Args:
            faults: (whether it applies, its severity, its sentence), the most important first.
        """
        severity, sentence = next((each[1:] for each in faults if each[0]), ("ok", fine))
        return Finding(check, severity, sentence, figures)


@dataclass
class Diagnosis:
    """Result of `examine`: findings by their headings, and examples to print.

    rows: distilled examples, or the source's if nothing is distilled yet.
    """

    recipe_name: str
    tokenizer: Any
    parts: dict[str, list[Finding]] = field(default_factory=dict)
    rows: list[TokenizedConversation] = field(default_factory=list)

    def add(self, part: str, check: str, findings: Iterable[Finding]) -> None:
        """Add the findings of a check to a part of the list; a `UserError` that ends the check is a defect."""
        listed = self.parts.setdefault(part, [])
        try:
            for finding in findings:
                listed.append(finding)
        except UserError as error:
            listed.append(Finding(check, "defect", str(error)))
        except torch.OutOfMemoryError:
            sentence = "not checked: the GPU's memory is too small; try target.device=cpu, `draftsmith plan` has others"
            listed.append(Finding(check, "warning", sentence))
        if not listed:
            del self.parts[part]

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for part in self.parts.values() for finding in part)

    def show(self, preview_rows: int) -> None:
        """Print the examples, then the checklist, so that the result comes last."""
        plain = console.color_system is None
        rows = self.rows[:preview_rows]
        if rows:
            colours = ("Tokens ", ("with loss", "bold green"), ", tokens ", ("without loss", "dim"))
            console.print("Tokens with loss are between « and »." if plain else Text.assemble(*colours))
        for number, row in enumerate(rows, start=1):
            console.print(f"\nExample {number}: {len(row.input_ids)} tokens, {sum(row.loss_mask)} of them with loss")
            console.print(preview(self.tokenizer, row, marks=plain))
        for name, findings in self.parts.items():
            console.print(f"\n{name}", style="bold", markup=False)
            for finding in findings:
                severity = ("  " + finding.severity.ljust(8), STYLES[finding.severity])
                console.print(Text.assemble(severity, finding.check.ljust(24), finding.sentence))
        numbers = {each: self.count(each) for each in ("defect", "warning")}
        counts = "\n" + ", ".join(f"{number} {each}{'s' * (number != 1)}" for each, number in numbers.items())
        console.print(counts, style="bold red" if numbers["defect"] else "bold green")

    def as_json(self) -> dict[str, Any]:
        """Return all findings with their figures; a recipe with warnings alone counts as healthy."""
        findings = [{"part": name, **asdict(finding)} for name, part in self.parts.items() for finding in part]
        return {"recipe": self.recipe_name, "healthy": not self.count("defect"), "findings": findings}


def preview(tokenizer: Any, row: TokenizedConversation, marks: bool = False) -> Text:
    """Return an example's text, tokens with loss in colour, the rest dim.

    Args:
        marks: Also put tokens with loss between « and ».
    """
    text = Text()
    shown = list(zip(row.input_ids, row.loss_mask, strict=True))[:PREVIEW_TOKENS]
    for carries_loss, run in groupby(shown, key=lambda pair: bool(pair[1])):
        # decode() would raise for a negative id, which `check_rows` reports.
        piece = tokenizer.decode([max(0, token_id) for token_id, _ in run], skip_special_tokens=False)
        text.append(f"«{piece}»" if marks and carries_loss else piece, "bold green" if carries_loss else "dim")
    if len(row.input_ids) > PREVIEW_TOKENS:
        text.append(f" ... and {len(row.input_ids) - PREVIEW_TOKENS} more tokens", "italic")
    return text
