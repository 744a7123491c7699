"""Distilled conversations as an Arrow dataset of token ids and loss masks, which the trainer reads.

Built from the ledger's conversations in a temporary folder beside its final place and renamed: it is whole or absent;
built again only when the conversations, the tokenizer, its chat template or the length have changed.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from filelock import FileLock
from pydantic import TypeAdapter, ValidationError

from draftsmith.data.distill.ledger import LedgerView
from draftsmith.data.tokens.rows import TokenCounts, write_token_rows
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.progress import progress_bar
from draftsmith.recipes.run_folder import RunFolder, read_json
from draftsmith.recipes.schema import Recipe

MOST_PROCESSES = 8  # by default
REPORT_NAME = "token_report.json"
FORMAT_VERSION = 2


@dataclass
class TokenReport(TokenCounts):
    """What the dataset holds. `fingerprint`: of its inputs; `reused`: it was there, made from the same ones."""

    path: str = ""
    fingerprint: str = ""
    reused: bool = False

    def sentence(self) -> str:
        """One line for the console."""
        extra = f" ({self.extra_rows} of them for answers that the template rewrites later)" if self.extra_rows else ""
        return (
            f"{self.rows} rows{extra}, {self.tokens} tokens ({self.loss_tokens} of the assistant) in {self.path}; of "
            f"{self.conversations} conversations {self.shortened} shortened by whole turns, {self.answers_cut} cut in "
            f"their first answer, {self.too_long} too long, {self.refused} refused by the chat template"
        )


def build_token_dataset(recipe: Recipe, tokenizer: Any, folder: RunFolder, progress: bool = True) -> TokenReport:
    """Tokenise what was distilled to the Arrow dataset `folder.data/tokens`, or keep that if nothing has changed.

    Columns: `input_ids` (int32), `loss_mask` (int8) and `length` (int32), rows in the order of the conversations' ids:
    one a conversation, and more where `tokenize_rows` says so.

    Raises:
        UserError: Nothing was distilled, or nothing is left within `data.max_length_tokens`.
    """
    view, max_length_tokens = LedgerView(folder.data), recipe.data.max_length_tokens
    cut_answers = recipe.data.distill.cut_answers == "keep"
    final, building = folder.data / "tokens", folder.data / "tokens.partial"
    # Two distillations that share a folder end at the same time.
    with FileLock(folder.data / "tokens.lock"):
        fingerprint = _fingerprint(view, tokenizer, max_length_tokens, cut_answers)
        recorded = read_token_report(final)
        if recorded is not None and recorded.fingerprint == fingerprint:
            return replace(recorded, path=str(final), reused=True)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        with progress_bar(len(view), "tokenise", "conv", shown=progress) as bar:
            counts = write_token_rows(
                ((distilled.conversation, distilled.answer_ids) for distilled in view.distilled()),
                tokenizer,
                max_length_tokens,
                building / "rows.arrow",
                recipe.data.tokenize_processes or min(os.cpu_count() or 1, MOST_PROCESSES),
                bar,
                cut_answers,
            )
        if counts.rows == 0:
            shutil.rmtree(building)
            raise UserError(
                f"no conversation of {folder.data} is left to train on ({counts.conversations} read, {counts.too_long} "
                f"longer than {max_length_tokens} tokens, {counts.refused} refused by the chat template): "
                "raise data.max_length_tokens"
            )
        report = TokenReport(**asdict(counts), path=str(final), fingerprint=fingerprint)
        _save_atomically(building / "rows.arrow", final, report)
        return report


def _fingerprint(view: LedgerView, tokenizer: Any, max_length_tokens: int, cut_answers: bool) -> str:
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    for part in (
        str(FORMAT_VERSION),
        view.fingerprint(),
        vocabulary,
        str(tokenizer.chat_template),
        str(max_length_tokens),
        *(["cut answers"] if cut_answers else []),
    ):
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def read_token_report(tokens: Path) -> TokenReport | None:
    """Of the dataset in this folder; None if it cannot be read."""
    try:
        values = read_json(tokens / REPORT_NAME, dict[str, Any], "")
        # In earlier versions `shortened` was called `cut`.
        return TypeAdapter(TokenReport).validate_python({"shortened": values.get("cut", 0), **values})
    except (UserError, ValidationError):
        return None


def _save_atomically(rows_file: Path, final: Path, report: TokenReport) -> None:
    """Save beside the final place, then rename; an older dataset goes only once the new one is whole."""
    whole, old = rows_file.parent / "whole", final.with_name(final.name + ".old.partial")
    shutil.rmtree(old, ignore_errors=True)
    save_rows(rows_file, whole)
    (whole / REPORT_NAME).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    if final.exists():
        final.rename(old)
    whole.rename(final)
    for leftover in (rows_file.parent, old):
        shutil.rmtree(leftover, ignore_errors=True)


def save_rows(rows_file: Path, folder: Path) -> None:
    """The Arrow file as a dataset that `datasets.load_from_disk` maps into memory."""
    were_shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset.from_file(str(rows_file)).save_to_disk(str(folder))
    finally:
        if were_shown:  # else something forbids them, and says so
            datasets.enable_progress_bars()


def load_tokens(run: RunFolder, recipe_name: str) -> datasets.Dataset:
    """The dataset that `draftsmith distill` wrote.

    Raises:
        UserError: It is not there, damaged or empty.
    """
    folder = run.data / "tokens"
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: run `draftsmith distill` with recipe `{recipe_name}` first")
    try:
        tokens = datasets.load_from_disk(str(folder))
        lists = {field.name for field in tokens.data.schema if str(field.type).startswith("list<")}
    except Exception as error:  # of any kind: it is whatever the damage leads to in datasets and Arrow
        reason = " ".join(str(error).split())
        raise UserError(f"{folder} cannot be read ({reason}): delete it and run `draftsmith distill` again") from None
    missing = {"input_ids", "loss_mask"} - lists
    if missing or len(tokens) == 0:
        what = f"has no column {', '.join(sorted(missing))}" if missing else "is empty"
        raise UserError(f"{folder} {what}: delete it and run `draftsmith distill` again")
    return tokens


def tokens_hash(tokens: datasets.Dataset) -> str:
    """SHA-256 over ids and masks, whatever the Arrow chunks."""
    digest = hashlib.sha256()
    for name in ("input_ids", "loss_mask"):
        for chunk in tokens.data.column(name).chunks:
            digest.update(chunk.value_lengths().to_numpy(zero_copy_only=False).astype("int64").tobytes())
        for chunk in tokens.data.column(name).chunks:
            digest.update(chunk.flatten().to_numpy(zero_copy_only=False).astype("int64").tobytes())
    return digest.hexdigest()[:16]


def row_lengths(tokens: datasets.Dataset) -> list[int]:
    """Tokens of each row, read from Arrow's offsets alone."""
    column = (
        tokens.with_format("arrow")["input_ids"] if tokens._indices is not None else tokens.data.column("input_ids")
    )
    return np.concatenate([chunk.value_lengths().to_numpy() for chunk in column.chunks]).tolist()


def answer_lengths(tokens: datasets.Dataset) -> list[int]:
    """Tokens of each row that carry loss; one batch is in memory at a time."""
    masks = tokens.select_columns("loss_mask").with_format("numpy").iter(1000)
    return [int(mask.sum()) for batch in masks for mask in batch["loss_mask"]]
