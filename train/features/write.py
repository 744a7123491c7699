"""The features stage: run the target over all tokens once, and write its hidden states to `runs/<name>/features/`.

The size is known before the target is loaded, from its config and the tokens. The stage can be killed at any moment:
existing shards stay, and the next run writes the missing ones.

Under a launcher each process writes its part of the shards, with its own target.

Shapes: B batch, S sequence, D hidden, F features.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from torch import Tensor, distributed
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftsmith.data.distill.limits import check_tokens, target_limits
from draftsmith.data.distill.token_dataset import load_tokens, row_lengths, tokens_hash
from draftsmith.errors import UserError
from draftsmith.files import bytes_text, free_bytes_at
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.features import required_layers, target_features
from draftsmith.models.target.loading import load_target, load_target_config, target_device, target_without_weights
from draftsmith.progress import Progress, progress_bar
from draftsmith.recipes.run_folder import RunFolder, with_run_lock
from draftsmith.recipes.schema import FeaturesRecipe, Recipe
from draftsmith.train.features.cache import (
    SHARD_BYTES,
    FeatureIndex,
    Shard,
    check_offline_support,
    feature_settings,
    write_shard,
)
from draftsmith.train.processes.frozen_target import outside_the_launch
from draftsmith.train.processes.launch import leave_at_exit

# Left free on the disk: a share of what is written, and what else a run writes.
MARGIN_FRAC, MARGIN_BYTES = 0.05, 2 * SHARD_BYTES


@dataclass(frozen=True)
class Projection:
    """Size and content of the features that `write_features` is going to write."""

    folder: Path
    tokens: Dataset
    index: FeatureIndex
    missing: list[Shard]
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.index.tokens * self.index.bytes_per_token

    @property
    def missing_bytes(self) -> int:
        return sum(shard.tokens for shard in self.missing) * self.index.bytes_per_token

    def sentence(self) -> str:
        """Return the size to write in one sentence."""
        index = self.index
        layers = f"{len(index.layers)} layer{'s' if len(index.layers) > 1 else ''}"
        size = (
            f"{bytes_text(self.total_bytes)} = {index.tokens:,} tokens x {layers} x {index.hidden_size} x "
            f"{index.dtype.itemsize} bytes"
        )
        if not self.missing:
            return f"{self.folder} is complete ({size}): nothing to do"
        written = self.total_bytes - self.missing_bytes
        left = f", of which {bytes_text(written)} are there" if written else ""
        return f"{self.folder} takes {size}{left}; {bytes_text(self.free_bytes)} are free on that disk"

    def check_disk_space(self) -> None:
        """Check that the missing shards fit on the disk, with a margin.

        Raises:
            UserError: The disk has too little space.
        """
        margin_bytes = round(MARGIN_FRAC * self.missing_bytes) + MARGIN_BYTES
        if self.missing_bytes + margin_bytes <= self.free_bytes:
            return
        smaller = "set data.features.dtype=bfloat16, " if self.index.dtype.itemsize > 2 else ""
        raise UserError(
            f"{self.folder} still needs {bytes_text(self.missing_bytes)}, and {bytes_text(margin_bytes)} to spare, but "
            f"only {bytes_text(self.free_bytes)} are free on that disk: free some, {smaller}lower "
            "data.conversations.limit, or train online, which needs none (data.features.source=online)"
        )


@dataclass(frozen=True)
class FeatureReport:
    """Result of `write_features`."""

    folder: Path
    tokens: int
    written_bytes: int
    wall_time_s: float

    def sentence(self) -> str:
        """Return size and speed of the writing in one sentence."""
        speed = f"{self.tokens / max(self.wall_time_s, 1e-9):,.0f} tokens/s"
        return f"wrote {bytes_text(self.written_bytes)} to {self.folder} in {self.wall_time_s:.0f} s, {speed}"


def models_without_weights(recipe: Recipe) -> tuple[PreTrainedModel, Drafter]:
    """Build the target and, attached to it, the drafter as at the start of training, on the meta device.

    Raises:
        UserError: The target's config cannot be read, or as `Drafter.from_target`.
    """
    with torch.device("meta"):
        target = target_without_weights(recipe.target)
        kind = load_drafter_class(recipe.drafter.kind)
        config = kind.make_config(target, recipe.drafter.options)
        dtype = torch.promote_types(target.dtype, torch.float32)
        return target, kind(config).to(dtype).attach(target)


def project_features(recipe: Recipe) -> Projection:
    """Compute the size of the features to write. Loads configs and tokens, no weights, and writes nothing.

    Raises:
        UserError: No tokens yet, the drafter cannot be trained on features from disk, or the folder holds others.
    """
    check_offline_support(recipe)
    run = RunFolder(recipe)
    tokens = load_tokens(run, recipe.name)
    check_tokens(tokens, target_limits(load_target_config(recipe.target)), run.data / "tokens")
    settings = feature_settings(recipe, tokens_hash(tokens))
    target, drafter = models_without_weights(recipe)
    layers, hidden_size = required_layers(drafter), target.config.get_text_config().hidden_size
    index = FeatureIndex.read(run.features)
    if index is None:
        index = FeatureIndex.plan(layers, hidden_size, settings, row_lengths(tokens))
    index.check_matches(run.features, settings, layers)
    return Projection(run.features, tokens, index, index.missing(run.features), free_bytes_at(run.features))


@with_run_lock("features")
def write_features(recipe: Recipe, projection: Projection, progress: bool = True) -> FeatureReport:
    """Write the missing shards of features; several processes share the work.

    Args:
        projection: The shards of all tokens, those that are missing, and their size on disk, as told to the user.

    Raises:
        UserError: The target cannot be loaded, or is not the target of the existing shards.
        OSError: The disk is full; finished shards stay.
    """
    begin_s = time.perf_counter()
    folder, index, chosen = projection.folder, projection.index, recipe.data.features
    is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    group = PartialState(cpu=target_device(recipe.target).type == "cpu") if is_launched else None
    number, count, missing = 0, 1, projection.missing
    if group is not None:
        leave_at_exit()
        number, count = group.process_index, group.num_processes
        # Of the first: a slower process would already miss what a faster one has written.
        files = [[shard.file for shard in missing]]
        distributed.broadcast_object_list(files, device=group.device)
        missing = [shard for shard in index.shards if shard.file in set(files[0])]
        with outside_the_launch():
            target = load_target(recipe.target.model_copy(update={"device": str(group.device)}))[0]
    else:
        target = load_target(recipe.target)[0]
    if number == 0:
        index.write(folder)
    parts = [missing[part::count] for part in range(count)]
    with progress_bar(
        sum(shard.tokens for shard in parts[number]), "features", "tok", unit_scale=True, shown=progress
    ) as bar:
        for shard in parts[number]:
            rows = projection.tokens[shard.rows.start : shard.rows.stop]["input_ids"]
            write_shard(folder / shard.file, shard_features(target, index, shard, rows, chosen, bar))
    if group is not None:
        group.wait_for_everyone()
    written = sum(shard.tokens for shard in projection.missing)
    return FeatureReport(folder, written, projection.missing_bytes, time.perf_counter() - begin_s)


def shard_features(
    target: PreTrainedModel,
    index: FeatureIndex,
    shard: Shard,
    rows: Sequence[Sequence[int]],
    chosen: FeaturesRecipe,
    bar: Progress,
) -> dict[str, Tensor]:
    """Compute the features of a shard's rows, as they are written: {layer: [tokens, D]}.

    Rows of similar lengths share a forward; the longest come first, so that too large a batch fails soon.

    Raises:
        UserError: The device's memory does not hold a batch.
    """
    shape = (shard.tokens, index.hidden_size)
    features = {str(layer): torch.empty(shape, dtype=index.dtype) for layer in index.layers}
    by_length = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    for begin in range(0, len(rows), chosen.batch_size):
        numbers = by_length[begin : begin + chosen.batch_size]
        # On the right, where causal order keeps padding out of every real token.
        ids_bs = pad_sequence([torch.as_tensor(rows[row]) for row in numbers], batch_first=True)
        try:
            with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=chosen.autocast):
                features_bsf = target_features(target, ids_bs.to(target.device), layers=index.layers)
        except torch.OutOfMemoryError:
            raise UserError(
                f"{len(numbers)} rows of {ids_bs.shape[1]} tokens do not fit into the device's memory: lower "
                f"data.features.batch_size, which is {chosen.batch_size}"
            ) from None
        for row, features_sf in zip(numbers, features_bsf, strict=True):
            place, length = slice(shard.offsets[row], shard.offsets[row + 1]), len(rows[row])
            for layer_td, part_sd in zip(features.values(), features_sf.chunk(len(features), dim=-1), strict=True):
                layer_td[place] = part_sd[:length]
            bar.update(length)
    return features
