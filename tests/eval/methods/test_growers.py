"""Trees grown level by level: optimal by brute force, in few calls, and lossless when sampled."""

import pytest
import torch
from support.table_decoder import (
    Path,
    TableDecoder,
    list_paths,
    paths_in,
    random_table,
)
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.methods.drafter import BestFirst, Chain, Static, draw_without_replacement
from draftsmith.models.sampling import Sampling

GREEDY = Sampling()


# ---- best first ----


def eagle2(table: dict[Path, Tensor], depths: int, nodes: int, branch: int, temperature: float) -> list[Path]:
    """Grow a tree as in EAGLE-2: expand at every depth, rerank once at the end."""
    probability: dict[Path, float] = {(): 1.0}
    frontier: list[Path] = [()]
    for _ in range(depths):
        fresh: list[Path] = []
        for path in frontier:
            q = (table[path] / temperature).softmax(-1)
            for token in q.topk(min(branch, len(q))).indices.tolist():
                fresh.append((*path, token))
                probability[fresh[-1]] = probability[path] * float(q[token])
        frontier = sorted(fresh, key=probability.__getitem__, reverse=True)[:branch]
    del probability[()]
    return sorted(probability, key=probability.__getitem__, reverse=True)[:nodes]


@pytest.mark.parametrize("seed", range(12))
def test_best_first_equals_eagle_2_for_a_narrow_beam(seed: int) -> None:
    """It expands no more nodes: at most `branch` per depth, none at the last."""
    depths, vocabulary, nodes, branch = 4, 4, 1 + seed % 20, 1 + seed % 4
    table = random_table(seed, vocabulary, depths)
    decoder = TableDecoder(table, depths)
    temperature = [0.0, 0.6, 1.7][seed % 3]
    tree = BestFirst(nodes, branch).grow(0, decoder, Sampling(temperature), None)
    assert tree.q is None
    assert sorted(paths_in(tree)) == sorted(eagle2(table, depths, nodes, branch, temperature or 1.0))
    assert len(decoder.widths) < depths
    assert all(0 < width <= branch for width in decoder.widths)


def test_best_first_by_hand() -> None:
    """q(a) = .6, q(b) = .4; after a: .5 .5; after b: .9 .1. Paths: a .6, b .4, ba .36, aa .3, ab .3, bb .04."""
    table = {
        (): torch.tensor([0.6, 0.4]).log(),
        (0,): torch.tensor([0.5, 0.5]).log(),
        (1,): torch.tensor([0.9, 0.1]).log(),
    }

    def paths(nodes: int, branch: int) -> tuple[list[Path], list[int]]:
        decoder = TableDecoder(table, 2)
        return paths_in(BestFirst(nodes, branch).grow(0, decoder, GREEDY, None)), decoder.widths

    assert paths(3, 2) == ([(0,), (1,), (1, 0)], [2])
    assert paths(5, 2) == ([(0,), (1,), (0, 0), (0, 1), (1, 0)], [2])
    # Only the best node of each depth is expanded, with its best child.
    assert paths(3, 1) == ([(0,), (0, 0)], [1])
    # No node below the last of two, or below the only one, can stay, so there is no call for them.
    assert paths(2, 2) == ([(0,), (1,)], [1])
    assert paths(1, 2) == ([(0,)], [])


def test_parent_stays_among_equally_likely_nodes() -> None:
    """Three equally likely first tokens, each followed by a certain one: every node is as likely as its parent."""
    certain = torch.tensor([0.0, -torch.inf, -torch.inf])
    table = dict.fromkeys(list_paths(3, range(1, 3)), certain) | {(): torch.zeros(3)}
    for nodes in range(1, 11):
        tree = BestFirst(nodes, branch=3).grow(9, TableDecoder(table, 3), GREEDY, None)
        # The first ones stay, and tokens without probability are never drafted.
        assert tree.depths == (0, 1, 1, 1, 2, 2, 2, 3, 3, 3)[: nodes + 1]
        assert all(path[1:] == (0,) * (len(path) - 1) for path in paths_in(tree))


# ---- chain and static, greedy ----


def test_greedy_chain_follows_the_argmax_of_its_own_path() -> None:
    table = random_table(0, 4, 4)
    decoder = TableDecoder(table, 4)
    path: Path = ()
    for _ in range(4):
        path = (*path, int(table[path].argmax()))
    assert Chain().grow(9, decoder, GREEDY, None).tokens == [9, *path]
    assert decoder.widths == [1, 1, 1]
    assert Chain(max_depth=2).grow(9, decoder, GREEDY, None).tokens == [9, *path[:2]]
    assert decoder.widths == [1]
    assert len(Chain(max_depth=7).grow(9, decoder, GREEDY, None)) == 5
    assert len(BestFirst(99, 2, max_depth=2).grow(9, decoder, GREEDY, None)) == 1 + 2 + 4


RANK_PATHS = [[2], [0], [0, 0], [0, 1], [2, 1], [0, 1, 0], [2, 1, 2], [1], [2, 1, 0], [0, 1, 0, 0]]


def test_static_ranks_are_relative_to_the_parent() -> None:
    """Every level is one call, only for nodes with children."""
    table = random_table(1, 4, 4)
    decoder = TableDecoder(table, 4)
    tree = Static(RANK_PATHS).grow(9, decoder, GREEDY, None)
    wanted = []
    for ranks in sorted(map(tuple, RANK_PATHS), key=lambda ranks: (len(ranks), ranks)):
        path: Path = ()
        for rank in ranks:
            path = (*path, int(table[path].argsort(descending=True)[rank]))
        wanted.append(path)
    assert paths_in(tree) == wanted
    # [0] and [2]; [0, 1] and [2, 1]; [0, 1, 0].
    assert decoder.widths == [2, 2, 1]


def test_static_tree_larger_than_the_draft() -> None:
    table = random_table(0, 3, 2)
    with pytest.raises(UserError, match="3 deep and 1 wide, but the drafter drafts 2 tokens of a vocabulary of 3"):
        Static([[0], [0, 0], [0, 0, 0]]).grow(0, TableDecoder(table, 2), GREEDY, None)
    with pytest.raises(UserError, match="1 deep and 4 wide"):
        Static([[3]]).grow(0, TableDecoder(table, 2), Sampling(1.0), None)


def test_draws_without_replacement() -> None:
    """Ordered pairs from q = (.5, .3, .2, 0): the second is drawn from the remaining tokens."""
    q = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    draws = 20000
    rows = draw_without_replacement(q.expand(draws, 4), 4, generator)
    counts = torch.zeros(3, 3, dtype=torch.float64)
    for first, second, third, none in rows:
        assert (none, first + second + third) == (-1, 3)
        counts[first, second] += 1
    expected = torch.tensor([[0, 0.3, 0.2], [0.3 * 5 / 7, 0, 0.3 * 2 / 7], [0.2 * 5 / 8, 0.2 * 3 / 8, 0]]) * draws
    possible = expected > 0
    assert counts[~possible].sum() == 0
    # The 0.1 % quantile of chi-square with 5 degrees of freedom is 20.5.
    assert float(((counts - expected)[possible] ** 2 / expected[possible]).sum()) < 20.5
