"""What became of every record of every source, by reason: for the console, the checkup and the data card."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


def counted_reasons(counts: Counter[str]) -> str:
    """`3 (2 empty turn, 1 not JSON)`, for reports."""
    details = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
    return f"{counts.total()} ({details})" if counts else "0"


@dataclass
class Tally:
    """Of one source. Every record that was read is in exactly one of the others."""

    read: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    other_split: int = 0
    contaminated: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    kept: int = 0

    def sentence(self) -> str:
        """One line for the console."""
        parts = [f"{self.kept} of {self.read} records kept"]
        for name, count in (
            ("invalid", counted_reasons(self.invalid) if self.invalid else 0),
            ("duplicates", self.duplicates),
            ("of the other split", self.other_split),
            ("contaminated", counted_reasons(self.contaminated) if self.contaminated else 0),
            ("filtered", counted_reasons(self.filtered) if self.filtered else 0),
        ):
            if count:
                parts.append(f"{name}: {count}")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """The same for `card.json`."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}


@dataclass
class SourceCounts:
    """Of all sources, by name; filled while `load_conversations` is consumed.

    `contaminated_ids` says for each conversation that was left out as contaminated which question it repeats.
    """

    by_source: dict[str, Tally] = field(default_factory=dict)
    contaminated_ids: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> Tally:
        """Of all sources together."""
        total = Tally()
        for tally in self.by_source.values():
            for name, value in vars(tally).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    def sentence(self) -> str:
        """A line for each source."""
        return "\n".join(f"{name}: {tally.sentence()}" for name, tally in self.by_source.items())
