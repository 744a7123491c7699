"""The features stage: the target's hidden states of all tokens, once, to `runs/<name>/features/`.

The target runs in this process or, with `data.features.source: server`, on servers. The size on disk is known before,
from the target's config and the tokens. The stage can be killed at any moment: existing shards stay, and the next run
writes the missing ones.

Shapes: B batch, S sequence, F features.
"""

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftsmith.data.distill.limits import check_tokens, target_limits
from draftsmith.data.distill.token_dataset import load_tokens, row_lengths, tokens_hash
from draftsmith.errors import UserError
from draftsmith.files import bytes_text, free_bytes_at
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.features import required_layers, target_features
from draftsmith.models.target.loading import (
    load_ends,
    load_target,
    load_target_config,
    target_without_weights,
)
from draftsmith.progress import Progress, progress_bar
from draftsmith.recipes.run_folder import RunFolder, process_of_launch, with_run_lock
from draftsmith.recipes.schema import FeaturesRecipe, Recipe
from draftsmith.train.features.cache import FeatureCache, FeatureIndex, Shard, check_offline_support, feature_settings
from draftsmith.train.features.served import ServedFeatures


@dataclass(frozen=True)
class Projection:
    """Plan of the features that `write_features` is to write: all shards, the missing ones, and their sizes."""

    folder: Path
    tokens: Dataset
    index: FeatureIndex
    missing: list[Shard]
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.index.bytes_of(self.index.shards)

    @property
    def missing_bytes(self) -> int:
        return self.index.bytes_of(self.missing)

    def sentence(self) -> str:
        """Describe in one sentence the size of the features on disk, and how much of it is written."""
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


def models_without_weights(recipe: Recipe) -> tuple[PreTrainedModel, Drafter]:
    """Build the target and, attached to it, the drafter as at the start of training, on the meta device.

    Raises:
        UserError: The target's config cannot be read, or an option or the architecture is not supported.
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
        UserError: No tokens yet, the drafter cannot be trained on features from disk, or others are stored.
    """
    check_offline_support(recipe)
    run = RunFolder(recipe)
    tokens = load_tokens(run)
    check_tokens(tokens, target_limits(load_target_config(recipe.target)), run.data / "tokens")
    settings = feature_settings(recipe, tokens_hash(tokens))
    target, drafter = models_without_weights(recipe)
    layers, hidden_size = required_layers(drafter), target.config.get_text_config().hidden_size
    index = FeatureIndex.read(run.features)
    if index is None:
        index = FeatureIndex.plan(layers, hidden_size, settings, row_lengths(tokens))
    missing, served = index.missing(run.features), recipe.data.features.source == "server"
    index.check_matches(run.features, settings, layers, filled=served and bool(missing))
    return Projection(run.features, tokens, index, missing, free_bytes_at(run.features))


@with_run_lock("features")
def write_features(recipe: Recipe, projection: Projection, progress: bool = True) -> float:
    """Write the missing shards of features; return the seconds that this took.

    Args:
        projection: The shards of all tokens and the missing ones, from `project_features`.

    Raises:
        UserError: The target cannot be loaded, a server cannot be used, or there are several processes.
        OSError: The disk is full; finished shards stay.
    """
    if process_of_launch()[1] > 1:
        raise UserError(
            "`draftsmith features` is one process: to use several GPUs start vLLM servers of the target by `draftsmith "
            "serve RECIPE --features`, and set data.features.source=server"
        )
    begin_s = time.perf_counter()
    folder, index, missing = projection.folder, projection.index, projection.missing
    index.write(folder)
    cache, tokens = FeatureCache(folder, index, index.layers), sum(shard.tokens for shard in missing)
    with progress_bar(tokens, "features", "tok", unit_scale=True, shown=progress) as bar:
        if recipe.data.features.source == "server":
            fill_from_servers(recipe, projection.tokens, index, cache, missing, bar)
        else:
            target, _ = load_target(recipe.target)
            for shard in missing:
                fill_from_target(target, index, cache, shard, projection.tokens, recipe.data.features, bar)
    return time.perf_counter() - begin_s


def fill_from_servers(
    recipe: Recipe, tokens: Dataset, index: FeatureIndex, cache: FeatureCache, shards: list[Shard], bar: Progress
) -> None:
    """Request the rows of these shards from servers, except rows that are written, and write them.

    Raises:
        UserError: A server does not answer, refuses a row, or serves another target or other layers.
    """
    served = ServedFeatures(recipe, tokens, load_ends(recipe.target), index.layers, cache)
    served.sweep()
    served.check_servers()
    ahead = recipe.data.features.server.in_flight
    for shard in shards:
        lengths = [end - begin for begin, end in pairwise(shard.offsets)]
        for place, row in enumerate(shard.rows):
            served.ask(shard.rows[place : place + ahead])
            served.read([row], torch.empty(lengths[place], served.width, dtype=index.dtype))
            bar.update(lengths[place])
        cache.finish(shard)


def fill_from_target(
    target: PreTrainedModel,
    index: FeatureIndex,
    cache: FeatureCache,
    shard: Shard,
    tokens: Dataset,
    chosen: FeaturesRecipe,
    bar: Progress,
) -> None:
    """Compute the features of a shard's rows with the target in this process, and write them.

    Rows of similar lengths share a forward; the longest come first, so that too large a batch fails soon.

    Raises:
        UserError: The device's memory does not hold a batch.
    """
    rows = tokens[shard.rows.start : shard.rows.stop]["input_ids"]
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
            cache.write(shard.first_row + row, features_sf[: len(rows[row])].cpu())
            bar.update(len(rows[row]))
    cache.finish(shard)
