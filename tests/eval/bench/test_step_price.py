"""The prices of a step: medians over turns, by hand, with a clock that only moves when somebody works."""

from typing import Any

import pytest
import step_price

from draftsmith.eval.trees.tree import DraftTree


class Clock:
    """Seconds since nothing."""

    now = 0.0


class Session:
    """A forward takes `first_s`, and `row_s` for each row."""

    def __init__(self, first_s: float, row_s: float) -> None:
        self.first_s, self.row_s = first_s, row_s
        self.prompts: list[list[int]] = []

    def prefill(self, prompt_ids: list[int]) -> None:
        self.prompts.append(prompt_ids)

    def forward_tree(self, tree: DraftTree) -> None:
        Clock.now += self.first_s + self.row_s * len(tree)


class Reading:
    bytes = 400

    def seconds(self) -> float:
        return 0.5


def test_prices_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 1 s whose weights take 0.5 s to read, 800 bytes a second; 5 rows take 1.8 s, so 1.8 steps."""
    monkeypatch.setattr("time.perf_counter", lambda: Clock.now)
    sessions: dict[str, Any] = {"slow": Session(1.6, 0.4), "fast": Session(0.8, 0.2)}
    found = step_price.step_prices(sessions, Reading(), [1, 5], 7, turns=3)  # type: ignore[arg-type]
    assert (found["weights_bytes"], found["read_s"], found["read_bytes_per_s"]) == (400, 0.5, 800.0)
    fast = found["fast"]
    assert [fast[key] for key in ("step_s", "tokens_per_s", "share_of_reading")] == pytest.approx([1.0, 1.0, 0.5])
    assert fast["rows"]["5"] == pytest.approx({"seconds": 1.8, "steps": 1.8})
    assert found["slow"]["share_of_reading"] == pytest.approx(0.25)
    assert sessions["fast"].prompts == [[1] * 7]
