"""Data card of a run: records read, left out (and why) and answered by the target.

data/README.md     for people, and for the Hub: with its front matter the folder can be uploaded as a dataset
data/card.json     the same, and the ids of the contaminated conversations, for programs
"""

import json
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from huggingface_hub import DatasetCardData

from draftsmith.data.distill.ledger import LedgerView
from draftsmith.data.distill.token_dataset import answer_lengths, load_tokens, row_lengths
from draftsmith.data.sources.distilled import CARD_JSON, SHARDS, tokenizer_hashes
from draftsmith.data.sources.files import STDLIB, STDLIB_FILE
from draftsmith.data.sources.mixture import SourceCounts, Tally, question_sources
from draftsmith.data.sources.question_sets import questions_files
from draftsmith.errors import UserError
from draftsmith.files import file_sha256, read_json, write_atomically
from draftsmith.models.target.loading import weights_hash
from draftsmith.provenance import versions
from draftsmith.recipes.conversations import MixedSourceRecipe
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

CARD = "README.md"
SHARD_CONVERSATIONS = 20_000  # of a published file
WHAT_BECAME = {  # counts of a source by reason, and their names in the card
    "invalid": "invalid",
    "repaired": "repaired",
    "contaminated": "contaminated",
    "shortened": "shortened",
    "unread_keys": "key not read",
}
UNKNOWN_SOURCE = "no longer in the sources"


@dataclass
class CardSource(Tally):
    """Counts of one source for `card.json`: its records, as in `Tally`, and its distilled conversations."""

    distilled: int = 0
    shortened: Counter[str] = field(default_factory=Counter)
    without_answer: int = 0

    @property
    def left_out(self) -> int:
        """Return the number of records that were duplicates or invalid."""
        return self.duplicates + sum(self.invalid.values())


@dataclass
class DataCard:
    """The values of `card.json` that reports show.

    tokens: for `prompt` and `answer`, total, mean, median, 95 % quantile and maximum of the tokens per example.
    """

    sources: dict[str, CardSource]
    tokens: dict[str, dict[str, float]]
    engine: dict[str, Any] = field(default_factory=dict)
    hashes: dict[str, Any] = field(default_factory=dict)


def write_data_card(recipe: Recipe, counts: SourceCounts, tokenizer: Any, weights: str | None) -> Path:
    """Write a run's data card and `card.json`, from its stored answers and token dataset; return the card's path.

    Args:
        recipe: Recipe that the data was distilled with.
        counts: Counts of the records by source, filled by a finished `load_conversations`.
        tokenizer: The target's tokenizer.
        weights: Hash of the weights of the model that answered.
    """
    run = RunFolder(recipe)
    folder, tokens, view = run.data, load_tokens(run), LedgerView(run.data)
    distilled: Counter[str] = Counter()
    shortened: defaultdict[str, Counter[str]] = defaultdict(Counter)

    for made in view.distilled():
        source = made.source or UNKNOWN_SOURCE
        distilled[source] += 1
        shortened[source].update([made.shortened] if made.shortened else [])
    answer_tokens = answer_lengths(tokens)
    prompt_tokens = [length - answers for length, answers in zip(row_lengths(tokens), answer_tokens, strict=True)]
    sources = {}
    for name in dict.fromkeys([*counts.by_source, *distilled]):
        tally = counts.by_source.get(name, Tally())
        without_answer = max(0, tally.kept - distilled[name])
        sources[name] = CardSource(
            **vars(tally), distilled=distilled[name], shortened=shortened[name], without_answer=without_answer
        ).as_json()
    values = {
        "name": recipe.name,
        "target": {
            "revision": recipe.target.revision,
            "dtype": recipe.target.dtype,
            "model": recipe.target.display_name,
            "weights": weights if recipe.answering_target is recipe.target else weights_hash(recipe.target),
        },
        "answered_by": recipe.answering_target.display_name,
        "sources": sources,
        "failed": dict(view.failed),
        "contaminated_ids": counts.contaminated_ids,
        "questions": {name: file_sha256(file) for name, file in questions_files(question_sources(recipe)).items()},
        "selection": recipe.data.conversations.model_dump(include={"limit", "split", "heldout_frac"}),
        "engine": recipe.data.distill.model_dump(exclude={"options", "model"})
        | {"seed": recipe.seed, "weights": weights},
        "hashes": {
            "sources": {source.label: _origin(source) for source in recipe.data.conversations.sources},
            "data_files": {file.relative_to(folder).as_posix(): file_sha256(file) for file in view.files()},
            "records": view.fingerprint(),
            **tokenizer_hashes(tokenizer),
        },
        "versions": versions(),
        "tokens": {"prompt": _lengths(prompt_tokens), "answer": _lengths(answer_tokens)},
    }
    _write_card(folder, values)
    return folder / CARD


def write_distilled_set(recipe: Recipe, folder: Path, licences: dict[str, str], base_model: str | None = None) -> None:
    """Write a run's distilled conversations to `folder` as a dataset repository, see `data/sources/distilled.py`.

    An existing folder is replaced. The files do not depend on how the distillation was interrupted.

    Args:
        licences: Licence of each source's prompts, by the source's name in the counts.
        base_model: The target's id on the Hub, if the recipe names a folder.

    Raises:
        UserError: Nothing was distilled, the answers are the sources' own, or `card.json` or the recipe does not match.
    """
    data = RunFolder(recipe).data
    view, again = LedgerView(data), "run `draftsmith distill` again"
    values = read_json(data / CARD_JSON, dict[str, Any], again)
    if values["engine"]["engine"] == "none":
        raise UserError(f"{data} has the answers of its sources (data.distill.engine: none), not of the target: distil")
    if values["hashes"]["records"] != view.fingerprint():
        raise UserError(f"{data} holds other conversations than its card.json lists: {again}")
    if licences.keys() != values["hashes"]["sources"].keys():
        raise UserError(f"{data} was distilled from other sources: use the recipe that it was distilled with")
    shutil.rmtree(folder, ignore_errors=True)
    records, files = view.records(), dict[str, str]()
    for number in count(1):
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in islice(records, SHARD_CONVERSATIONS)]
        if not lines:
            break
        file = folder / SHARDS / f"{number:05d}.jsonl"
        write_atomically(file, "".join(lines))
        files[f"{SHARDS}/{file.name}"] = file_sha256(file)
    values["hashes"]["data_files"] = files
    if base_model is not None:
        own = values["answered_by"] == values["target"]["model"]
        values["target"]["model"] = base_model
        values["answered_by"] = base_model if own else values["answered_by"]
    _write_card(folder, {**values, "licences": licences})


def _write_card(folder: Path, values: dict[str, Any]) -> None:
    """Write `card.json` and the card. Its front matter has what a reader of the Hub searches for."""
    licences = values.get("licences", {})
    write_atomically(folder / CARD_JSON, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    front_matter = DatasetCardData(
        license=sorted(set(licences.values())) or None,
        pretty_name=values["name"],
        task_categories=["text-generation"],
        tags=["draftsmith", "self-distillation", "speculative-decoding"],
        configs=[{"config_name": "default", "data_files": [{"split": "train", "path": [f"{SHARDS}/*.jsonl"]}]}],
    ).to_yaml()
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["cell"] = _cell
    template = environment.from_string(Path(__file__).with_name("data_card.md.j2").read_text(encoding="utf-8"))
    more = {"what_became": WHAT_BECAME, "front_matter": front_matter}
    write_atomically(folder / CARD, template.render({"licences": licences, **values, **more}))


def _origin(source: MixedSourceRecipe) -> str:
    """Describe a source; a local file by name and hash, never by its path, which is private."""
    if source.source == STDLIB:
        return f"{STDLIB_FILE.name}, about the standard library of Python 3.11, SHA-256 {file_sha256(STDLIB_FILE)}"
    file = Path(source.source)
    if file.is_file():
        return f"{file.name}, SHA-256 {file_sha256(file)}"
    if file.is_dir():
        return f"{file.name}, a distilled set, SHA-256 of {CARD_JSON} {file_sha256(file / CARD_JSON)}"
    parts = [source.file or f"split {source.hub_split}", f"revision {source.revision or 'main'}"]
    parts += [f"configuration {source.hub_config}"] if source.hub_config else []
    return f"Hub dataset {source.source}, {', '.join(parts)}"


def _lengths(tokens: list[int]) -> dict[str, float]:
    """Return total, mean, median, 95 % quantile and maximum of the numbers of tokens."""
    median, high = np.quantile(tokens, [0.5, 0.95]).tolist()
    total = sum(tokens)
    return {"total": total, "mean": total / len(tokens), "median": median, "95 %": high, "longest": max(tokens)}


def _cell(value: Any) -> str:
    """Write a value, whatever an engine or a user put into it, as one line of a table's cell."""
    return " ".join(str(value).split()).replace("|", "\\|")
