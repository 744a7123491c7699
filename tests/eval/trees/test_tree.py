"""Draft trees: masks, positions and paths by the parents; the best-first tree is optimal."""

import itertools

import pytest
import torch
from support.table_decoder import DepthsDecoder, leaf_paths

from draftsmith.errors import UserError
from draftsmith.eval.methods.drafter import BestFirst, Chain, Static
from draftsmith.eval.trees.verify import DraftTree, TreeShape, Verification, follow
from draftsmith.models.decoding.kv_cache import additive_mask, seen_nodes
from draftsmith.models.sampling import Sampling

GREEDY = Sampling()


def test_tree_by_hand() -> None:
    """Root 7 with children 1 and 2; 3 continues 1.

    0 (7) -- 1 (1) -- 3 (3)
         \\-- 2 (2)
    """
    tree = DraftTree([7, 1, 2, 3], TreeShape.of((-1, 0, 0, 1)))
    assert tree.depths == (0, 1, 1, 2)
    assert tree.children(0) == (1, 2)
    assert leaf_paths(tree) == [[0, 2], [0, 1, 3]]
    assert seen_nodes(tree.parents, 4).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert seen_nodes((-1, -1, 1), 2).int().tolist() == [[0, 1, 0], [0, 1, 1]]  # below the root, which ran before
    cut = tree.cut_to_depth(1)
    assert (cut.tokens, cut.parents) == ([7, 1, 2], (-1, 0, 0))
    assert tree.cut_to_depth(2) is tree
    assert tree.cut_to_depth(0).tokens == [7]


@pytest.mark.parametrize("columns", [1, 7, 8, 61])
def test_rows_of_a_mask_are_aligned(columns: int) -> None:
    """At 8 elements, 16 bytes in half precision, as CUDA's kernels need them."""
    hidden = torch.arange(columns) > torch.arange(5)[:, None]
    mask = additive_mask(hidden, torch.bfloat16)
    assert torch.equal(mask == 0, ~hidden)
    assert (mask.storage_offset(), mask.stride(0) % 8, mask.stride(1)) == (0, 0, 1)


def test_only_candidates_are_accepted() -> None:
    """The target runs all four; only 1 can be accepted, although the target agrees with 2 and 3 too."""
    tree = DraftTree([7, 1, 2, 3], TreeShape.of((-1, 0, 0, 1), num_candidates=2))
    assert leaf_paths(tree) == [[0, 2], [0, 1, 3]]
    assert follow(tree, [1, 3, 0, 0].__getitem__) == Verification([0, 1], 3)
    assert follow(tree, [2, 3, 0, 0].__getitem__) == Verification([0], 2)
    cut = DraftTree([7, 1, 5, 2], TreeShape.of((-1, 0, 1, 0), num_candidates=3)).cut_to_depth(1)
    assert (cut.tokens, cut.parents, cut.children(0)) == ([7, 1, 2], (-1, 0, 0), (1,))


def test_chain() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    assert Chain().draft(9, DepthsDecoder(logits), GREEDY, None).tokens == [9, 1, 0]
    assert Chain(max_depth=1).draft(9, DepthsDecoder(logits), GREEDY, None).tokens == [9, 1]
    sampled = Chain().draft(9, DepthsDecoder(logits), Sampling(1.0), torch.Generator().manual_seed(0))
    assert sampled.q is not None
    torch.testing.assert_close(sampled.q[:2], logits.softmax(-1))


@pytest.mark.parametrize("seed", range(12))
def test_best_first_tree_is_optimal(seed: int) -> None:
    """By brute force over all paths, the tree's paths are the most likely ones."""
    generator = torch.Generator().manual_seed(seed)
    depths, vocabulary, nodes = 1 + seed % 4, 2 + seed % 3, 1 + seed % 9
    logits = torch.randn(depths, vocabulary, generator=generator, dtype=torch.float64) * 2
    q = logits.softmax(-1)
    every = [
        torch.stack([q[depth, token] for depth, token in enumerate(path)]).prod().item()
        for length in range(1, depths + 1)
        for path in itertools.product(range(vocabulary), repeat=length)
    ]
    best = sum(sorted(every, reverse=True)[:nodes])

    tree = BestFirst(nodes, branch=vocabulary).draft(0, DepthsDecoder(logits), GREEDY, None)
    assert len(tree) == 1 + min(nodes, len(every))
    found = 0.0
    for node in range(1, len(tree)):
        path = tree.shape.path_to(node)[1:]
        found += torch.stack([q[depth, tree.tokens[step]] for depth, step in enumerate(path)]).prod().item()
    assert found == pytest.approx(best, rel=1e-5)


def test_best_first_respects_depth_and_branch() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    shallow = BestFirst(nodes=10, branch=2, max_depth=1).draft(0, DepthsDecoder(logits), GREEDY, None)
    assert shallow.tokens == [0, 0, 1]
    assert BestFirst(nodes=1, branch=2).draft(0, DepthsDecoder(logits), Sampling(0.7), None).q is None
    # Tokens outside a reduced draft vocabulary are not drafted, even in a wide tree.
    reduced = torch.tensor([[2.0, 1.0, -torch.inf]] * 2)
    wide = BestFirst(nodes=20, branch=3).draft(0, DepthsDecoder(reduced), GREEDY, None)
    assert sorted(wide.tokens) == [0] * 4 + [1] * 3


def test_static_tree() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 1.0]])
    tree = Static([[0, 1], [1], [0], [0, 0]]).draft(9, DepthsDecoder(logits), GREEDY, None)
    assert tree.tokens == [9, 1, 2, 0, 2]
    assert tree.parents == (-1, 0, 0, 1, 1)


@pytest.mark.parametrize(
    ("paths", "message"),
    [([[0, 0]], r"needs the path \[0\] too"), ([[0], [0]], "unique"), ([[]], "non-empty"), ([[-1]], "ranks >= 0")],
)
def test_invalid_static_paths_are_refused(paths: list[list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Static(paths)


def test_of_sampled_trees_only_chains_leave_their_tokens_on_the_device() -> None:
    drafted, q = torch.tensor([1, 2]), torch.full((3, 4), 0.25)
    cut = DraftTree([9], TreeShape.chain(2), q, drafted=drafted).cut_to_depth(1)
    assert cut.tokens == [9]
    assert cut.read(torch.tensor([5, 6])) == [5, 6]
    assert cut.tokens == [9, 1]
    with pytest.raises(ValueError, match="sampled tree that is no chain"):
        DraftTree([9], TreeShape.of((-1, 0, 0)), q, drafted=drafted)
