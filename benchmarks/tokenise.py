"""Conversations to token rows at scale: conversations/s, tokens/s, and memory above the interpreter's.

    python benchmarks/tokenise.py [--conversations 100000] [--processes 2] [--json FILE]

The conversations are those of the standard library (`source: stdlib`), repeated with another first word
in every question, some with a second exchange, so that no two are the same; the tokenizer is the embedded target's.
They are made while they are read: nothing but the tokeniser could hold them in memory.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import load_from_disk
from parts.timing import benchmark_parser, peak_resident_bytes, write_figures
from tqdm import tqdm
from transformers import AutoTokenizer

from draftsmith.data.distill.token_dataset import MOST_PROCESSES, Answered, Work, save_rows, write_token_rows
from draftsmith.data.sources.conversation import Conversation, Turn, open_records, parse_conversation
from draftsmith.recipes.schema import SourceRecipe

SOURCES = 2000  # different conversations that are repeated
MAX_LENGTH_TOKENS = 2048


def synthetic(sources: list[Conversation], count: int) -> Iterator[Answered]:
    """Make `count` conversations in the order of their ids, no two the same."""
    for number in range(count):
        first, second = sources[number % len(sources)], sources[(7 * number + 1) % len(sources)]
        turns = first.turns + (second.turns if number % 3 == 0 and second.turns[0].role == "user" else ())
        asked = Turn(turns[0].role, f"({number}) {turns[0].content}")
        yield Conversation(f"{number:012d}", (asked, *turns[1:])), None


def measure(count: int, processes: int) -> dict[str, Any]:
    from draftsmith.models.target.loading import EMBEDDED_TARGET  # torch, which the workers do not need

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    records = islice(open_records(SourceRecipe(), "all"), SOURCES)
    sources = [parse_conversation(record, where) for where, record in records]
    with tempfile.TemporaryDirectory() as folder:
        rows_file, final = Path(folder) / "rows.arrow", Path(folder) / "tokens"
        interpreter_mib, begin_s = peak_resident_bytes() / 2**20, time.perf_counter()
        with tqdm(total=count, desc="tokenise", unit="conv") as bar:
            conversations = synthetic(sources, count)
            counts = write_token_rows(conversations, Work(tokenizer, MAX_LENGTH_TOKENS), rows_file, processes, bar)
        save_rows(rows_file, final)
        wall_time_s = time.perf_counter() - begin_s
        dataset = load_from_disk(str(final))
        assert len(dataset) == counts.rows
        return {
            "conversations": count,
            "processes": processes,
            "rows": counts.rows,
            "tokens": counts.tokens,
            "wall_time_s": wall_time_s,
            "conversations_per_s": count / wall_time_s,
            "tokens_per_s": counts.tokens / wall_time_s,
            "interpreter_mib": interpreter_mib,
            "above_interpreter_mib": peak_resident_bytes() / 2**20 - interpreter_mib,
        }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, MOST_PROCESSES))
    options = parser.parse_args()
    row = measure(options.conversations, options.processes)
    print(
        f"{row['conversations']:,} conversations, {row['tokens']:,} tokens, {row['processes']} processes: "
        f"{row['wall_time_s']:.0f} s, {row['conversations_per_s']:,.0f} conversations/s, "
        f"{row['tokens_per_s']:,.0f} tokens/s; {row['above_interpreter_mib']:.0f} MiB above the interpreter"
    )
    write_figures(options, row)


if __name__ == "__main__":
    main()
