"""Searches on the device find the host's trees; nodes without probability are run and never accepted."""

import itertools

import pytest
import torch
from support.table_decoder import DepthsDecoder, TableDecoder, paths_in, random_table

from draftsmith.eval.decoding.generate import AnswerRecord
from draftsmith.eval.methods.drafter import BestFirstBuilder, BestFirstGrower
from draftsmith.eval.trees.path_search import MOST_NODES, LevelSearch, PathSearch, candidate_paths
from draftsmith.eval.trees.verify import DeviceTokens, DraftTree, Verification, verify
from draftsmith.models.decoding.decoders import ALL_TOKENS, TokenColumns
from draftsmith.models.sampling import Sampling

GREEDY = Sampling()


def search(nodes: int, branch: int, logits: torch.Tensor, columns: TokenColumns = ALL_TOKENS) -> DraftTree:
    width = min(branch, logits.shape[1])
    return PathSearch.of(nodes, width, len(logits), logits.device).tree(9, logits, columns)


def heap(nodes: int, branch: int, logits: torch.Tensor, columns: TokenColumns = ALL_TOKENS) -> DraftTree:
    return BestFirstBuilder(nodes, branch).propose(9, DepthsDecoder(logits, columns), GREEDY, None)


@pytest.mark.parametrize(("nodes", "width", "depths"), [(1, 2, 3), (5, 9, 3), (9, 2, 4), (12, 3, 1)])
def test_candidates_are_the_paths_with_few_better_ones(nodes: int, width: int, depths: int) -> None:
    every = [path for length in range(1, depths + 1) for path in itertools.product(range(width), repeat=length)]

    def better(path: tuple[int, ...]) -> int:
        ways = (itertools.product(*(range(rank + 1) for rank in path[:length])) for length in range(1, len(path) + 1))
        return sum(1 for _ in itertools.chain(*ways))

    candidates = candidate_paths(nodes, width, depths)
    assert sorted(candidates) == sorted(path for path in every if better(path) <= nodes)
    assert all(path[:-1] in candidates[:number] for number, path in enumerate(candidates) if len(path) > 1)


@pytest.mark.parametrize("seed", range(24))
def test_tree_equals_the_heaps(seed: int) -> None:
    """Tokens, parents and order; depths and ancestors on the device are those of the parents."""
    generator = torch.Generator().manual_seed(seed)
    depths, tokens, branch = 1 + seed % 6, 2 + seed * 5 % 13, 1 + seed % 9
    nodes = MOST_NODES if seed % 8 == 7 else 1 + seed * 7 % 40
    columns = TokenColumns(torch.arange(tokens) * 3 + 1, 50) if seed % 2 else ALL_TOKENS
    logits = torch.randn(depths, tokens, generator=generator) * [0.5, 2.0, 8.0][seed % 3]
    tree, wanted = search(nodes, branch, logits, columns), heap(nodes, branch, logits, columns)
    assert isinstance(tree.tokens, DeviceTokens)
    _, depth_n, ancestors_n = tree.tokens.rows.tolist()
    assert tree.outline.max_depth >= wanted.shape.max_depth
    assert (tree.tokens[:], tree.parents) == (wanted.tokens, wanted.parents)
    assert (tree.depths[1:], tree.shape.ancestor_bits[1:]) == (tuple(depth_n), tuple(ancestors_n))
    assert tree.shape.num_candidates is None


class LevelTable(TableDecoder):
    def expand_level(self, nodes_2w: torch.Tensor) -> torch.Tensor:
        tokens, parents = nodes_2w.tolist()
        return self.expand(tokens, parents)


@pytest.mark.parametrize("seed", range(16))
def test_grown_tree_has_the_paths_of_the_host_s(seed: int) -> None:
    """Every fourth drafter leaves tokens without probability."""
    depths, vocabulary, nodes, branch = 1 + seed % 4, 4, 1 + seed * 5 % 23, 1 + seed % 5
    beam = nodes if seed % 2 else branch
    columns = TokenColumns(torch.tensor([0, 1, 3]), vocabulary) if seed % 3 == 0 else ALL_TOKENS
    table = random_table(seed, vocabulary, depths)
    if seed % 4 == 3:
        table = {path: logits.masked_fill(logits < logits[0], -torch.inf) for path, logits in table.items()}
    decoder = LevelTable(table, depths, columns)
    wanted = BestFirstGrower(nodes, branch, beam=beam).propose(9, decoder, GREEDY, None)
    logits = decoder.begin()
    search = LevelSearch.of(nodes, min(branch, logits.shape[1]), beam, depths, logits.device)
    tree = search.tree(9, logits, decoder)
    assert sum(decoder.widths) == search.rows - 1
    assert tree.outline.max_depth >= wanted.shape.max_depth
    drafted = tree.shape.num_candidates or len(tree)
    assert (drafted < len(tree)) <= (seed % 4 == 3)
    paths = paths_in(tree)[: drafted - 1]
    assert sorted(paths) == sorted(paths_in(wanted))
    assert isinstance(tree.tokens, DeviceTokens)
    _, depth_n, ancestors_n = tree.tokens.rows[:, : drafted - 1].tolist()
    assert (tree.depths[1:drafted], tree.shape.ancestor_bits[1:drafted]) == (tuple(depth_n), tuple(ancestors_n))


@pytest.mark.parametrize("nodes", [1, 4, 12, 30])
def test_of_equally_likely_paths_parents_come_first(nodes: int) -> None:
    """The second token is certain, so its node is as likely as its parent; all others of a depth are equally likely."""
    logits = torch.zeros(3, 4)
    logits[1, 1:] = -torch.inf
    tree, wanted = search(nodes, 4, logits), heap(nodes, 4, logits)
    assert wanted.log_confidence is not None
    drafted = tree.shape.num_candidates or len(tree)
    paths = paths_in(tree)[: drafted - 1]
    assert all(path[1:2] == (0,)[: len(path) - 1] for path in paths)
    log_q = [-sum(1 for depth in range(len(path)) if depth != 1) for path in paths]
    assert [value * torch.tensor(4.0).log().item() for value in log_q] == pytest.approx(wanted.log_confidence[1:])
    assert all(path[:-1] in paths[:number] for number, path in enumerate(paths) if len(path) > 1)


def test_nodes_without_probability_are_never_accepted() -> None:
    """Two tokens at depth 1 and one at depth 2, of eight nodes wanted: 0, 1, 00, 10 are drafted, in this order.

    The target agrees with token 2 everywhere, which is in the tree and counts as not drafted.
    """
    inf = torch.inf
    logits = torch.tensor([[2.0, 1.0, -inf], [3.0, -inf, -inf]])
    tree = search(8, 3, logits)
    assert len(tree) == 9
    target = torch.eye(3)[2].expand(9, 3)
    assert verify(tree, target, GREEDY) == Verification([0], 2)
    assert tree.shape.num_candidates == 5
    assert paths_in(tree)[:4] == [(0,), (0, 0), (1,), (1, 0)]
    assert 2 in tree.tokens
    assert verify(search(8, 3, logits), torch.eye(3)[[1, 0, 0, 0, 2, 0, 0, 0, 0]], GREEDY) == Verification([0, 3, 4], 2)
    record = AnswerRecord()
    record.add_round(search(3, 3, torch.tensor([[2.0, -inf, -inf]] * 2)), Verification([0], 2), 1, ALL_TOKENS)
    assert (record.draft_depths, record.tried) == ([2], 1)
    record.add_round(search(3, 3, torch.tensor([[2.0, -inf, -inf]])), Verification([0, 1], 2), 2, ALL_TOKENS)
    assert (record.draft_depths, record.tried) == ([2, 1], 2)


def test_cut_tree_is_on_the_host() -> None:
    logits = torch.tensor([[2.0, 1.0], [2.5, 1.0], [3.0, 1.0]])
    tree = search(6, 2, logits)
    assert tree.cut_to_depth(3) is tree
    assert tree.cut_to_depth(2).tokens == heap(6, 2, logits).cut_to_depth(2).tokens
    assert tree.cut_to_depth(0).tokens == [9]
