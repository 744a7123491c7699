"""The target's hidden states on disk, `runs/<name>/features/rows-<hash>/`: a file for each row of tokens.

Files are written by `draftsmith features`, by a training on features from servers with `data.features.server.keep`, and
next to answers that were distilled with `data.distill.features` (`data/engines/answer_features.py`). The folder's name
has a hash of everything that features depend on (target, layers, dtype), and a file's name a hash of its tokens. So
every file found is right, rows may come in any order, and a kill loses only those in flight. Any number of processes
may read and write.

    hidden_states   [S, L, D], as many layers as `layers` has ids: those that the drafter reads, the final one behind
                    the final norm (id -1), or, from a server, the residual stream after each, without id -1
    token_ids       [S], without the last one where a server wrote the states of an answer
    layers          [L], see `draftsmith.models.target.features.FeatureTap`

Shapes: S tokens of a row, L layers, D hidden, F = L * D features.
"""

import copy
import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.data.distill.token_dataset import row_lengths
from draftsmith.data.engines.answer_features import row_file
from draftsmith.errors import UserError, reason
from draftsmith.files import bytes_text, free_bytes_at
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.features import FINAL_FEATURES, final_norm
from draftsmith.models.target.loading import weights_hash
from draftsmith.models.target.view import target_value
from draftsmith.models.weights import some_of
from draftsmith.recipes.run_folder import RunFolder, target_settings
from draftsmith.recipes.schema import Recipe

# Left free on the disk: a share of what is written, and what else a run writes.
MARGIN_FRAC, MARGIN_BYTES = 0.05, 512 << 20
WRITE_AGAIN = "delete it, and run `draftsmith features`"


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


def served_layers(layers: tuple[int, ...], num_target_layers: int) -> tuple[int, ...]:
    """Return the ids of the layers that servers extract, ascending: `layers`, and always the last one.

    Layer -1, the final features, is the last layer's output after our copy of the target's final norm.
    """
    return tuple(sorted({num_target_layers, *layers} - {FINAL_FEATURES}))


class StoredFeatures:
    """Reader and writer of the target's features in a run's folder, row by row; a row is one tokenized example.

    Args:
        recipe: Recipe of the run.
        tokens: The run's tokenized examples; rows are named by their numbers there.
        target: The target; without its weights no file from a server can be read.
        layers: Ids of the layers to read, in this order.
    """

    urls: Sequence[str] = ()  # of servers

    def __init__(self, recipe: Recipe, tokens: Dataset, target: PreTrainedModel, layers: tuple[int, ...]) -> None:
        self._recipe, self._chosen, self._target = recipe, recipe.data.features, target
        self._tokens, self._lengths = tokens.with_format("numpy", columns=["input_ids"]), row_lengths(tokens)
        self._hidden_size = target_value(target.config, "hidden_size")
        self._last = target_value(target.config, "num_hidden_layers")
        self.layers, self.served = layers, served_layers(layers, self._last)
        self._norm: nn.Module | None = None  # on the CPU, as workers of a data loader may use no GPU
        if target.device.type != "meta":
            with suppress(UserError):
                self._norm = copy.deepcopy(final_norm(target)).cpu()
        # The last part is `data.features.autocast`, a key of the release before.
        settings = [target_settings(recipe), weights_hash(recipe.target), layers, self._chosen.dtype, False]
        digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        self.folder = RunFolder(recipe).features / f"rows-{digest[:16]}"

    @property
    def width(self) -> int:
        """Return F, the number of features of one token: the hidden size times the number of layers."""
        return len(self.layers) * self._hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self._chosen.dtype)

    def ids(self, row: int) -> list[int]:
        """Return the token ids [S] of a row."""
        return self._tokens[row]["input_ids"].tolist()

    def missing(self) -> list[int]:
        """Return the numbers of the rows that are not stored."""
        stored = set(self.folder.iterdir()) if self.folder.is_dir() else set()
        rows = (ids for batch in self._tokens.iter(1000) for ids in batch["input_ids"])
        return [row for row, ids in enumerate(rows) if row_file(self.folder, ids.tolist()) not in stored]

    def describe_others(self) -> str:
        """Return what else is in the run's folder of features, as the end of a sentence; empty if nothing is."""
        root = self.folder.parent
        others = sorted(file.name for file in root.iterdir() if file != self.folder) if root.is_dir() else []
        return f"; {some_of(others)} there: of other settings or an earlier release, not read" if others else ""

    def check_complete(self) -> None:
        """Check that every row is stored.

        Raises:
            UserError: Rows are missing.
        """
        if missing := self.missing():
            raise UserError(
                f"{self.folder} holds no features of {len(missing)} of {len(self._tokens)} rows, which "
                "data.features.source=offline trains on: run `draftsmith features` with recipe "
                f"`{self._recipe.name}` first, or set data.features.source=online{self.describe_others()}"
            )

    @property
    def token_bytes(self) -> int:
        """Return the bytes on disk of the features of one token."""
        return self.width * self.dtype.itemsize

    def count_tokens(self, rows: Sequence[int]) -> int:
        """Return the number of tokens of these rows."""
        return sum(self._lengths[row] for row in rows)

    def check_disk_space(self, missing: Sequence[int]) -> None:
        """Check that the features of the missing rows fit on the disk, with a margin.

        Raises:
            UserError: The disk has too little space.
        """
        needed_bytes = self.count_tokens(missing) * self.token_bytes
        margin_bytes, free_bytes = round(MARGIN_FRAC * needed_bytes) + MARGIN_BYTES, free_bytes_at(self.folder)
        if needed_bytes + margin_bytes <= free_bytes:
            return
        smaller = "set data.features.dtype=bfloat16, " if self.dtype.itemsize > 2 else ""
        raise UserError(
            f"{self.folder} still needs {bytes_text(needed_bytes)}, and {bytes_text(margin_bytes)} to spare, but only "
            f"{bytes_text(free_bytes)} are free on that disk: free some, {smaller}lower data.conversations.limit, or "
            "train without features on disk (data.features.source=online, or data.features.server.keep=false)"
        )

    def sweep(self) -> None:
        """Delete files that a killed process left incomplete; no other process may be writing."""
        for file in self.folder.glob("*.partial"):
            file.unlink()

    def ask(self, rows: Sequence[int]) -> None:
        """Do nothing, as rows on disk need no request; `ServedFeatures.ask` requests rows from servers."""

    def read(self, rows: Sequence[int], out_sf: Tensor) -> None:
        """Copy the features of these rows, one after the other, to the start of `out_sf` [S, F].

        Raises:
            UserError: A file is damaged or missing, or no server gives the features.
        """
        done = 0
        for row in rows:
            features_sld = self.take(row)
            out_sf[done : done + len(features_sld)].copy_(features_sld.flatten(1))
            done += len(features_sld)

    def take(self, row: int) -> Tensor:
        """Return the features [S, L, D] of a row of the dataset."""
        ids = self.ids(row)
        return self.select(*self.load(row_file(self.folder, ids), ids, WRITE_AGAIN))

    def store(self, row: int, features_sld: Tensor) -> None:
        """Write the features [S, L, D] of a row of the dataset, completely or not at all.

        Raises:
            OSError: The disk is full.
        """
        ids = self.ids(row)
        tensors = {
            "hidden_states": features_sld.to(self.dtype).contiguous(),
            "token_ids": torch.tensor(ids),
            "layers": torch.tensor(self.layers),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        file = row_file(self.folder, ids)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        try:
            partial.write_bytes(save(tensors))
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)

    def load(self, file: Path, ids: list[int], way_out: str) -> tuple[Tensor, list[int]]:
        """Return the hidden states [S, L, D] of these tokens in a file, and the ids of the L layers.

        Args:
            file: A file of this folder or of a server.
            way_out: Advice for the error message.

        Raises:
            UserError: The file is missing or damaged, or not what is written for this target and these tokens.
        """
        try:
            tensors = load(file.read_bytes())
            hidden_sld, read_ids = tensors["hidden_states"], tensors["token_ids"].tolist()
            layers = tensors["layers"].tolist()
        except (SafetensorError, KeyError, FileNotFoundError) as error:
            raise UserError(f"{file}, a file of features, is damaged ({reason(error)}): {way_out}") from None
        is_stored = file.parent == self.folder
        if is_stored and read_ids != ids:
            # The last token's states are read by no drafter; another's stand in for them.
            hidden_sld = torch.cat([hidden_sld[: len(ids)], hidden_sld[-1:]])[: len(ids)]
            read_ids = [*read_ids[: len(ids)], ids[-1]][: len(ids)]
        expected = (len(ids), len(layers), self._hidden_size)
        is_right = layers == list(self.served) or (is_stored and layers == list(self.layers))
        has_dtype = hidden_sld.dtype == self._target.dtype or (is_stored and hidden_sld.dtype == self.dtype)
        wrong = (
            ("" if is_right else f"the layers {layers}, not {list(self.served)}")
            or ("" if read_ids == ids else "other tokens than were sent")
            or ("" if hidden_sld.shape == expected else f"the shape {list(hidden_sld.shape)}, not {list(expected)}")
            or ("" if has_dtype else f"{hidden_sld.dtype}, not {self._target.dtype}")
            or ("" if hidden_sld.sum(dtype=torch.float32).isfinite() else "values that are not finite")
        )
        if wrong:
            raise UserError(f"{file}, a file of features, has {wrong}: {way_out}")
        return hidden_sld, layers

    def select(self, hidden_sld: Tensor, layers: Sequence[int]) -> Tensor:
        """Return the features [S, L, D] of the layers to read, from hidden states after `layers`."""
        if tuple(layers) == self.layers:
            return hidden_sld.to(self.dtype)
        return torch.stack([self.select_layer(layer, hidden_sld, layers) for layer in self.layers], 1).to(self.dtype)

    @torch.no_grad()
    def select_layer(self, layer: int, hidden_sld: Tensor, layers: Sequence[int]) -> Tensor:
        """Return the features [S, D] of one layer; those of layer -1 are normed here if they come from a server."""
        if layer in layers:
            return hidden_sld[:, layers.index(layer)]
        norm = self._norm or final_norm(self._target)
        return norm(hidden_sld[:, layers.index(self._last)].to(next(norm.parameters()).dtype))
