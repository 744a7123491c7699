"""A stepwise decoder whose logits are in a table over all paths."""

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from draftsmith.eval.trees.enumeration import Outcomes, every_verification
from draftsmith.eval.trees.verify import DraftTree
from draftsmith.models.decoding.decoders import ALL_TOKENS, TokenColumns
from draftsmith.models.sampling import Sampling

Path = tuple[int, ...]


class TableDecoder:
    """A `StepwiseDecoder` that looks up its logits by the path of tokens, and records the width of each call.

    The table has all tokens; with a draft vocabulary the decoder returns the `columns`.
    """

    def __init__(self, logits_of: dict[Path, Tensor], num_depths: int, columns: TokenColumns = ALL_TOKENS) -> None:
        self._logits_of, self.num_depths, self.columns = logits_of, num_depths, columns
        self._paths: list[Path] = []
        self.widths: list[int] = []

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
        pass

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        pass

    def begin(self) -> Tensor:
        self._paths, self.widths = [()], []
        return self._drafted([()])

    def expand(self, tokens: list[int] | Tensor, parents: list[int]) -> Tensor:
        tokens = torch.as_tensor(tokens).tolist()
        self.widths.append(len(tokens))
        # The parents are nodes of earlier calls.
        added = [(*self._paths[parent], token) for token, parent in zip(tokens, parents, strict=True)]
        self._paths += added
        return self._drafted(added)

    def _drafted(self, paths: list[Path]) -> Tensor:
        logits = torch.stack([self._logits_of[path] for path in paths])
        return logits if self.columns.ids is None else logits[:, self.columns.ids]


class DepthsDecoder:
    """A `DrafterDecoder` that drafts the same logits [G, V'] every time."""

    def __init__(self, logits: Tensor, columns: TokenColumns = ALL_TOKENS) -> None:
        self._logits, self.columns = logits, columns

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
        pass

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        pass

    def draft(self) -> Tensor:
        return self._logits


def list_paths(vocabulary: int, lengths: range) -> list[Path]:
    return [path for length in lengths for path in itertools.product(range(vocabulary), repeat=length)]


def random_table(seed: int, vocabulary: int, num_depths: int) -> dict[Path, Tensor]:
    """Return random logits [V] after every path."""
    generator = torch.Generator().manual_seed(seed)
    return {
        path: torch.randn(vocabulary, generator=generator, dtype=torch.float64) * 2
        for path in list_paths(vocabulary, range(num_depths))
    }


def paths_in(tree: DraftTree) -> list[Path]:
    """Return the tokens from the root to each node except the root, in node order."""
    return [tuple(tree.tokens[step] for step in tree.shape.path_to(node)[1:]) for node in range(1, len(tree))]


def leaf_paths(tree: DraftTree) -> list[list[int]]:
    """Return for each leaf the nodes from the root to it."""
    return [tree.shape.path_to(node) for node in range(len(tree)) if node not in tree.parents]


def draw_rows(
    chooser: Outcomes, q: Tensor, count: int, _: object, columns: TokenColumns = ALL_TOKENS
) -> list[list[int]]:
    """Replace `draw_without_replacement` by the draws of an outcome."""
    rows = []
    for row in q:
        left, drawn = row.clone(), []
        for _ in range(count):
            drawn.append(int(chooser.draw(left / left.sum())) if left.sum() > 0 else -1)
            left[drawn[-1]] = 0 if drawn[-1] >= 0 else left[drawn[-1]]
        rows.append(columns.tokens(drawn))
    return rows


def check_three_tokens(
    drawn: Iterable[tuple[float, DraftTree]], p_logits: dict[Path, Tensor], sampling: Sampling, vocabulary: int
) -> None:
    """Check that the first three tokens have exactly the target's distribution over all trees and verifications.

    Args:
        drawn: Every possible tree with its probability.
        p_logits: The target's logits after 0, 1 and 2 tokens.
    """
    p_of = {path: sampling.probabilities(logits) for path, logits in p_logits.items()}
    joint = torch.zeros([vocabulary] * 3, dtype=torch.float64)
    total, nothing = 0.0, torch.zeros(vocabulary, dtype=torch.float64)
    for weight, tree in drawn:
        total += weight
        logits = torch.stack([p_logits.get(path, nothing) for path in [(), *paths_in(tree)]])
        for probability, verification in every_verification(tree, logits, sampling):
            committed = (*(tree.tokens[node] for node in verification.path[1:]), verification.next_token)
            # Tokens that the round did not commit come from the target.
            for rest in itertools.product(range(vocabulary), repeat=3 - len(committed)):
                path, mass = (*committed, *rest), weight * probability
                for length in range(len(committed), 3):
                    mass *= float(p_of[path[:length]][path[length]])
                joint[path] += mass
    assert abs(total - 1) < 1e-9
    wanted = torch.zeros_like(joint)
    for a, b, c in itertools.product(range(vocabulary), repeat=3):
        wanted[a, b, c] = p_of[()][a] * p_of[a,][b] * p_of[a, b][c]
    torch.testing.assert_close(joint, wanted, atol=1e-9, rtol=0)
