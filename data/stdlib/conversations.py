"""Conversations about the Python standard library, in the messages format, for the embedded target.

`build_conversations` is deterministic in its seed (for one Python minor version). The held-out split is by module: a
stable hash of the module's name puts about one module in ten aside, and every item mentioned in a conversation comes
from the conversation's own split, so nothing of a held-out module is ever trained on.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

from draftsmith.data.stdlib import phrasing
from draftsmith.data.stdlib.items import StdlibItem, stdlib_items

Split = Literal["train", "heldout", "all"]
Maker = Callable[..., "list[str] | None"]

HELDOUT_FRAC = 0.1
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
    """Whether a run of 8 pieces occurs twice; pieces are about as long as the embedded tokenizer's tokens."""
    pieces = re.findall(r" ?[A-Za-z]{1,5}|\d| +|\n|[^\w\s]+|_", text)
    runs = [tuple(pieces[start : start + run_pieces]) for start in range(len(pieces) - run_pieces + 1)]
    return len(set(runs)) < len(runs)


def build_conversations(seed: int = 0, split: Split = "train", limit: int | None = None) -> list[dict[str, Any]]:
    """About 10,000 conversations over all splits, each `{"id", "category", "module", "messages"}`, in a shuffled order.

    `limit` keeps the first so many of the split.

    Raises:
        ValueError: `split` is none of train, heldout, all.
    """
    if split not in ("train", "heldout", "all"):
        raise ValueError(f"split={split!r}: wanted 'train', 'heldout' or 'all'")
    chosen = [
        conversation
        for conversation in _all_conversations(seed)
        if split == "all" or is_heldout(conversation["module"]) == (split == "heldout")
    ]
    return [
        {**conversation, "messages": [dict(message) for message in conversation["messages"]]}
        for conversation in chosen[:limit]
    ]


@lru_cache(maxsize=2)
def _all_conversations(seed: int) -> tuple[dict[str, Any], ...]:
    rng = random.Random(seed)
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
        wanted = CONVERSATION_COUNT * weight // 100
        conversations += _of_category(rng, category, maker, wanted, items, documented)
    rng.shuffle(conversations)
    return tuple(conversations)


def _of_category(
    rng: random.Random,
    category: str,
    maker: Maker,
    wanted: int,
    items: Sequence[StdlibItem],
    documented: dict[bool, list[StdlibItem]],
) -> list[dict[str, Any]]:
    """Walks over the items in a random order, more than once when there are too few, until `wanted` are made."""
    made: dict[str, dict[str, Any]] = {}
    order = list(items)
    for _ in range(3):
        rng.shuffle(order)
        for item in order:
            if len(made) == wanted:
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
    """Short enough for a row, no trivial only answer, and no answer that repeats itself."""
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
    return {"id": f"{category}-{digest}", "category": category, "module": item.module, "messages": messages}
