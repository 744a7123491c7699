"""What one call of self-distillation did, and why conversations came to nothing or lost their later turns."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.sources.counts import SourceCounts, counted_reasons

CUT_SHORT = "answer cut short by max_new_tokens"
PROMPT_TOO_LONG = "prompt too long"
EMPTY_ANSWER = "empty answer"
REFUSED = "refused by the chat template"
REWRITTEN = "rewritten by the chat template"
NO_QUESTION = "no question"
# What another try would end with again; all other failures are the engine's.
FINAL_REASONS = (CUT_SHORT, PROMPT_TOO_LONG, EMPTY_ANSWER, REFUSED, REWRITTEN, NO_QUESTION)


@dataclass
class DistillReport:
    """What one call did. `kept` are conversations written; of these, `shortened` lost their later turns."""

    folder: Path
    kept: int = 0
    shortened: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    answers_cut_short: int = 0
    sources: SourceCounts = field(default_factory=SourceCounts)
    already_done: int = 0
    retried: int = 0
    lost: int = 0
    answers: int = 0
    tokens_generated: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The same, for programs."""
        return {
            **vars(self),
            "folder": str(self.folder),
            "sources": {name: tally.as_json() for name, tally in self.sources.by_source.items()},
        }

    def sentence(self) -> str:
        """What was done, for the console."""
        rate = self.tokens_generated / self.seconds if self.seconds else 0.0
        engine_failures = self.failed.keys() - set(FINAL_REASONS)
        lines = [
            f"{self.kept} conversations written to {self.folder}, {self.already_done} were there already",
            f"shortened: {counted_reasons(self.shortened)}; failed: {counted_reasons(self.failed)}"
            + ("; `draftsmith distill --retry-failed` tries the engine's failures again" if engine_failures else ""),
            self.sources.sentence(),
            f"{self.tokens_generated} tokens in {self.answers} answers, {self.seconds:.0f} s, {rate:.0f} tokens/s",
        ]
        if self.lost:
            lines.append(f"{self.lost} conversations went to another process, which had taken this one for dead")
        return "\n".join(lines)
