"""Where conversations come from: a local file, a Hub dataset, or the standard library of the running Python.

Each of them yields raw records with the place they were found; one loop validates, drops duplicates and
applies the limit.
"""

import difflib
import gzip
import io
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from draftsmith.data.conversations import Conversation, InvalidConversation, counted_reasons, parse_conversation
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import ConversationsRecipe, DataRecipe

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass
class SourceCounts:
    """What was left out, by reason; filled while `load_conversations` is consumed."""

    invalid: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0


def load_conversations(
    data_recipe: DataRecipe, seed: int = 0, counts: SourceCounts | None = None
) -> Iterator[Conversation]:
    """Yield the first `limit` valid, distinct conversations of the recipe's source.

    Args:
        data_recipe: The recipe's `data` section.
        seed: Used by `stdlib`, which builds its conversations.
        counts: Receives how many records were skipped or were duplicates.

    Raises:
        UserError: The source is missing, unreadable or holds nothing valid, or a record is invalid.
    """
    recipe = data_recipe.conversations
    counts = counts if counts is not None else SourceCounts()
    seen: set[str] = set()
    for where, record in _records(recipe, seed):
        if recipe.limit is not None and len(seen) >= recipe.limit:
            return
        try:
            if isinstance(record, InvalidConversation):
                raise record
            conversation = parse_conversation(record, where)
        except InvalidConversation as error:
            if not recipe.skip_invalid:
                raise
            counts.invalid[error.reason] += 1
            continue
        if conversation.id in seen:
            counts.duplicates += 1
            continue
        seen.add(conversation.id)
        yield conversation
    if not seen:
        skipped = f": {counted_reasons(counts.invalid)} skipped as invalid" if counts.invalid else ""
        raise UserError(
            f"{recipe.source} holds no valid conversation{skipped}; set data.conversations.source to another"
        )


def _records(recipe: ConversationsRecipe, seed: int) -> Iterator[tuple[str, Any]]:
    """(where it was found, record) pairs; a line that is not JSON arrives as the error that it is."""
    if recipe.source == "stdlib":
        from draftsmith.data.stdlib_conversations import build_conversations

        if recipe.split not in ("train", "heldout", "all"):
            raise UserError(f"data.conversations.split of stdlib must be train, heldout or all, not {recipe.split}")
        # The limit counts distinct conversations, so it is applied where duplicates are seen.
        conversations = build_conversations(seed=seed, split=cast(Any, recipe.split))
        return ((f"stdlib conversation {number}", record) for number, record in enumerate(conversations, start=1))
    file = Path(recipe.source).expanduser()
    if file.is_file():
        return read_json_records(file)
    if file.is_dir():
        raise UserError(f"data.conversations.source {file} is a folder: name one .json or .jsonl file in it")
    if _looks_like_a_file(recipe.source):
        raise UserError(f"conversations file {file} does not exist{_nearest_file_hint(file)}")
    return _hub_records(recipe)


def read_json_records(file: Path) -> Iterator[tuple[str, Any]]:
    """Read a JSON array of records or JSON lines, plain or compressed (.gz, .xz, .zst).

    Yields:
        (`file line 3`, record); a line that is not JSON comes as an `InvalidConversation` in the record's place.
    """
    from zstandard import ZstdError

    try:
        with _open_text(file) as stream:
            first_line = next((line for line in stream if line.strip()), "")
            stream.seek(0)
            if first_line.lstrip().startswith("["):
                yield from _array_records(file, stream)
            else:
                yield from _line_records(file, stream)
    except UnicodeDecodeError:
        raise UserError(
            f"{file} is not UTF-8 text: convert it to UTF-8, or give a .gz, .xz or .zst its suffix"
        ) from None
    except (gzip.BadGzipFile, lzma.LZMAError, ZstdError, EOFError) as error:
        raise UserError(f"{file} cannot be decompressed ({error or 'it ends too early'}): fetch it again") from None


def _open_text(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    if file.suffix == ".xz":
        return lzma.open(file, "rt", encoding="utf-8")
    if file.suffix == ".zst":
        import zstandard

        # A zstd stream cannot seek back; conversation files fit in memory uncompressed.
        with file.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
            return io.StringIO(stream.read().decode("utf-8"))
    return file.open(encoding="utf-8-sig")


def _array_records(file: Path, stream: IO[str]) -> Iterator[tuple[str, Any]]:
    try:
        records = json.load(stream)
    except json.JSONDecodeError as error:
        raise UserError(f"{file} line {error.lineno} is not JSON: {error.msg} (column {error.colno})") from None
    for number, record in enumerate(records, start=1):
        yield f"{file} conversation {number}", record


def _line_records(file: Path, stream: IO[str]) -> Iterator[tuple[str, Any]]:
    empty = True
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        empty = False
        where = f"{file} line {number}"
        try:
            yield where, json.loads(line)
        except json.JSONDecodeError as error:
            sentence = f"not JSON: {error.msg} (column {error.colno})"
            yield where, InvalidConversation(where, "not JSON", sentence)
    if empty:
        raise UserError(f"{file} is empty: it must hold one JSON conversation a line, or a JSON array of them")


def _looks_like_a_file(source: str) -> bool:
    return (
        source.startswith((".", "/", "~"))
        or Path(source).suffix in (*JSON_SUFFIXES, *COMPRESSED_SUFFIXES)
        or not HUB_ID.fullmatch(source)
    )


def _nearest_file_hint(file: Path) -> str:
    if not file.parent.is_dir():
        return f": its folder {file.parent} does not exist either"
    names = [entry.name for entry in file.parent.iterdir() if entry.is_file()]
    nearest = difflib.get_close_matches(file.name, names, n=1, cutoff=0.5)
    return f": did you mean {file.parent / nearest[0]}?" if nearest else ": correct data.conversations.source"


def _hub_records(recipe: ConversationsRecipe) -> Iterator[tuple[str, Any]]:
    """A dataset of the Hugging Face Hub, or one JSON file of it.

    A JSON file is read by our own reader: `datasets` infers one schema for all rows, which mixed ShareGPT dumps break.
    """
    try:
        if recipe.file is not None and Path(recipe.file).suffix in (*JSON_SUFFIXES, *COMPRESSED_SUFFIXES):
            import huggingface_hub

            downloaded = huggingface_hub.hf_hub_download(
                recipe.source, recipe.file, repo_type="dataset", revision=recipe.revision
            )
            return read_json_records(Path(downloaded))
        import datasets

        rows = datasets.load_dataset(
            recipe.source, data_files=recipe.file, revision=recipe.revision, split=recipe.split
        )
    except (
        Exception
    ) as error:  # the Hub's libraries raise from a dozen unrelated classes (HTTP, offline, parsing, split)
        reason = " ".join(str(error).split()) or type(error).__name__
        part = f"split {recipe.split}" + (f", file {recipe.file}" if recipe.file else "")
        raise UserError(
            f"Hub dataset {recipe.source} ({part}) cannot be loaded: {reason[:300]}; check the name and the network, "
            "or set data.conversations.source to a local file"
        ) from None
    return ((f"{recipe.source} row {number}", row) for number, row in enumerate(rows, start=1))
