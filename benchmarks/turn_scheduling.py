"""What asking the next turn at once is worth against turn-by-turn waves, on conversations of 1 to 9 turns.

    python benchmarks/turn_scheduling.py --json docs/results/machinery/turn_scheduling.json

Both sides are the project's own distiller and its openai engine, ledger and all, on the same simulated server
(`parts/simulated_server.py`); the waves are the same engine behind `InWaves`. Same conversations, same answers,
alternating.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parts.in_waves import InWaves
from parts.simulated_server import Latencies, SimulatedServer

from draftsmith.data.distill.distill import distill
from draftsmith.data.engines.engine import Engine, EngineSetting, open_engine
from draftsmith.data.tokens.end_ids import answer_end_ids
from draftsmith.models.target.loading import load_generation_config, load_tokenizer, target_location
from draftsmith.recipes.errors import exit_with_one_sentence
from draftsmith.recipes.results import write_result
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

# How the scheduler sees the engine.
SIDES: dict[str, Callable[[Engine], Engine]] = {"at_once": lambda engine: engine, "waves": InWaves}
MOST_TURNS = 9


def write_conversations(file: Path, count: int) -> int:
    """1 to 9 turns, every number equally often, questions of 3 to 15 words; returns the number of turns."""
    spread, turns = random.Random(5), 0
    with file.open("w", encoding="utf-8") as stream:
        for number in range(count):
            chat = []
            for turn in range(1 + number % MOST_TURNS):
                words = " ".join(str(spread.randrange(1000)) for _ in range(spread.randint(3, 15)))
                chat.append({"from": "human", "value": f"{number} {turn}: {words}"})
                chat.append({"from": "gpt", "value": "whatever"})
                turns += 1
            stream.write(json.dumps({"conversations": chat}) + "\n")
    return turns


def distilled_in(side: str, recipe: Recipe, tokenizer: Any, end_ids: tuple[int, ...]) -> tuple[float, int]:
    """Seconds of the whole distillation, and the tokens it made."""
    setting = EngineSetting(recipe, tokenizer, target_location(recipe.target), end_ids)

    @contextmanager
    def opened() -> Iterator[Engine]:
        with open_engine(setting) as engine:
            yield SIDES[side](engine)

    with tempfile.TemporaryDirectory(prefix="turn-scheduling-") as folder:
        placed = recipe.model_copy(update={"runs_dir": folder})
        began = time.perf_counter()
        report = distill(placed, tokenizer, RunFolder(placed), opened, progress=False)
        seconds = time.perf_counter() - began
    assert not report.failed, report
    return seconds, report.tokens_generated


@exit_with_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--conversations", type=int, default=144)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    latencies = Latencies()
    recipe = Recipe.model_validate({"name": "turn_scheduling", "data": {"max_length_tokens": 100_000}})
    tokenizer = load_tokenizer(recipe.target)
    end_ids = tuple(answer_end_ids(load_generation_config(recipe.target), tokenizer))
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    tokens = set()
    with tempfile.TemporaryDirectory(prefix="turn-scheduling-") as folder:
        source = Path(folder) / "chats.jsonl"
        turns = write_conversations(source, arguments.conversations)
        recipe.data.conversations.source = str(source)
        recipe.data.distill.engine = "openai"
        for run in range(arguments.runs):
            for side in SIDES if run % 2 else reversed(SIDES):
                server = SimulatedServer(latencies)  # with an empty prefix cache
                options = {"base_urls": [server.url], "concurrency_per_server": latencies.batch}
                recipe.data.distill.options = options
                took, made = distilled_in(side, recipe, tokenizer, end_ids)
                server.stop()
                seconds[side].append(took)
                tokens.add(made)
    assert len(tokens) == 1, "both sides must have generated the same"
    ratios = [waves / at_once for waves, at_once in zip(seconds["waves"], seconds["at_once"], strict=True)]
    result = {
        "ratio_median": statistics.median(ratios),
        "ratios": ratios,
        "seconds": {side: statistics.median(values) for side, values in seconds.items()},
        "conversations": arguments.conversations,
        "turns": turns,
        "tokens": tokens.pop(),
        "latencies": vars(latencies),
    }
    print(f"next turn at once: {result['ratio_median']:.2f}x turn-by-turn waves", end="; ")
    print(", ".join(f"{side} {values:.1f} s" for side, values in result["seconds"].items()))
    if arguments.json:
        write_result(arguments.json, result)


if __name__ == "__main__":
    main()
