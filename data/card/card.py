"""The card of a run's data: what went in, what was left out and why, what the target made of it.

data/README.md     for people, and for the Hub: with its front matter the folder can be uploaded as a dataset
data/card.json     the same, and the ids of the contaminated conversations, for programs
data/tokens.png    how long prompts and answers are in the rows that training reads
"""

import hashlib
import heapq
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
from datasets import Dataset
from huggingface_hub import DatasetCardData

from draftsmith.data.distill.ledger import FAILED, Distilled, LedgerView
from draftsmith.data.distill.token_dataset import answer_lengths, load_tokens, row_lengths
from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.sources.mixture import SourceCounts, question_sources
from draftsmith.data.sources.questions import questions_file
from draftsmith.data.sources.records import STDLIB, STDLIB_FILE
from draftsmith.recipes.run_folder import RunFolder, sha256_of, versions, write_atomically
from draftsmith.recipes.schema import MixedSourceRecipe, Recipe

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CARD, CARD_JSON, PICTURE = "README.md", "card.json", "tokens.png"
SAMPLES = 5
SHOWN_CHARS = 600
UNKNOWN_SOURCE = "no longer in the sources"
QUANTILES = {"median": 0.5, "95 %": 0.95}
BINS = 40
COLOURS = {"prompt": "#0072B2", "answer": "#E69F00"}  # Okabe and Ito: told apart by colour-blind readers too
HUB_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"))


@dataclass(frozen=True)
class CardInput:
    """What the card tells of.

    Args:
        recipe: Sources, engine and sampling are read off it.
        counts: Filled by a finished `load_conversations`.
        conversations: All that were kept, in any order; read once, none is held but for the samples.
        tokens: The rows that training reads, made of these conversations.
        failed: Conversations that came to nothing, by reason.
        tokenizer: The target's.
        data_files: Where the conversations lie, below the data folder; their hashes are taken.
        records_hash: Of all conversations, whatever the order in which they were written.
        engine: What else is to be said of the engine, by name: its version, the hash of the weights.
    """

    recipe: Recipe
    counts: SourceCounts
    conversations: Iterable[Distilled]
    tokens: Dataset
    failed: Counter[str]
    tokenizer: Any
    data_files: list[Path]
    records_hash: str
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Totals:
    """What was distilled, by source; samples are those with the smallest hashes, so that they stay the same."""

    distilled: Counter[str] = field(default_factory=Counter)
    shortened: dict[str, Counter[str]] = field(default_factory=dict)
    samples: list[tuple[int, str, Conversation]] = field(default_factory=list)

    def add(self, made: Distilled) -> None:
        conversation = made.conversation
        source = conversation.source or UNKNOWN_SOURCE
        self.distilled[source] += 1
        if made.shortened is not None:
            self.shortened.setdefault(source, Counter())[made.shortened] += 1
        rank = int.from_bytes(hashlib.sha256(f"sample {conversation.id}".encode()).digest()[:8], "big")
        heapq.heappush(self.samples, (-rank, conversation.id, conversation))
        if len(self.samples) > SAMPLES:
            heapq.heappop(self.samples)


def write_card_of_run(recipe: Recipe, counts: SourceCounts, tokenizer: Any, weights: str | None) -> Path:
    """The card of what the run's ledger and its token dataset hold. Returns its path.

    Args:
        recipe: What it was distilled by.
        counts: Filled by a finished `load_conversations`.
        tokenizer: The target's.
        weights: The hash of the target's weights.
    """
    run = RunFolder(recipe)
    folder, tokens = run.data, load_tokens(run, recipe.name)
    view = LedgerView(folder)
    failed = view.counts().get(FAILED, Counter())
    engine = {"weights": weights}
    card = CardInput(
        recipe, counts, view.distilled(), tokens, failed, tokenizer, view.files(), view.fingerprint(), engine
    )
    return write_data_card(folder, card)


def write_data_card(folder: Path, card: CardInput) -> Path:
    """Write the card, its picture and its JSON into the run's data folder. Returns the card's path."""
    totals = _Totals()
    for conversation in card.conversations:
        totals.add(conversation)
    answer_tokens = answer_lengths(card.tokens)
    prompt_tokens = [length - answers for length, answers in zip(row_lengths(card.tokens), answer_tokens, strict=True)]
    values = _values(folder, card, totals) | {
        "tokens": {"prompt": _lengths(prompt_tokens), "answer": _lengths(answer_tokens)}
    }
    write_atomically(folder / CARD_JSON, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    title = f"{card.recipe.name}: {totals.distilled.total():,} conversations"
    _draw_token_histogram(prompt_tokens, answer_tokens, folder / PICTURE, title)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["fenced"], environment.filters["cell"] = _fenced, _cell
    text = environment.get_template("data_card.md.j2").render(
        values,
        front_matter=_front_matter(folder, card, totals.distilled.total()),
        picture=PICTURE,
        samples=[conversation for *_, conversation in sorted(totals.samples, reverse=True)],
    )
    write_atomically(folder / CARD, text)
    return folder / CARD


def _values(folder: Path, card: CardInput, totals: _Totals) -> dict[str, Any]:
    recipe, distilling = card.recipe, card.recipe.data.distill
    # A Hub id as it is, of a local folder the last name.
    model = Path(recipe.target.model).name if Path(recipe.target.model).expanduser().is_dir() else recipe.target.model
    vocabulary = json.dumps(card.tokenizer.get_vocab(), sort_keys=True)
    names = [*card.counts.by_source, *(name for name in totals.distilled if name not in card.counts.by_source)]
    sources = {}
    for name in names:
        tally = card.counts.by_source.get(name)
        distilled = totals.distilled[name]
        sources[name] = {
            **(tally.as_json() if tally else {}),
            "distilled": distilled,
            "shortened": dict(totals.shortened.get(name, {})),
            "without_answer": max(0, tally.kept - distilled) if tally else 0,
        }
    return {
        "name": recipe.name,
        "target": {"revision": recipe.target.revision, "dtype": recipe.target.dtype, "model": model},
        "sources": sources,
        "failed": dict(card.failed),
        "contaminated_ids": card.counts.contaminated_ids,
        "questions": {questions_file(s).name: sha256_of(questions_file(s)) for s in question_sources(recipe)},
        "selection": recipe.data.conversations.model_dump(
            include={"limit", "split", "heldout_frac", "contamination_words", "filters"}
        ),
        "engine": distilling.model_dump(exclude={"options"}) | {"seed": recipe.seed} | card.engine,
        "hashes": {
            "sources": {s.label: _origin(s) for s in recipe.data.conversations.sources},
            "data_files": {file.relative_to(folder).as_posix(): sha256_of(file) for file in sorted(card.data_files)},
            "records": card.records_hash,
            "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest(),
            "chat_template": hashlib.sha256(str(card.tokenizer.chat_template).encode()).hexdigest(),
        },
        "versions": versions(),
    }


def _origin(source: MixedSourceRecipe) -> str:
    """What the source was: a local file by its hash, never by its path, which is nobody else's business."""
    if source.source == STDLIB:
        return f"{STDLIB_FILE.name}, about the standard library of Python 3.11, SHA-256 {sha256_of(STDLIB_FILE)}"
    file = Path(source.source).expanduser()
    if file.is_file():
        return f"{file.name}, SHA-256 {sha256_of(file)}"
    parts = [source.file or f"split {source.hub_split}", f"revision {source.revision or 'main'}"]
    parts += [f"configuration {source.hub_config}"] if source.hub_config else []
    return f"Hub dataset {source.source}, {', '.join(parts)}"


def _lengths(tokens: list[int]) -> dict[str, float]:
    quantiles = {name: float(np.quantile(tokens, q)) for name, q in QUANTILES.items()}
    return {"total": sum(tokens), "mean": sum(tokens) / len(tokens), **quantiles, "longest": max(tokens)}


def _draw_token_histogram(prompt_tokens: Sequence[int], answer_tokens: Sequence[int], file: Path, title: str) -> None:
    """One panel each for the tokens of a row's prompt side and of its answers; a logarithmic scale below."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axes, (name, colour), lengths in zip(panels, COLOURS.items(), (prompt_tokens, answer_tokens), strict=True):
        edges = np.geomspace(max(1, min(lengths)) - 0.5, max(lengths) + 0.5, BINS + 1)
        axes.hist(lengths, bins=edges.tolist(), color=colour)
        axes.axvline(float(np.median(lengths)), color="#444444", linewidth=1, linestyle="--", label="median")
        axes.set_xscale("log")
        axes.set_xlabel(f"{name} tokens of a row")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("rows")
    panels[1].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10, parse_math=False)
    figure.set_layout_engine("constrained")
    figure.savefig(file, dpi=140)
    plt.close(figure)


def _front_matter(folder: Path, card: CardInput, count: int) -> str:
    """What the Hub reads: how to load the files, and where the dataset belongs. The licence is the sources' matter."""
    patterns = sorted({(file.relative_to(folder).parent / f"*{file.suffix}").as_posix() for file in card.data_files})
    size = next((name for limit, name in HUB_SIZES if count < limit), "n>1M")
    return DatasetCardData(
        pretty_name=card.recipe.name,
        language=card.recipe.data.conversations.filters.languages or None,
        task_categories=["text-generation"],
        size_categories=[size],
        tags=["draftsmith", "self-distillation", "speculative-decoding"],
        configs=[{"config_name": "default", "data_files": [{"split": "train", "path": patterns}]}]
        if patterns
        else None,
    ).to_yaml()


def _fenced(turn: Turn) -> str:
    """The text as it is, in a fence that it cannot break."""
    text = turn.content if len(turn.content) <= SHOWN_CHARS else turn.content[:SHOWN_CHARS] + " [...]"
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _cell(value: Any) -> str:
    """A cell of a table, whatever an engine or a user put into it."""
    return " ".join(str(value).split()).replace("|", "\\|")
