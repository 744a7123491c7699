"""The features stage: the target's hidden states of all tokens, once, to `runs/<name>/features/`.

The target runs in this process or, with `data.features.source: server`, on servers. The size on disk is known before,
from the target's config and the tokens. The stage can be killed at any moment: the next run writes the missing rows.

Shapes: B batch, S sequence, L layers, D hidden, F = L * D features.
"""

import time
from dataclasses import dataclass

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftsmith.data.distill.limits import check_tokens, target_limits
from draftsmith.data.distill.token_dataset import load_tokens
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
from draftsmith.recipes.schema import Recipe
from draftsmith.train.features.served import ServedFeatures
from draftsmith.train.features.stored import StoredFeatures, check_offline_support


@dataclass(frozen=True)
class Projection:
    """Plan of the features that `write_features` is to write: all rows, the missing ones, and their sizes."""

    tokens: Dataset
    stored: StoredFeatures
    missing: list[int]

    @property
    def num_tokens(self) -> int:
        return self.stored.count_tokens(range(len(self.tokens)))

    @property
    def missing_bytes(self) -> int:
        return self.stored.count_tokens(self.missing) * self.stored.token_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_tokens * self.stored.token_bytes

    def sentence(self) -> str:
        """Describe in one sentence the size of the features on disk, and how much of it is written."""
        stored, num_layers = self.stored, len(self.stored.layers)
        size = (
            f"{bytes_text(self.total_bytes)} = {self.num_tokens:,} tokens x {num_layers} "
            f"layer{'s' if num_layers > 1 else ''} x {stored.width // num_layers} x {stored.dtype.itemsize} bytes"
        )
        if not self.missing:
            return f"{stored.folder} is complete ({size}): nothing to do"
        written = self.total_bytes - self.missing_bytes
        left = f", of which {bytes_text(written)} are there" if written else ""
        free = f"{bytes_text(free_bytes_at(stored.folder))} are free on that disk"
        return f"{stored.folder} takes {size}{left}; {free}{stored.describe_others()}"


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
        UserError: No tokens yet, or the drafter cannot be trained on features from disk.
    """
    check_offline_support(recipe)
    run = RunFolder(recipe)
    tokens = load_tokens(run)
    check_tokens(tokens, target_limits(load_target_config(recipe.target)), run.data / "tokens")
    target, drafter = models_without_weights(recipe)
    stored = StoredFeatures(recipe, tokens, target, required_layers(drafter))
    return Projection(tokens, stored, stored.missing())


@with_run_lock("features")
def write_features(recipe: Recipe, projection: Projection, progress: bool = True) -> float:
    """Write the missing rows of features; return the seconds that this took.

    Args:
        projection: The rows of all tokens and the missing ones, from `project_features`.

    Raises:
        UserError: The target cannot be loaded, a server cannot be used, or there are several processes.
        OSError: The disk is full; written rows stay.
    """
    if process_of_launch()[1] > 1:
        raise UserError(
            "`draftsmith features` is one process: to use several GPUs start vLLM servers of the target by `draftsmith "
            "serve RECIPE --features`, and set data.features.source=server"
        )
    begin_s = time.perf_counter()
    stored, missing = projection.stored, projection.missing
    with progress_bar(stored.count_tokens(missing), "features", "tok", unit_scale=True, shown=progress) as bar:
        if recipe.data.features.source == "server":
            fill_from_servers(recipe, projection, bar)
        else:
            fill_from_target(recipe, projection, bar)
    return time.perf_counter() - begin_s


def fill_from_servers(recipe: Recipe, projection: Projection, bar: Progress) -> None:
    """Request the missing rows from servers, and write them.

    Raises:
        UserError: A server does not answer, refuses a row, or serves another target or other layers.
    """
    recipe = recipe.model_copy(deep=True)
    recipe.data.features.server.keep = True
    served = ServedFeatures(recipe, projection.tokens, load_ends(recipe.target), projection.stored.layers)
    served.sweep()
    served.check_servers(projection.missing)
    ahead = recipe.data.features.server.in_flight
    for place, row in enumerate(projection.missing):
        served.ask(projection.missing[place : place + ahead])
        bar.update(len(served.take(row)))


def fill_from_target(recipe: Recipe, projection: Projection, bar: Progress) -> None:
    """Compute the features of the missing rows with the target in this process, and write them.

    Rows of similar lengths share a forward; the longest come first, so that too large a batch fails soon.

    Raises:
        UserError: The target cannot be loaded, or the device's memory does not hold a batch.
    """
    target, _ = load_target(recipe.target)
    stored, chosen = projection.stored, recipe.data.features
    stored.sweep()
    by_length = sorted(projection.missing, key=lambda row: -stored.count_tokens([row]))
    for begin in range(0, len(by_length), chosen.batch_size):
        rows = by_length[begin : begin + chosen.batch_size]
        # On the right, where causal order keeps padding out of every real token.
        ids_bs = pad_sequence([torch.tensor(stored.ids(row)) for row in rows], batch_first=True)
        try:
            features_bsf = target_features(target, ids_bs.to(target.device), layers=stored.layers)
        except torch.OutOfMemoryError:
            raise UserError(
                f"{len(rows)} rows of {ids_bs.shape[1]} tokens do not fit into the device's memory: lower "
                f"data.features.batch_size, which is {chosen.batch_size}"
            ) from None
        for row, features_sf in zip(rows, features_bsf, strict=True):
            length = stored.count_tokens([row])
            stored.store(row, features_sf[:length].unflatten(1, (len(stored.layers), -1)).cpu())
            bar.update(length)
