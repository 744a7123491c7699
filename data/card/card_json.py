"""`data/card.json` read back as far as reports tell it: what went in, what was left out, what the target made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class CardSource:
    """Conversations of one source; counts by reason where there are several."""

    read: int
    kept: int
    distilled: int
    without_answer: int = 0
    duplicates: int = 0
    contaminated: dict[str, int] = field(default_factory=dict)
    filtered: dict[str, int] = field(default_factory=dict)
    invalid: dict[str, int] = field(default_factory=dict)

    @property
    def left_out(self) -> int:
        """Filtered out, unreadable, or twice."""
        return self.duplicates + sum(self.filtered.values()) + sum(self.invalid.values())


@dataclass
class DataCard:
    """tokens: of `prompt` and of `answer` the total, mean, quantiles and the longest, by name."""

    sources: dict[str, CardSource]
    tokens: dict[str, dict[str, float]]
    engine: dict[str, Any] = field(default_factory=dict)
    hashes: dict[str, Any] = field(default_factory=dict)
