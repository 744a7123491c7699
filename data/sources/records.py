"""The raw records of one source: a local file, a Hub dataset, or the conversations that ship with the package."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from draftsmith.data.sources.json_records import COMPRESSED_SUFFIXES, JSON_SUFFIXES, read_json_records
from draftsmith.recipes.errors import UserError, did_you_mean
from draftsmith.recipes.schema import SourceRecipe

STDLIB = "stdlib"
STDLIB_FILE = Path(__file__).parents[1] / "embedded" / "conversations.jsonl.zst"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
Split = Literal["train", "heldout", "all"]


def open_records(recipe: SourceRecipe, split: Split) -> Iterator[tuple[str, Any]]:
    """(where it was found, record) pairs; a line that is not JSON arrives as the error that it is.

    Args:
        recipe: Where to read.
        split: Used by `stdlib`, whose split is by module.

    Raises:
        UserError: There is no such file or dataset, or it cannot be read.
    """
    if recipe.source == STDLIB:
        records = (record for _, record in read_json_records(STDLIB_FILE))
        wanted = (record for record in records if split in ("all", record["split"]))
        return ((f"stdlib conversation {number}", record) for number, record in enumerate(wanted, start=1))
    file = Path(recipe.source).expanduser()
    if file.is_file():
        return read_json_records(file)
    if file.is_dir():
        raise UserError(f"data.conversations.source {file} is a folder: name one .json or .jsonl file in it")
    if _looks_like_a_file(recipe.source):
        raise UserError(f"conversations file {file} does not exist{_nearest_file_hint(file)}")
    return _hub_records(recipe)


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
    return f": {did_you_mean(file.name, names, 'correct data.conversations.source')}"


def _hub_records(recipe: SourceRecipe) -> Iterator[tuple[str, Any]]:
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

        config = {} if recipe.hub_config is None else {"name": recipe.hub_config}
        rows = datasets.load_dataset(
            recipe.source, data_files=recipe.file, revision=recipe.revision, split=recipe.hub_split, **config
        )
    except (
        Exception
    ) as error:  # the Hub's libraries raise from a dozen unrelated classes (HTTP, offline, parsing, split)
        reason = " ".join(str(error).split()) or type(error).__name__
        part = f"split {recipe.hub_split}" + (f", file {recipe.file}" if recipe.file else "")
        raise UserError(
            f"Hub dataset {recipe.source} ({part}) cannot be loaded: {reason[:300]}; check the name and the network, "
            "or set data.conversations.source to a local file (of a mixture: the `source` of that entry)"
        ) from None
    return ((f"{recipe.source} row {number}", row) for number, row in enumerate(rows, start=1))
