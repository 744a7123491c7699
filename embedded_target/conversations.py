"""Build the embedded target's conversations and questions from the Python standard library.

    python embedded_target/conversations.py data/embedded

writes `conversations.jsonl.zst` and `embedded.jsonl`, which are committed, so that every machine trains on the same
ones: the result depends on the interpreter's minor version alone, and the files were made with Python 3.11.7.

The held-out split is by module: a stable hash of the module's name puts about one module in ten aside, and every item
mentioned in a conversation comes from the conversation's own split, so nothing of a held-out module is ever trained
on. The questions come from held-out modules.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import phrasing
import zstandard
from items import StdlibItem, stdlib_items

Maker = Callable[..., "list[str] | None"]

SEED = 0
HELDOUT_FRAC = 0.1
QUESTION_COUNT = 96
MAX_PER_MODULE_AND_CATEGORY = 2
CONVERSATION_COUNT = 10_000
MAX_CONVERSATION_CHARS = 1_450  # about 450 tokens of the embedded tokenizer: fits a row of 512
MIN_ANSWER_CHARS = 24
REPEATED_RUN_PIECES = 8
SNIPPET_COUNTS = (3, 3, 4)

MAKERS: dict[str, tuple[Maker, int]] = {  # category -> (maker, weight in percent)
    "docstring": (phrasing.explain, 14),
    "source": (phrasing.recite, 8),
    "reading": (phrasing.read, 26),
    "multi_turn": (phrasing.converse, 16),
    "retrieval": (phrasing.retrieve, 16),
    "rewrite": (phrasing.rewrite, 14),
    "summary": (phrasing.summarize, 6),
}


def is_heldout(module: str) -> bool:
    digest = hashlib.sha256(module.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < HELDOUT_FRAC


def has_repeated_run(text: str, run_pieces: int = REPEATED_RUN_PIECES) -> bool:
    """Return whether a run of 8 pieces occurs twice; pieces are about as long as the embedded tokenizer's tokens."""
    pieces = re.findall(r" ?[A-Za-z]{1,5}|\d| +|\n|[^\w\s]+|_", text)
    runs = [tuple(pieces[start : start + run_pieces]) for start in range(len(pieces) - run_pieces + 1)]
    return len(set(runs)) < len(runs)


def build_conversations(count: int = CONVERSATION_COUNT) -> list[dict[str, Any]]:
    """Build `count` conversations `{"id", "category", "module", "split", "messages"}` in a shuffled order."""
    rng = random.Random(SEED)
    items = stdlib_items()
    documented = {
        heldout: [
            i
            for i in items
            if i.is_public and phrasing.first_paragraph(i.docstring, 200) and is_heldout(i.module) == heldout
        ]
        for heldout in (False, True)
    }
    conversations: list[dict[str, Any]] = []
    for category, (maker, weight) in MAKERS.items():
        conversations += _make_category(rng, category, maker, count * weight // 100, items, documented)
    rng.shuffle(conversations)
    return conversations


def choose_questions(conversations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choose held-out questions `{"question_id", "category", "turns"}`, spread evenly over categories and modules."""
    categories = list(MAKERS)
    quota = {
        name: QUESTION_COUNT // len(categories) + (i < QUESTION_COUNT % len(categories))
        for i, name in enumerate(categories)
    }
    used: Counter[tuple[str, str]] = Counter()
    turns: dict[str, list[list[str]]] = {name: [] for name in categories}
    for conversation in conversations:
        category, key = conversation["category"], (conversation["category"], conversation["module"])
        full = len(turns[category]) == quota[category] or used[key] == MAX_PER_MODULE_AND_CATEGORY
        if conversation["split"] != "heldout" or full:
            continue
        used[key] += 1
        turns[category].append([m["content"] for m in conversation["messages"] if m["role"] == "user"])
    pairs = [(category, question) for category in categories for question in turns[category]]
    return [
        {"question_id": number, "category": category, "turns": question}
        for number, (category, question) in enumerate(pairs, start=1)
    ]


def _make_category(
    rng: random.Random,
    category: str,
    maker: Maker,
    count: int,
    items: Sequence[StdlibItem],
    documented: dict[bool, list[StdlibItem]],
) -> list[dict[str, Any]]:
    """Make `count` conversations of a category, from the items in random order, at most three times each."""
    made: dict[str, dict[str, Any]] = {}
    order = list(items)
    for _ in range(3):
        rng.shuffle(order)
        for item in order:
            if len(made) == count:
                return list(made.values())
            extra: tuple[Any, ...] = ()
            if category == "retrieval":
                extra = (_other_snippets(rng, item, documented[is_heldout(item.module)]),)
            turns = maker(rng, item, *extra)
            if turns is None or not is_suitable(turns):
                continue
            conversation = _as_messages(category, item, turns)
            made.setdefault(conversation["id"], conversation)
    return list(made.values())


def _other_snippets(rng: random.Random, item: StdlibItem, documented: Sequence[StdlibItem]) -> list[StdlibItem]:
    others: list[StdlibItem] = []
    while len(others) < rng.choice(SNIPPET_COUNTS) - 1:
        other = rng.choice(documented)
        if other.name != item.name and other not in others:
            others.append(other)
    return others


def is_suitable(turns: Sequence[str]) -> bool:
    """Return whether a conversation fits a row, and has no trivial single answer and no repetitive answer."""
    answers = turns[1::2]
    return (
        sum(map(len, turns)) <= MAX_CONVERSATION_CHARS
        and all(turn.isascii() for turn in turns)
        and max(map(len, answers)) >= MIN_ANSWER_CHARS
        and not any(has_repeated_run(answer) for answer in answers)
    )


def _as_messages(category: str, item: StdlibItem, turns: Sequence[str]) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
    digest = hashlib.sha256("\0".join(turns).encode()).hexdigest()[:12]
    return {
        "id": f"{category}-{digest}",
        "category": category,
        "module": item.module,
        "split": "heldout" if is_heldout(item.module) else "train",
        "messages": messages,
    }


def main() -> None:
    """Write both files into the folder that the command line names."""
    folder = Path(sys.argv[1])
    conversations = build_conversations()
    text = {
        name: "".join(json.dumps(record) + "\n" for record in records)
        for name, records in (("conversations", conversations), ("questions", choose_questions(conversations)))
    }
    compressed = zstandard.ZstdCompressor(level=22).compress(text["conversations"].encode())
    (folder / "conversations.jsonl.zst").write_bytes(compressed)
    (folder / "embedded.jsonl").write_text(text["questions"], encoding="utf-8")


if __name__ == "__main__":
    main()
