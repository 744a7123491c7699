"""The target's hidden states on disk, `runs/<name>/features/`: written by `draftsmith features`, read by the trainer.

    index.json                   settings of target and tokens, and the place of each row of tokens
    features-00000.safetensors   a tensor [tokens, D] for each layer, named by its id; rows one after the other

The index is written first and never changes. A shard gets its name once it is complete and on disk. Until then it is
`NAME.partial`, of its full size, with `NAME.rows`, a byte for each row, 1 once the row is written. So rows may come in
any order, as from servers while they are trained on, and a kill loses only those in flight. Processes share nothing but
the files: any number may read, and write different rows.

Shapes: B batch, S sequence, L layers, D hidden, F = L * D features.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.files import bytes_text, free_bytes_at, read_json, write_atomically
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.features import required_layers
from draftsmith.models.target.loading import weights_hash
from draftsmith.recipes.run_folder import RunFolder, check_same_settings, target_settings
from draftsmith.recipes.schema import Recipe

INDEX_NAME = "index.json"
SHARD_BYTES = 256 << 20
# Left free on the disk: a share of what is written, and what else a run writes.
MARGIN_FRAC, MARGIN_BYTES = 0.05, 2 * SHARD_BYTES
SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}
WRITTEN = b"\1"  # mark of a row


@dataclass(frozen=True)
class Shard:
    """One file of features: row `first_row + i` of the dataset has tokens `offsets[i]` to `offsets[i + 1] - 1`."""

    file: str
    first_row: int
    offsets: list[int]

    def __post_init__(self) -> None:
        if self.offsets[0] != 0 or self.offsets != sorted(self.offsets):
            raise ValueError("a shard's offsets must start at 0 and ascend")

    @property
    def tokens(self) -> int:
        return self.offsets[-1]

    @property
    def rows(self) -> range:
        """Return the numbers of the shard's rows in the dataset."""
        return range(self.first_row, self.first_row + len(self.offsets) - 1)


@dataclass(frozen=True)
class FeatureIndex:
    """Content of `index.json`.

    layers: ids of layers, see `draftsmith.models.target.features.FeatureTap`. hidden_size: D. settings: settings that
    the features depend on, by recipe key. shards: all shards, in the order of the dataset.
    """

    layers: tuple[int, ...]
    hidden_size: int
    settings: dict[str, Any]
    shards: list[Shard]
    format: Literal[1] = 1

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.settings["data.features.dtype"])

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes_per_token(self) -> int:
        return len(self.layers) * self.hidden_size * self.dtype.itemsize

    def bytes_of(self, shards: Sequence[Shard]) -> int:
        return sum(shard.tokens for shard in shards) * self.bytes_per_token

    def missing(self, folder: Path) -> list[Shard]:
        """Return the shards whose file is not complete in `folder` yet."""
        return [shard for shard in self.shards if not (folder / shard.file).is_file()]

    def check_matches(
        self, folder: Path, settings: dict[str, Any], layers: tuple[int, ...], filled: bool = False
    ) -> None:
        """Check that these features have a recipe's settings and include its layers.

        Args:
            filled: Whether rows will be written, so that the index must have exactly these layers.

        Raises:
            UserError: Settings or layers differ; the message names the first key that differs.
        """
        check_same_settings(folder, self.settings, settings, "write the features again")
        if self.layers != layers if filled else not set(layers) <= set(self.layers):
            raise UserError(
                f"{folder} holds layers {list(self.layers)} of the target, but drafter.kind with drafter.options now "
                f"reads {list(layers)}: restore these keys, or delete that folder and run `draftsmith features` again"
            )

    def check_disk_space(self, folder: Path) -> None:
        """Check that the missing shards fit on the disk, with a margin.

        Raises:
            UserError: The disk has too little space.
        """
        missing_bytes = self.bytes_of(self.missing(folder))
        margin_bytes, free_bytes = round(MARGIN_FRAC * missing_bytes) + MARGIN_BYTES, free_bytes_at(folder)
        if missing_bytes + margin_bytes <= free_bytes:
            return
        smaller = "set data.features.dtype=bfloat16, " if self.dtype.itemsize > 2 else ""
        raise UserError(
            f"{folder} still needs {bytes_text(missing_bytes)}, and {bytes_text(margin_bytes)} to spare, but only "
            f"{bytes_text(free_bytes)} are free on that disk: free some, {smaller}lower data.conversations.limit, or "
            "train without features on disk (data.features.source=online, or data.features.server.keep=false)"
        )

    @staticmethod
    def plan(
        layers: tuple[int, ...], hidden_size: int, settings: dict[str, Any], lengths: Sequence[int]
    ) -> "FeatureIndex":
        """Return a new index for features that are still to be written. lengths: the tokens of each row."""
        index = FeatureIndex(layers, hidden_size, settings, [])
        return replace(index, shards=cut_into_shards(lengths, index.bytes_per_token))

    def write(self, folder: Path) -> None:
        """Write `index.json` into the folder."""
        write_atomically(folder / INDEX_NAME, json.dumps(asdict(self)) + "\n")

    @staticmethod
    def read(folder: Path) -> "FeatureIndex | None":
        """Read the folder's index, if it has one.

        Raises:
            UserError: The index is damaged, or of another format.
        """
        file = folder / INDEX_NAME
        if not file.is_file():
            return None
        return read_json(file, FeatureIndex, f"delete {folder} and run `draftsmith features` again")


def cut_into_shards(lengths: Sequence[int], bytes_per_token: int) -> list[Shard]:
    """Divide rows of these lengths in tokens, in order, into shards of at most 256 MiB and at least one row."""
    shards: list[Shard] = []
    most_tokens = SHARD_BYTES // bytes_per_token
    for row, length in enumerate(lengths):
        if not shards or shards[-1].tokens + length > most_tokens:
            shards.append(Shard(f"features-{len(shards):05d}.safetensors", row, [0]))
        shards[-1].offsets.append(shards[-1].tokens + length)
    return shards


class FeatureCache:
    """Reader and writer of the target's features in a run's folder, row by row; a row is one tokenized example.

    Args:
        folder: `runs/<name>/features`.
        index: The folder's index.
        layers: Ids of the layers to read, in this order.
    """

    def __init__(self, folder: Path, index: FeatureIndex, layers: tuple[int, ...]) -> None:
        self._folder, self._index, self._layers = folder, index, layers
        self._first_rows = [shard.first_row for shard in index.shards]
        self._open: dict[Path, tuple[int, dict[int, int]]] = {}

    @property
    def width(self) -> int:
        """Return F, the number of features of one token: the hidden size times the number of layers."""
        return len(self._layers) * self._index.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self._index.dtype

    def check_complete(self) -> None:
        """Check that every row is written, and that the files hold what the index says.

        Raises:
            UserError: A shard is missing, damaged, or contradicts the index.
        """
        if missing := self._index.missing(self._folder):
            raise UserError(
                f"{self._folder} is not complete ({len(missing)} of {len(self._index.shards)} shards are missing): run "
                "`draftsmith features` again, which writes the missing ones"
            )
        for shard in self._index.shards:
            self._opened(shard)

    def has(self, row: int) -> bool:
        """Return whether a row of the dataset has been written, so that it can be read."""
        shard, place = self._place(row)
        if (self._folder / shard.file).is_file():
            return True
        try:
            with (self._folder / f"{shard.file}.rows").open("rb") as marks:
                return os.pread(marks.fileno(), 1, place) == WRITTEN
        except FileNotFoundError:
            return False

    def ask(self, rows: Sequence[int]) -> None:
        """Do nothing, as rows on disk need no request; `ServedFeatures.ask` requests rows from servers."""

    def read(self, rows: Sequence[int], out_sf: Tensor) -> None:
        """Copy the features of these rows of the dataset, one after the other, to the start of `out_sf` [S, F]."""
        done = 0
        for row in rows:
            shard, place = self._place(row)
            begin, end = shard.offsets[place], shard.offsets[place + 1]
            file, begins = self._opened(shard)
            parts = out_sf[done : done + end - begin].chunk(len(self._layers), dim=-1)
            for layer, part_sd in zip(self._layers, parts, strict=True):
                at = begins[layer] + begin * self._token_bytes
                data = bytearray(os.pread(file, (end - begin) * self._token_bytes, at))
                part_sd.copy_(torch.frombuffer(data, dtype=self.dtype).view(part_sd.shape))
            done += end - begin

    def write(self, row: int, features_sf: Tensor) -> None:
        """Write a row's features [S, F], all layers in the order of the index, then mark the row as written.

        Raises:
            OSError: The disk is full.
        """
        shard, place = self._place(row)
        marks = self._folder / f"{shard.file}.rows"
        if not marks.is_file():
            self._allocate(shard)
        file, begins = self._opened(shard)
        for layer, part_sd in zip(self._index.layers, features_sf.chunk(len(begins), dim=-1), strict=True):
            data = part_sd.to(self.dtype).contiguous().view(torch.uint8).numpy().tobytes()
            os.pwrite(file, data, begins[layer] + shard.offsets[place] * self._token_bytes)
        with marks.open("rb+") as stream:
            os.pwrite(stream.fileno(), WRITTEN, place)

    def finish(self, shard: Shard) -> None:
        """Rename a shard's file to its final name if all its rows are written; no process may be writing to it."""
        marks, partial = (self._folder / f"{shard.file}{suffix}" for suffix in (".rows", ".partial"))
        if marks.is_file() and marks.read_bytes() == WRITTEN * len(shard.rows):
            os.fsync(self._opened(shard)[0])
            os.close(self._open.pop(partial)[0])
            partial.replace(self._folder / shard.file)
            marks.unlink()

    def finish_all(self) -> bool:
        """Call `finish` for every shard; return whether all shards are complete."""
        for shard in self._index.shards:
            self.finish(shard)
        return not self._index.missing(self._folder)

    def _allocate(self, shard: Shard) -> None:
        """Make a shard's files of their full size; several processes may do it concurrently, with the same bytes."""
        size = shard.tokens * self._token_bytes
        entries = {
            str(layer): {
                "dtype": SAFETENSORS_DTYPES[self.dtype],
                "shape": [shard.tokens, self._index.hidden_size],
                "data_offsets": [number * size, (number + 1) * size],
            }
            for number, layer in enumerate(self._index.layers)
        }
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        for suffix, begin, length in (
            (".partial", header, len(header) + len(entries) * size),
            (".rows", b"", len(shard.rows)),
        ):
            file = self._folder / f"{shard.file}{suffix}"
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, begin, 0)
                os.posix_fallocate(descriptor, 0, length)
                os.ftruncate(descriptor, length)  # of what a crash left
            except OSError as error:
                error.filename = str(file)
                raise
            finally:
                os.close(descriptor)

    def _opened(self, shard: Shard) -> tuple[int, dict[int, int]]:
        """Return a descriptor of a shard's file, complete or not, and where each layer begins in it, by its header.

        Raises:
            UserError: The file is damaged, or contradicts the index.
        """
        partial, whole = self._folder / f"{shard.file}.partial", self._folder / shard.file
        path = whole if whole.is_file() else partial
        if path not in self._open:
            descriptor = os.open(path, os.O_RDWR if path == partial else os.O_RDONLY)
            begin = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
            expected = [SAFETENSORS_DTYPES[self.dtype], [shard.tokens, self._index.hidden_size]]
            try:
                entries = json.loads(os.pread(descriptor, begin - 8, 8))
                found = {layer: entries[str(layer)] for layer in self._index.layers}
                ends = [begin + entry["data_offsets"][1] for entry in found.values()]
                is_right = all([entry["dtype"], entry["shape"]] == expected for entry in found.values())
            except (ValueError, KeyError, TypeError, OverflowError, MemoryError):
                is_right, ends = False, []
            if not is_right or os.fstat(descriptor).st_size < max(ends):
                os.close(descriptor)
                raise UserError(
                    f"{path} does not hold what {INDEX_NAME} says: delete it, run `draftsmith features` again"
                )
            self._open[path] = descriptor, {layer: begin + found[layer]["data_offsets"][0] for layer in found}
        return self._open[path]

    @property
    def _token_bytes(self) -> int:
        return self._index.hidden_size * self.dtype.itemsize

    def _place(self, row: int) -> tuple[Shard, int]:
        shard = self._index.shards[bisect_right(self._first_rows, row) - 1]
        return shard, row - shard.first_row

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open files: every worker of a data loader opens them itself."""
        return {**self.__dict__, "_open": {}}


def check_offline_support(recipe: Recipe) -> None:
    """Check that drafters of this kind can be trained on features from disk or from servers.

    Raises:
        UserError: The kind needs the target in training; the message gives the reason.
    """
    obstacle = load_drafter_class(recipe.drafter.kind).offline_obstacle
    if obstacle is not None:
        raise UserError(
            f"drafter.kind `{recipe.drafter.kind}` cannot be trained on features from disk or servers, as {obstacle}: "
            "set data.features.source=online"
        )


def feature_settings(recipe: Recipe, tokens_hash: str) -> dict[str, Any]:
    """Return the settings that the features depend on (target, tokens, dtype), by recipe key."""
    chosen = recipe.data.features
    settings = {
        **target_settings(recipe),
        "the target's weights (hash)": weights_hash(recipe.target),
        "data.features.dtype": chosen.dtype,
        "data (its tokens)": tokens_hash,
    }
    return settings | ({"data.features.autocast": True} if chosen.autocast else {})


def open_features(recipe: Recipe, tokens_hash: str, drafter: Drafter) -> FeatureCache:
    """Open the cache that `draftsmith features` wrote for this recipe, target and drafter.

    Raises:
        UserError: The cache is missing or incomplete, or it was written with other settings.
    """
    folder = RunFolder(recipe).features
    index = FeatureIndex.read(folder)
    if index is None:
        raise UserError(
            f"{folder} holds no features, which data.features.source=offline trains on: run `draftsmith features` with "
            f"recipe `{recipe.name}` first, or set data.features.source=online"
        )
    layers = required_layers(drafter)
    index.check_matches(folder, feature_settings(recipe, tokens_hash), layers)
    cache = FeatureCache(folder, index, layers)
    cache.check_complete()
    return cache
