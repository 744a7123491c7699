"""The target's hidden states on disk, `runs/<name>/features/`: written by `draftsmith features`, read by the trainer.

    index.json                   settings of target and tokens, and the place of each example
    features-00000.safetensors   a tensor [tokens, D] for each layer, named by its id; examples one after the other

The index is written first and never changes. A shard gets its name once it is complete and on disk: every existing
shard is complete, and the cache is complete when all shards exist. Readers map the files into memory and share nothing
else, so any number of processes may read.

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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.files import read_json, write_atomically
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.features import required_layers
from draftsmith.models.target.loading import weights_hash
from draftsmith.recipes.run_folder import RunFolder, check_same_settings, target_settings
from draftsmith.recipes.schema import Recipe

INDEX_NAME = "index.json"
SHARD_BYTES = 256 << 20


@dataclass(frozen=True)
class Shard:
    """One file of features: example `first_row + i` of the dataset has its tokens `offsets[i]` to `offsets[i + 1]`."""

    file: str
    first_row: int
    offsets: list[int]

    def __post_init__(self) -> None:
        if self.offsets[0] != 0 or self.offsets != sorted(self.offsets):
            raise ValueError("offsets begin at 0 and rise")

    @property
    def tokens(self) -> int:
        return self.offsets[-1]

    @property
    def rows(self) -> range:
        """Return the numbers of the shard's examples in the dataset."""
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

    def missing(self, folder: Path) -> list[Shard]:
        """Return the shards that are not written yet."""
        return [shard for shard in self.shards if not (folder / shard.file).is_file()]

    def check_matches(self, folder: Path, settings: dict[str, Any], layers: tuple[int, ...]) -> None:
        """Check that these features have a recipe's settings and include its layers.

        Raises:
            UserError: Settings or layers differ; the message names the first key that differs.
        """
        check_same_settings(folder, self.settings, settings, "write the features again")
        if not set(layers) <= set(self.layers):
            raise UserError(
                f"{folder} holds layers {list(self.layers)} of the target, and drafter.kind with drafter.options now "
                f"read {list(layers)}: restore these keys, or delete that folder and run `draftsmith features` again"
            )

    @staticmethod
    def plan(
        layers: tuple[int, ...], hidden_size: int, settings: dict[str, Any], lengths: Sequence[int]
    ) -> "FeatureIndex":
        """Return the index of features that are not written yet, of rows of these lengths in tokens."""
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
    """Divide rows of these lengths into shards of at most SHARD_BYTES, in order, with at least one row each."""
    shards: list[Shard] = []
    most_tokens = SHARD_BYTES // bytes_per_token
    for row, length in enumerate(lengths):
        if not shards or shards[-1].tokens + length > most_tokens:
            shards.append(Shard(f"features-{len(shards):05d}.safetensors", row, [0]))
        shards[-1].offsets.append(shards[-1].tokens + length)
    return shards


def write_shard(file: Path, features: dict[str, Tensor]) -> None:
    """Write a shard completely or not at all, and wait until it is on disk.

    Raises:
        OSError: No space is left (with the file's name); the partial file is removed.
    """
    partial = file.with_name(file.name + ".partial")
    try:
        with partial.open("wb") as stream:
            stream.write(save(features))
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    except OSError as error:
        error.filename = error.filename or str(file)
        raise
    finally:
        partial.unlink(missing_ok=True)


class FeatureCache:
    """A complete cache of the target's features, mapped into memory.

    Args:
        folder: `runs/<name>/features`.
        index: The folder's index.
        layers: Ids of the layers to read, in this order.

    Raises:
        UserError: A shard is missing, damaged, or contradicts the index.
    """

    def __init__(self, folder: Path, index: FeatureIndex, layers: tuple[int, ...]) -> None:
        missing = index.missing(folder)
        if missing:
            raise UserError(
                f"{folder} is not complete ({len(missing)} of {len(index.shards)} shards are missing): run "
                "`draftsmith features` again, which writes the missing ones"
            )
        self._folder, self._index, self._layers = folder, index, layers
        self._first_rows = [shard.first_row for shard in index.shards]
        self._open: dict[str, Any] = {}
        for shard in index.shards:
            self._opened(shard)

    @property
    def width(self) -> int:
        """Return F, the size of a token's features."""
        return len(self._layers) * self._index.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self._index.dtype

    def ask(self, rows: Sequence[int]) -> None:
        """Do nothing: every row is there. See `ServedFeatures.ask`."""

    def read(self, rows: Sequence[int], out_sf: Tensor) -> None:
        """Copy the features of these rows, one after the other, to the beginning of [S, F]."""
        done = 0
        for row in rows:
            shard = self._index.shards[bisect_right(self._first_rows, row) - 1]
            place = row - shard.first_row
            begin, end = shard.offsets[place], shard.offsets[place + 1]
            file, out_rf = self._opened(shard), out_sf[done : done + end - begin]
            for layer, part_rd in zip(self._layers, out_rf.chunk(len(self._layers), dim=-1), strict=True):
                part_rd.copy_(file.get_slice(str(layer))[begin:end])
            done += end - begin

    def _opened(self, shard: Shard) -> Any:
        if shard.file not in self._open:
            file = self._folder / shard.file
            expected = [shard.tokens, self._index.hidden_size]
            try:
                opened = safe_open(file, framework="pt")
                shapes = {layer: opened.get_slice(str(layer)).get_shape() for layer in self._layers}
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"{file} cannot be read ({error}): delete it, then `draftsmith features` again"
                ) from None
            if any(shape != expected for shape in shapes.values()):
                raise UserError(
                    f"{file} does not hold what {INDEX_NAME} says: delete it, then `draftsmith features` again"
                )
            self._open[shard.file] = opened
        return self._open[shard.file]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open files: every worker of a data loader maps the files itself."""
        return {**self.__dict__, "_open": {}}


def check_offline_support(recipe: Recipe) -> None:
    """Check that drafters of this kind can be trained on features from disk or from servers.

    Raises:
        UserError: The kind needs the target in training; the message gives the reason.
    """
    obstacle = load_drafter_class(recipe.drafter.kind).unsupported.get("offline")
    if obstacle is not None:
        raise UserError(
            f"drafter.kind `{recipe.drafter.kind}` cannot be trained on features from disk or servers, as {obstacle}: "
            "set data.features.source=online"
        )


def feature_settings(recipe: Recipe, tokens_hash: str) -> dict[str, Any]:
    """Return the settings that the features depend on, by recipe key."""
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
    return FeatureCache(folder, index, layers)
