"""What `draftsmith doctor` says about what it looked at."""

from dataclasses import dataclass, field
from typing import Any, Literal

from draftsmith.data.tokens.chat_tokens import TokenizedConversation

Severity = Literal["ok", "warning", "defect"]


@dataclass(frozen=True)
class Finding:
    """One line of the checklist.

    Args:
        check: What was looked at, in a word or two.
        severity: A defect would waste the training; a warning may be meant.
        sentence: What was found and, unless it is fine, the way out.
        figures: The same as numbers, for programs.
    """

    check: str
    severity: Severity
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Checked:
    """Findings under one heading, and rows to show and to try the drafter on."""

    heading: str
    findings: list[Finding]
    rows: list[TokenizedConversation] = field(default_factory=list)
