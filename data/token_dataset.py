"""Distilled conversations as an Arrow dataset of token ids and loss masks, which the trainer reads.

Built from the ledger's conversations in a temporary folder beside its final place and renamed: it is whole or absent;
built again only when the conversations, the tokenizer, its chat template or the length have changed.
"""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from tqdm import tqdm

from draftsmith.data.chat_tokens import TemplateProblem, tokenize_truncated
from draftsmith.data.distill import read_distilled
from draftsmith.data.ledger import LedgerView
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

ROWS_IN_A_SHARD = 4096
REPORT_NAME = "token_report.json"
FORMAT_VERSION = 1
FEATURES = {"input_ids": "int32", "loss_mask": "int8"}


@dataclass
class TokenReport:
    """`cut` conversations lost trailing turns to the length; `too_long` did not fit at all."""

    path: str
    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    cut: int = 0
    too_long: int = 0
    refused: int = 0
    reused: bool = False

    def sentence(self) -> str:
        """One line for the console."""
        return (
            f"{self.rows} conversations, {self.tokens} tokens ({self.loss_tokens} of the assistant) in {self.path}; "
            f"{self.cut} cut on a turn boundary, {self.too_long} too long, {self.refused} refused by the chat template"
        )


def build_token_dataset(recipe: Recipe, tokenizer: Any, folder: RunFolder, progress: bool = True) -> TokenReport:
    """Tokenise what was distilled to the Arrow dataset `folder.data/tokens`, or keep that if nothing has changed.

    Columns: `input_ids` (int32) and `loss_mask` (int8), one row a conversation, in the order of their ids.

    Raises:
        UserError: Nothing was distilled, or nothing is left within `data.max_length_tokens`.
    """
    view = LedgerView(folder.data)
    final = folder.data / "tokens"
    max_length_tokens = recipe.data.max_length_tokens
    fingerprint = _fingerprint(view, tokenizer, max_length_tokens)
    reusable = _existing_report(final, fingerprint)
    if reusable is not None:
        return reusable
    report = TokenReport(str(final))
    shards: list[Any] = []
    rows: dict[str, list[Any]] = {"input_ids": [], "loss_mask": []}
    distilled = tqdm(read_distilled(folder.data), total=len(view), desc="tokenise", unit="conv", disable=not progress)
    for kept in distilled:
        try:
            result = tokenize_truncated(tokenizer, kept.conversation, max_length_tokens)
        except TemplateProblem:
            report.refused += 1
            continue
        if result is None:
            report.too_long += 1
            continue
        tokenized, dropped_turns = result
        report.cut += dropped_turns > 0
        report.rows += 1
        report.tokens += len(tokenized.input_ids)
        report.loss_tokens += sum(tokenized.loss_mask)
        rows["input_ids"].append(np.array(tokenized.input_ids, dtype=np.int32))
        rows["loss_mask"].append(np.array(tokenized.loss_mask, dtype=np.int8))
        if len(rows["input_ids"]) == ROWS_IN_A_SHARD:
            shards.append(_shard(rows))
            rows = {"input_ids": [], "loss_mask": []}
    if report.rows == 0:
        raise UserError(
            f"no conversation of {folder.data} is left to train on ({len(view)} read, {report.too_long} longer "
            f"than {max_length_tokens} tokens, {report.refused} refused by the chat template): "
            "raise data.max_length_tokens"
        )
    if rows["input_ids"]:
        shards.append(_shard(rows))
    _save_atomically(datasets.concatenate_datasets(shards), final, report, fingerprint)
    return report


def _shard(rows: dict[str, list[Any]]) -> Any:
    features = {name: datasets.Sequence(datasets.Value(dtype)) for name, dtype in FEATURES.items()}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def _fingerprint(view: LedgerView, tokenizer: Any, max_length_tokens: int) -> str:
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    for part in (
        str(FORMAT_VERSION),
        view.fingerprint(),
        vocabulary,
        str(tokenizer.chat_template),
        str(max_length_tokens),
    ):
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def _existing_report(final: Path, fingerprint: str) -> TokenReport | None:
    """The report of the dataset that is there, if it was made from the same inputs."""
    try:
        recorded = json.loads((final / REPORT_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if recorded.pop("fingerprint", None) != fingerprint:
        return None
    return TokenReport(**(recorded | {"path": str(final), "reused": True}))


def _save_atomically(dataset: Any, final: Path, report: TokenReport, fingerprint: str) -> None:
    """Save beside the final place, then rename; an older dataset goes only once the new one is whole."""
    building = final.with_name(final.name + ".partial")
    old = final.with_name(final.name + ".old.partial")
    for leftover in (building, old):
        shutil.rmtree(leftover, ignore_errors=True)
    datasets.disable_progress_bars()
    try:
        dataset.save_to_disk(str(building))
    finally:
        datasets.enable_progress_bars()
    record = json.dumps(asdict(report) | {"fingerprint": fingerprint}, indent=2) + "\n"
    (building / REPORT_NAME).write_text(record, encoding="utf-8")
    if final.exists():
        final.rename(old)
    building.rename(final)
    shutil.rmtree(old, ignore_errors=True)
