"""The features stage: the target reads all tokens once, and what drafters read of it goes to `runs/<name>/features/`.

The size is known before the target is even loaded, from its config and the tokens. The stage can be killed at any
moment: shards that are there stay, and the next run writes the others.
"""

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.data.distill.token_dataset import load_tokens, row_lengths, tokens_hash
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.fake_run import FakeRun
from draftsmith.models.target.loading import load_target, target_without_weights
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.progress import Progress, progress_bar
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.run_lock import alone_in_its_run
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.units import bytes_text, free_bytes_at
from draftsmith.train.features.cache import SHARD_BYTES, FeatureIndex, Shard, cut_into_shards, write_shard
from draftsmith.train.features.engine import FeatureEngine, TransformersFeatures
from draftsmith.train.features.offline import feature_settings, refuse_obstacle
from draftsmith.train.features.vllm_engine import VllmFeatures, refuse_without_vllm

# Left free on the disk: a share of what is written, and what else a run writes (or an engine, on its way).
MARGIN_FRAC, MARGIN_BYTES = 0.05, 2 * SHARD_BYTES


@dataclass(frozen=True)
class Projection:
    """What `write_features` is going to write."""

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
        """One sentence for the terminal."""
        index = self.index
        layers = f"{len(index.layers)} layer{'s' if len(index.layers) > 1 else ''}"
        size = (
            f"{bytes_text(self.total_bytes)} = {index.tokens:,} tokens x {layers} x {index.hidden_size} x "
            f"{index.dtype.itemsize} bytes"
        )
        if not self.missing:
            return f"{self.folder} is complete ({size}): nothing to do"
        there = self.total_bytes - self.missing_bytes
        left = f", of which {bytes_text(there)} are there" if there else ""
        return f"{self.folder} takes {size}{left}; {bytes_text(self.free_bytes)} are free on that disk"

    def refuse_what_does_not_fit(self) -> None:
        """Compare with the free disk, a margin kept.

        Raises:
            UserError: It does not fit.
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
    """What `write_features` did."""

    folder: Path
    tokens: int
    written_bytes: int
    wall_time_s: float

    def sentence(self) -> str:
        """One sentence for the terminal."""
        speed = f"{self.tokens / max(self.wall_time_s, 1e-9):,.0f} tokens/s"
        return f"wrote {bytes_text(self.written_bytes)} to {self.folder} in {self.wall_time_s:.0f} s, {speed}"


def project_features(recipe: Recipe) -> Projection:
    """How much there is to write. Loads configs and tokens, no weights, and writes nothing.

    Raises:
        UserError: No tokens yet, the drafter cannot be trained on features from disk, or the folder holds others.
    """
    refuse_obstacle(recipe)
    run = RunFolder(recipe)
    tokens = load_tokens(run, recipe.name)
    settings = feature_settings(recipe, tokens_hash(tokens))
    with FakeRun().building():
        target = target_without_weights(recipe.target)
        drafter = load_drafter_class(recipe.drafter.kind).from_target(target, recipe.drafter.options)
        layers, hidden_size = drafter.layers_read, target.config.get_text_config().hidden_size
    index = FeatureIndex.read(run.features)
    if index is None:
        index = FeatureIndex(layers, hidden_size, settings, [])
        index = replace(index, shards=cut_into_shards(row_lengths(tokens), index.bytes_per_token))
    index.refuse_others(run.features, settings, layers)
    return Projection(run.features, tokens, index, index.missing(run.features), free_bytes_at(run.features))


@alone_in_its_run("features")
def write_features(recipe: Recipe, projection: Projection, progress: bool = True) -> FeatureReport:
    """Write the shards that are missing.

    Raises:
        UserError: The target cannot be loaded, or is not the one that the folder was begun with.
        OSError: The disk is full; finished shards stay.
    """
    begin_s = time.perf_counter()
    folder, index = projection.folder, projection.index
    where = {}
    if recipe.data.features.engine == "vllm":
        refuse_without_vllm()
        where = {"device": "cpu"}  # the other device is vLLM's
    target, _ = load_target(recipe.target.model_copy(update=where))
    index.write(folder)
    engine = _engine(recipe, target, index, folder)
    num_tokens = sum(shard.tokens for shard in projection.missing)
    with progress_bar(num_tokens, "features", "tok", unit_scale=True, shown=progress) as bar:
        for shard in projection.missing:
            write_shard(folder / shard.file, shard_features(engine, index, projection.tokens, shard, bar))
    return FeatureReport(folder, num_tokens, projection.missing_bytes, time.perf_counter() - begin_s)


def _engine(recipe: Recipe, target: PreTrainedModel, index: FeatureIndex, folder: Path) -> FeatureEngine:
    if recipe.data.features.engine == "transformers":
        chosen = recipe.data.features
        return TransformersFeatures(target, index.layers, chosen.batch_size, chosen.autocast)
    longest = max(end - begin for shard in index.shards for begin, end in pairwise(shard.offsets))
    return VllmFeatures(recipe.target, target, index.layers, longest, folder)


def shard_features(
    engine: FeatureEngine, index: FeatureIndex, tokens: Dataset, shard: Shard, bar: Progress
) -> dict[str, Tensor]:
    """{layer: [tokens, D]} of a shard's rows, as they are written."""
    shape = (shard.tokens, index.hidden_size)
    features = {str(layer): torch.empty(shape, dtype=index.dtype) for layer in index.layers}
    rows = tokens[shard.rows.start : shard.rows.stop]["input_ids"]
    for row, features_sf in engine.features(rows):
        place = slice(shard.offsets[row], shard.offsets[row + 1])
        for layer_td, part_sd in zip(features.values(), features_sf.chunk(len(features), dim=-1), strict=True):
            layer_td[place] = part_sd
        bar.update(len(features_sf))
    return features
