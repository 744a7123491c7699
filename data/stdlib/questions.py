"""The question set of the embedded target, in Spec-Bench's JSONL format, from modules it was never trained on.

`data/stdlib/embedded.jsonl` is committed, so that results are comparable between machines and Python versions; this
file says how it was made: `python -m draftsmith.data.stdlib.questions data/stdlib/embedded.jsonl`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from draftsmith.data.stdlib.conversations import MAKERS, build_conversations

QUESTION_COUNT = 96
MAX_PER_MODULE_AND_CATEGORY = 2


def build_questions(seed: int = 0, count: int = QUESTION_COUNT) -> list[dict[str, Any]]:
    """`count` questions `{"question_id", "category", "turns"}`, spread evenly over the categories and over modules."""
    categories = list(MAKERS)
    quota = {name: count // len(categories) + (i < count % len(categories)) for i, name in enumerate(categories)}
    used: Counter[tuple[str, str]] = Counter()
    turns: dict[str, list[list[str]]] = {name: [] for name in categories}
    for conversation in build_conversations(seed, "heldout"):
        category, key = conversation["category"], (conversation["category"], conversation["module"])
        if len(turns[category]) == quota[category] or used[key] == MAX_PER_MODULE_AND_CATEGORY:
            continue
        used[key] += 1
        turns[category].append([m["content"] for m in conversation["messages"] if m["role"] == "user"])
    pairs = [(category, question) for category in categories for question in turns[category]]
    return [
        {"question_id": number, "category": category, "turns": question}
        for number, (category, question) in enumerate(pairs, start=1)
    ]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(
        "".join(json.dumps(question) + "\n" for question in build_questions()), encoding="utf-8"
    )
