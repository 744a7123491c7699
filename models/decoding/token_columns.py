"""Which tokens the columns of a drafter's logits are: all of the target's, or those of a draft vocabulary.

A drafter with a reduced draft vocabulary reads V' rows of a head, and its logits have V' columns. Trees are made of
these columns and name the target's tokens; only what verification samples against is made V wide.

Shapes: V the target's vocabulary, V' columns.
"""

import torch
from torch import Tensor


class TokenColumns:
    """See the module's docstring.

    Args:
        ids: [V'] the target's ids of the columns, ascending; None: all of its tokens, in order.
        vocabulary: V, where there are `ids`.
    """

    def __init__(self, ids: Tensor | None = None, vocabulary: int = 0) -> None:
        self.ids, self._vocabulary = ids, vocabulary
        given: list[int] = [] if ids is None else ids.tolist()
        self._tokens = [*given, -1]  # column -1 is "none", and stays -1
        self._known = frozenset(given)
        self._by_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def reduced(self) -> bool:
        """Whether tokens are missing, or may be."""
        return self.ids is not None

    def __contains__(self, token: int) -> bool:
        return self.ids is None or token in self._known

    def vocabulary_of(self, logits: Tensor) -> int:
        """V, for logits [..., V']."""
        return logits.shape[-1] if self.ids is None else self._vocabulary

    def tokens(self, columns: list[int]) -> list[int]:
        """The target's ids; -1, for no column, stays -1."""
        return columns if self.ids is None else [self._tokens[column] for column in columns]

    def tokens_of(self, columns: Tensor) -> Tensor:
        """The target's ids of columns on a device; -1 stays -1."""
        if self.ids is None:
            return columns
        return self._on(columns.device)[1][columns]

    def widened(self, values: Tensor, elsewhere: float) -> Tensor:
        """[..., V'] to [..., V], with this value for the tokens that have no column."""
        if self.ids is None:
            return values
        wide = values.new_full((*values.shape[:-1], self._vocabulary), elsewhere)
        return wide.index_copy_(-1, self._on(values.device)[0], values)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The ids on a device, and the ids with -1 behind them, where column -1 finds it."""
        if device not in self._by_device:
            assert self.ids is not None
            ids = self.ids.to(device)
            self._by_device[device] = ids, torch.nn.functional.pad(ids, (0, 1), value=-1)
        return self._by_device[device]


ALL_TOKENS = TokenColumns()
