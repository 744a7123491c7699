"""What computes features of the target, row by row, for the cache on disk.

Shapes: B batch, S sequence, F features.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftsmith.models.target.features import target_features
from draftsmith.recipes.errors import UserError


class FeatureEngine(Protocol):
    """A target that reads rows of token ids."""

    def features(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, Tensor]]:
        """For every row, in any order: its number and its features [S, F], on any device, in any dtype."""


class TransformersFeatures:
    """The target in this process, with the forward that online training runs.

    Args:
        target: Any.
        layers: Ids of `draftsmith.models.target.features.FeatureTap`.
        batch_size: B; rows of like length share a forward.
        autocast: Its products in bf16, its residual stream not.
    """

    def __init__(
        self, target: PreTrainedModel, layers: tuple[int, ...], batch_size: int, autocast: bool = False
    ) -> None:
        self._target, self._layers, self._batch_size, self._autocast = target, layers, batch_size, autocast

    def features(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, Tensor]]:
        """The longest rows first, so that a batch that is too large fails at once.

        Raises:
            UserError: The device's memory does not hold a batch.
        """
        device = self._target.device
        by_length = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        for begin in range(0, len(rows), self._batch_size):
            numbers = by_length[begin : begin + self._batch_size]
            # On the right, where causal order keeps padding out of every real token.
            ids_bs = pad_sequence([torch.as_tensor(rows[row]) for row in numbers], batch_first=True)
            try:
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._autocast):
                    features_bsf = target_features(self._target, ids_bs.to(device), layers=self._layers)
            except torch.OutOfMemoryError:
                raise UserError(
                    f"{len(numbers)} rows of {ids_bs.shape[1]} tokens do not fit into the device's memory: lower "
                    f"data.features.batch_size, which is {self._batch_size}"
                ) from None
            for place, row in enumerate(numbers):
                yield row, features_bsf[place, : len(rows[row])]
