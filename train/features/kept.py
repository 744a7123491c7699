"""Feature files that fill row by row, in any order, while the rows are trained on (`data.features.server.keep`).

The format is that of `cache.py`. A shard that is not complete is `NAME.partial`, of its full size, with `NAME.rows`,
a byte for each row, 1 once the row is written. A row's bytes are written before its mark, so a kill loses the rows in
flight and nothing else. Each row is trained on, and so written, by one process of an epoch. `finish` renames complete
shards, after which `source: offline` reads them too.

Shapes: S tokens of a row, D hidden, F = D times the number of layers.
"""

import json
import os
from bisect import bisect_right
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor

from draftsmith.data.distill.token_dataset import row_lengths
from draftsmith.errors import UserError
from draftsmith.files import bytes_text, free_bytes_at
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.target.features import required_layers
from draftsmith.models.target.view import target_value
from draftsmith.recipes.run_folder import RunFolder, is_first_process
from draftsmith.recipes.schema import Recipe
from draftsmith.train.features.cache import FeatureIndex, Shard, feature_settings

SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def open_kept(recipe: Recipe, tokens: Dataset, tokens_hash: str, drafter: Drafter) -> "KeptFeatures | None":
    """Open the run's feature files for what servers give; None unless `data.features.server.keep` is set.

    Raises:
        UserError: The folder holds features of other settings.
    """
    if not recipe.data.features.server.keep:
        return None
    folder, settings, layers = (
        RunFolder(recipe).features,
        feature_settings(recipe, tokens_hash),
        required_layers(drafter),
    )
    index = FeatureIndex.read(folder)
    if index is None:
        hidden_size = target_value(drafter.attached.target.config, "hidden_size")
        index = FeatureIndex.plan(layers, hidden_size, settings, row_lengths(tokens))
        check_free(folder, index)
        folder.mkdir(parents=True, exist_ok=True)
        if is_first_process():
            index.write(folder)
    index.check_matches(folder, settings, layers)
    return KeptFeatures(folder, index)


def check_free(folder: Path, index: FeatureIndex) -> None:
    """Check that the disk has room for the files of an index.

    Raises:
        UserError: It has not.
    """
    needed, free = index.tokens * index.bytes_per_token, free_bytes_at(folder)
    if needed > free:
        raise UserError(
            f"{folder} would hold {bytes_text(needed)} of features, and {bytes_text(free)} are free on that disk: "
            "leave out data.features.server.keep, so that each epoch asks the servers"
        )


class KeptFeatures:
    """The rows of a run's feature files, complete or not.

    Args:
        folder: `runs/<name>/features`, with its index.
    """

    def __init__(self, folder: Path, index: FeatureIndex) -> None:
        self._folder, self._index = folder, index
        self._first_rows = [shard.first_row for shard in index.shards]
        self._open: dict[str, int] = {}
        self._headers: dict[str, bytes] = {}  # of the shards read or written so far

    def has(self, row: int) -> bool:
        """Return whether a row can be read."""
        shard, place = self._place(row)
        if (self._folder / shard.file).is_file():
            return True
        marks = self._folder / f"{shard.file}.rows"
        return marks.is_file() and os.pread(self._file(marks), 1, place) == b"\1"

    def read(self, row: int, layers: tuple[int, ...], out_sf: Tensor) -> None:
        """Copy a row's features to [S, F]."""
        shard, place = self._place(row)
        whole = self._folder / shard.file
        file = self._file(whole if whole.is_file() else self._folder / f"{shard.file}.partial")
        for layer, part_sd in zip(layers, out_sf.chunk(len(layers), dim=-1), strict=True):
            begin, size = self._span(shard, place, layer)
            data = bytearray(os.pread(file, size, begin))
            part_sd.copy_(torch.frombuffer(data, dtype=self._index.dtype).view(part_sd.shape))

    def write(self, row: int, layers: tuple[int, ...], features_sf: Tensor) -> None:
        """Write a row's features [S, F], then its mark.

        Raises:
            OSError: The disk is full.
        """
        shard, place = self._place(row)
        partial, marks = (self._folder / f"{shard.file}{suffix}" for suffix in (".partial", ".rows"))
        if not marks.is_file():
            self._allocate(shard, partial)
        for layer, part_sd in zip(layers, features_sf.chunk(len(layers), dim=-1), strict=True):
            data = part_sd.to(self._index.dtype).contiguous().view(torch.uint8).numpy().tobytes()
            os.pwrite(self._file(partial), data, self._span(shard, place, layer)[0])
        os.pwrite(self._file(marks), b"\1", place)

    def finish(self) -> None:
        """Rename the shards whose rows are all written, by one process, when no other writes."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        for shard in self._index.missing(self._folder):
            marks = self._folder / f"{shard.file}.rows"
            if marks.is_file() and marks.read_bytes() == b"\1" * len(shard.rows):
                partial = self._folder / f"{shard.file}.partial"
                with partial.open("rb+") as stream:
                    os.fsync(stream.fileno())
                partial.replace(self._folder / shard.file)
                marks.unlink()

    def _allocate(self, shard: Shard, partial: Path) -> None:
        """Make a shard's files of their full size; several processes may do it concurrently, with the same bytes."""
        header = self._header(shard)
        size = len(header) + shard.tokens * self._index.bytes_per_token
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, header, 0)
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
        marks = os.open(partial.with_name(f"{shard.file}.rows"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.posix_fallocate(marks, 0, len(shard.rows))
        finally:
            os.close(marks)

    def _header(self, shard: Shard) -> bytes:
        """Return the beginning of a safetensors file: the header's length, and each layer's dtype, shape and place."""
        if shard.file in self._headers:
            return self._headers[shard.file]
        size = shard.tokens * self._index.hidden_size * self._index.dtype.itemsize
        entries = {
            str(layer): {
                "dtype": SAFETENSORS_DTYPES[self._index.dtype],
                "shape": [shard.tokens, self._index.hidden_size],
                "data_offsets": [number * size, (number + 1) * size],
            }
            for number, layer in enumerate(self._index.layers)
        }
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        header = self._headers[shard.file] = len(text).to_bytes(8, "little") + text
        return header

    def _span(self, shard: Shard, place: int, layer: int) -> tuple[int, int]:
        """Return the place and the size in bytes of one layer of a row in its shard's file."""
        token_bytes = self._index.hidden_size * self._index.dtype.itemsize
        number = self._index.layers.index(layer)
        begin, end = shard.offsets[place], shard.offsets[place + 1]
        first = len(self._header(shard)) + number * shard.tokens * token_bytes
        return first + begin * token_bytes, (end - begin) * token_bytes

    def _place(self, row: int) -> tuple[Shard, int]:
        shard = self._index.shards[bisect_right(self._first_rows, row) - 1]
        return shard, row - shard.first_row

    def _file(self, path: Path) -> int:
        """Return a descriptor of a file, opened once in each process."""
        key = f"{os.getpid()} {path}"
        if key not in self._open:
            self._open[key] = os.open(path, os.O_RDWR)
        return self._open[key]

    def __getstate__(self) -> dict[str, object]:
        """Leave out the open files."""
        return {**self.__dict__, "_open": {}}
