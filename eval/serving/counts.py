"""What vLLM counts of its drafts, from its own metrics or from the page that a server shows them on.

Its tau is 1 + accepted / drafts over all drafts together. Accepted are what verification let pass: of the last draft of
an answer that may be more than the answer still took, so that `figures` tells both.

Source: vLLM 0.32, `v1/spec_decode/metrics.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

DRAFTS = "vllm:spec_decode_num_drafts"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
ACCEPTED_BY_DEPTH = "vllm:spec_decode_num_accepted_tokens_per_pos"
GENERATED = "vllm:generation_tokens"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')


@dataclass(frozen=True)
class DraftCounts:
    """Counts since the engine began; of two of them the difference is what lay between.

    accepted_by_depth: drafts of which at least so many tokens were accepted, from depth 1 on.
    generated_tokens: of all answers.
    """

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    generated_tokens: int = 0

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        by_depth = zip_longest(self.accepted_by_depth, earlier.accepted_by_depth, fillvalue=0)
        return DraftCounts(
            self.drafts - earlier.drafts,
            self.drafted_tokens - earlier.drafted_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            tuple(now - before for now, before in by_depth),
            self.generated_tokens - earlier.generated_tokens,
        )

    @staticmethod
    def of_rounds(draft_lengths: list[int], draft_depths: list[int]) -> DraftCounts:
        """The same of our own decoder's rounds: drafted tokens kept, and drafted, in each."""
        depth = max(draft_depths, default=0)
        return DraftCounts(
            len(draft_lengths),
            sum(draft_depths),
            sum(draft_lengths),
            tuple(sum(length > place for length in draft_lengths) for place in range(depth)),
        )

    @property
    def tau(self) -> float | None:
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Marginal: the share of drafts whose token at this depth was accepted, and so all before it."""
        return [count / self.drafts for count in self.accepted_by_depth] if self.drafts else []

    @property
    def acceptance_conditional(self) -> list[float | None]:
        """Of the drafts whose token one depth before was accepted, those whose token here was."""
        return [now / before if before else None for before, now in pairwise((self.drafts, *self.accepted_by_depth))]


def of_metrics(metrics: Iterable[Any]) -> DraftCounts:
    """From `LLM.get_metrics()`; of several engines the sum."""
    values: dict[str, int] = {}
    by_depth: list[int] = []
    for metric in metrics:
        if metric.name == ACCEPTED_BY_DEPTH:
            by_depth = [a + b for a, b in zip_longest(by_depth, metric.values, fillvalue=0)]
        elif metric.name in (DRAFTS, DRAFTED, ACCEPTED, GENERATED):
            values[metric.name] = values.get(metric.name, 0) + int(metric.value)
    return _counts(values, by_depth)


def of_page(text: str) -> DraftCounts | None:
    """From a server's `/metrics`, in Prometheus' text format; None if they are not vLLM's."""
    values: dict[str, int] = {}
    by_depth: dict[int, int] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample[1].removesuffix("_total"), sample[2] or "", sample[3]
        if name == ACCEPTED_BY_DEPTH:
            position = _POSITION.search(labels)
            if position:
                by_depth[int(position[1])] = by_depth.get(int(position[1]), 0) + int(float(value))
        elif name in (DRAFTS, DRAFTED, ACCEPTED, GENERATED):
            values[name] = values.get(name, 0) + int(float(value))
    if GENERATED not in values:
        return None
    return _counts(values, [by_depth.get(place, 0) for place in range(max(by_depth, default=-1) + 1)])


def _counts(values: dict[str, int], by_depth: list[int]) -> DraftCounts:
    drafts, drafted, accepted, generated = (values.get(name, 0) for name in (DRAFTS, DRAFTED, ACCEPTED, GENERATED))
    return DraftCounts(drafts, drafted, accepted, tuple(by_depth), generated)
