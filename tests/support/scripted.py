"""A method that knows the answer and makes deliberate mistakes."""

from torch import Tensor

from draftsmith.eval.decoding.method import Method
from draftsmith.eval.trees.verify import DraftTree, TreeShape

V, DRAFTED = 11, 4


class Scripted(Method):
    """Method that proposes the known answer, a wrong one, or the answer with a wrong token at one depth."""

    name = "scripted"

    def __init__(self, answer: list[int], spoil_depth: int | None) -> None:
        self.answer, self.spoil_depth = answer, spoil_depth
        self.observed: list[int] = []

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        assert len(prompt_ids) == len(features)
        self.observed = []

    def propose(self) -> DraftTree:
        start = len(self.observed)
        tokens = (self.answer + [0] * DRAFTED)[start : start + DRAFTED]
        if self.spoil_depth is not None:
            tokens[self.spoil_depth - 1] = (tokens[self.spoil_depth - 1] + 1) % V
        return DraftTree([self.observed[-1], *tokens], TreeShape.chain(DRAFTED))

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        assert len(committed_ids) == len(features)
        self.observed += committed_ids
