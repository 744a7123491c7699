"""Trees grown level by level: as good as they can be by brute force, in few calls, and lossless when sampled."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from support.table_decoder import (
    DepthsDecoder,
    Path,
    TableDecoder,
    check_three_tokens,
    draw_rows,
    every_path,
    paths_in,
    random_table,
)
from torch import Tensor

from draftsmith.eval.trees import adaptive, builders
from draftsmith.eval.trees.adaptive import AdaptiveTree, RoundCosts
from draftsmith.eval.trees.builders import (
    BestFirstBuilder,
    BestFirstGrower,
    ChainBuilder,
    ChainGrower,
    StaticBuilder,
    StaticGrower,
    TreeBuilder,
    draw_without_replacement,
    tree_builder,
)
from draftsmith.eval.trees.enumeration import Outcomes
from draftsmith.eval.trees.tree import DraftTree
from draftsmith.eval.trees.verify import Sampling
from draftsmith.models.decoding.decoders import ALL_TOKENS, TokenColumns
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MethodRecipe

GREEDY = Sampling()


def probability_of(path: Path, table: dict[Path, Tensor], temperature: float = 1.0) -> float:
    """Of a whole path, by the chain rule."""
    product = 1.0
    for depth, token in enumerate(path):
        product *= float((table[path[:depth]] / temperature).softmax(-1)[token])
    return product


# ---- best first ----


@pytest.mark.parametrize("seed", range(12))
def test_best_first_is_the_best_tree_where_the_beam_covers_everything(seed: int) -> None:
    depths, vocabulary, nodes = 1 + seed % 4, 2 + seed % 3, 1 + seed % 11
    temperature = [0.0, 0.6, 1.7][seed % 3]
    table = random_table(seed, vocabulary, depths)
    every = every_path(vocabulary, range(1, depths + 1))
    probability = {path: probability_of(path, table, temperature or 1.0) for path in every}
    best = sorted(every, key=probability.__getitem__, reverse=True)[:nodes]

    grower = BestFirstGrower(nodes, branch=vocabulary**depths)
    tree = grower.propose(7, TableDecoder(table, depths), Sampling(temperature), None)
    assert tree.tokens[0] == 7
    assert tree.q is None
    assert len(tree) == 1 + min(nodes, len(every))
    assert sorted(paths_in(tree)) == sorted(best)


def eagle2(table: dict[Path, Tensor], depths: int, nodes: int, branch: int) -> list[Path]:
    """EAGLE-2 as it is written: expand at every depth, rerank once at the end."""
    probability: dict[Path, float] = {(): 1.0}
    frontier: list[Path] = [()]
    for _ in range(depths):
        fresh: list[Path] = []
        for path in frontier:
            q = table[path].softmax(-1)
            for token in q.topk(min(branch, len(q))).indices.tolist():
                fresh.append((*path, token))
                probability[fresh[-1]] = probability[path] * float(q[token])
        frontier = sorted(fresh, key=probability.__getitem__, reverse=True)[:branch]
    del probability[()]
    return sorted(probability, key=probability.__getitem__, reverse=True)[:nodes]


@pytest.mark.parametrize("seed", range(12))
def test_best_first_is_eagle_2_where_the_beam_is_narrow(seed: int) -> None:
    """And it expands no more than that: at most `branch` nodes a depth, none at the last."""
    depths, vocabulary, nodes, branch = 4, 4, 1 + seed % 20, 1 + seed % 4
    table = random_table(seed, vocabulary, depths)
    decoder = TableDecoder(table, depths)
    tree = BestFirstGrower(nodes, branch).propose(0, decoder, GREEDY, None)
    assert sorted(paths_in(tree)) == sorted(eagle2(table, depths, nodes, branch))
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
        return paths_in(BestFirstGrower(nodes, branch).propose(0, decoder, GREEDY, None)), decoder.widths

    assert paths(3, 2) == ([(0,), (1,), (1, 0)], [2])
    assert paths(5, 2) == ([(0,), (1,), (0, 0), (0, 1), (1, 0)], [2])
    # Only the best node of a depth is expanded, with its best child.
    assert paths(3, 1) == ([(0,), (0, 0)], [1])
    # Nothing below the last of two, and nothing below the only one, can stay: no call for them.
    assert paths(2, 2) == ([(0,), (1,)], [1])
    assert paths(1, 2) == ([(0,)], [])


def test_what_would_not_be_verified_is_not_drafted_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has to promise 0.1 / 1.2 = 0.083: of the first three one stays, and below it all do but one of 0.072."""
    monkeypatch.setattr(adaptive, "FIRST_ROUNDS", 0)
    below = torch.tensor([0.5, 0.42, 0.08]).log()
    table = {(): torch.tensor([0.9, 0.05, 0.05]).log()} | {(first,): below for first in range(3)}
    costs = RoundCosts(((1, 1.0), (13, 2.2)), draft=0.1)
    whole, cut = (TableDecoder(table, 2) for _ in range(2))
    assert len(BestFirstGrower(12, 3, beam=12).propose(0, whole, GREEDY, None)) == 13
    tree = BestFirstGrower(12, 3, adaptive=AdaptiveTree(costs), beam=12).propose(0, cut, GREEDY, None)
    assert (whole.widths, cut.widths) == ([3], [1])
    assert paths_in(tree) == [(0,), (0, 0), (0, 1)]


def test_of_equally_likely_nodes_the_parent_stays() -> None:
    """Three first tokens, all alike, and then one that is certain: every node is as likely as its parent."""
    certain = torch.tensor([0.0, -torch.inf, -torch.inf])
    table = dict.fromkeys(every_path(3, range(1, 3)), certain) | {(): torch.zeros(3)}
    for nodes in range(1, 11):
        tree = BestFirstGrower(nodes, branch=3).propose(9, TableDecoder(table, 3), GREEDY, None)
        # What comes first stays, and what has no probability never comes.
        assert tree.depths == (0, 1, 1, 1, 2, 2, 2, 3, 3, 3)[: nodes + 1]
        assert all(path[1:] == (0,) * (len(path) - 1) for path in paths_in(tree))


# ---- chain and static, greedy ----


def test_greedy_chain_follows_the_argmax_of_its_own_path() -> None:
    table = random_table(0, 4, 4)
    decoder = TableDecoder(table, 4)
    path: Path = ()
    for _ in range(4):
        path = (*path, int(table[path].argmax()))
    assert ChainGrower().propose(9, decoder, GREEDY, None).tokens == [9, *path]
    assert decoder.widths == [1, 1, 1]
    assert ChainGrower(max_depth=2).propose(9, decoder, GREEDY, None).tokens == [9, *path[:2]]
    assert decoder.widths == [1]
    assert len(ChainGrower(max_depth=7).propose(9, decoder, GREEDY, None)) == 5
    assert len(BestFirstGrower(99, 2, max_depth=2).propose(9, decoder, GREEDY, None)) == 1 + 2 + 4


RANK_PATHS = [[2], [0], [0, 0], [0, 1], [2, 1], [0, 1, 0], [2, 1, 2], [1], [2, 1, 0], [0, 1, 0, 0]]


def test_static_ranks_are_those_of_the_parent_on_the_path() -> None:
    """Every level in one call, for the nodes with children only."""
    table = random_table(1, 4, 4)
    decoder = TableDecoder(table, 4)
    tree = StaticGrower(RANK_PATHS).propose(9, decoder, GREEDY, None)
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
        StaticGrower([[0], [0, 0], [0, 0, 0]]).propose(0, TableDecoder(table, 2), GREEDY, None)
    with pytest.raises(UserError, match="1 deep and 4 wide"):
        StaticGrower([[3]]).propose(0, TableDecoder(table, 2), Sampling(1.0), None)


def test_what_depends_on_no_path_is_built_and_grown_alike() -> None:
    """With the same logits at every node of a depth, growers and builders make the same greedy trees."""
    by_depth = torch.randn(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    table = {path: by_depth[len(path)] for path in every_path(5, range(3))}
    paths = [[0], [3], [1], [0, 0], [3, 1], [3, 1, 0]]
    pairs: list[tuple[TreeBuilder, TreeBuilder]] = [
        (ChainBuilder(), ChainGrower()),
        (StaticBuilder(paths), StaticGrower(paths)),
        (BestFirstBuilder(12, 5), BestFirstGrower(12, 25)),
    ]
    for builder, grower in pairs:
        built = builder.propose(3, DepthsDecoder(by_depth), GREEDY, None)
        grown = grower.propose(3, TableDecoder(table, 3), GREEDY, None)
        assert sorted(paths_in(grown)) == sorted(paths_in(built))


# ---- sampled: the distribution, by enumeration ----

V = 3
SAMPLED: dict[str, TreeBuilder] = {
    "chain": ChainGrower(),
    "static chain": StaticGrower([[0], [0, 0]]),
    "static": StaticGrower([[0], [1], [0, 0], [1, 0], [1, 1]]),
    "all siblings": StaticGrower([[0], [1], [2], [2, 0], [1, 0]]),
    "gaps in the ranks": StaticGrower([[0], [2], [2, 1]]),
    "best first": BestFirstGrower(nodes=6, branch=2),
    "best first, all that may stay": BestFirstGrower(nodes=7, branch=2, beam=7),
}


def every_tree(grow: Callable[[], DraftTree], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[float, DraftTree]]:
    """Every tree that a grower can draw, with its probability."""
    scripts: list[list[int]] = [[]]
    while scripts:
        chooser = Outcomes(scripts.pop())

        monkeypatch.setattr(builders, "draw", lambda q, _, chooser=chooser: chooser.draw(q))
        monkeypatch.setattr(builders, "draw_without_replacement", partial(draw_rows, chooser))
        tree = grow()
        scripts += chooser.branches
        yield chooser.probability, tree


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.7, top_k=2), Sampling(1.3, top_p=0.6)], ids=["all", "top-k", "top-p"]
)
@pytest.mark.parametrize("grower", SAMPLED.values(), ids=SAMPLED.keys())
@pytest.mark.parametrize(
    "columns", [ALL_TOKENS, TokenColumns(torch.tensor([0, 2]), V), TokenColumns(torch.tensor([1]), V)]
)
def test_sampled_trees_keep_the_distribution(
    grower: TreeBuilder, sampling: Sampling, columns: TokenColumns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p and q depend on the whole path, whatever part of the vocabulary is drafted."""
    p_logits, decoder = random_table(11, V, 3), TableDecoder(random_table(12, V, 2), 2, columns)
    trees = every_tree(lambda: grower.propose(0, decoder, sampling, None), monkeypatch)
    check_three_tokens(trees, p_logits, sampling, V)


def test_q_is_the_distribution_of_a_nodes_own_children() -> None:
    table = random_table(5, 4, 3)
    generator = torch.Generator().manual_seed(0)
    paths = [[0], [1], [2], [0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [1, 0, 0]]
    for grower in (ChainGrower(), StaticGrower(paths)):
        for sampling in (Sampling(0.8), Sampling(1.0, top_k=2)):
            decoder = TableDecoder(table, 3)
            tree = grower.propose(3, decoder, sampling, generator)
            assert tree.q is not None
            assert tree.q.shape == (len(tree), 4)
            for node, path in enumerate([(), *paths_in(tree)]):
                if tree.children(node):
                    torch.testing.assert_close(tree.q[node], sampling.probabilities(table[path]), atol=0, rtol=0)
    # With top-k 2 there is no third sibling and nothing below it: neither [2] nor [0, 2] is drawn or expanded.
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 3, 4, 5)
    assert decoder.widths == [2, 3]


def test_draws_without_replacement() -> None:
    """Ordered pairs from q = (.5, .3, .2, 0): the second is drawn from what the first left."""
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


def test_the_decoder_decides_who_makes_the_tree() -> None:
    for method, builder, grower in [
        (MethodRecipe(name="a"), ChainBuilder, ChainGrower),
        (MethodRecipe(name="b", tree="best_first"), BestFirstBuilder, BestFirstGrower),
        (MethodRecipe(name="c", tree="static", paths=[[0]]), StaticBuilder, StaticGrower),
    ]:
        assert type(tree_builder(method, DepthsDecoder(torch.zeros(2, V)))) is builder
        assert type(tree_builder(method, TableDecoder({}, 2))) is grower
