"""All nodes verified at once say what the walk says, in distribution exactly; trees left on a device are the host's."""

from collections import Counter

import pytest
import torch
from support.table_decoder import TableDecoder, random_table
from torch import Tensor

from draftsmith.eval.trees.builders import BestFirstBuilder, ChainBuilder, MarginalBuilder, StaticBuilder
from draftsmith.eval.trees.device_tree import DeviceTree
from draftsmith.eval.trees.enumeration import (
    DETERMINISTIC_TREES,
    MERGED_DRAWS,
    SAMPLED_TREES,
    V,
    can_be_drawn,
    every_decision,
    every_verdict,
    joint_distribution,
    merged_joint_distribution,
    target_and_draft,
    wanted_joint,
)
from draftsmith.eval.trees.growers import ChainGrower, StaticGrower
from draftsmith.eval.trees.path_pool import path_pool
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.eval.trees.tree import DraftTree, TreeShape
from draftsmith.eval.trees.verify_at_once import verify_at_once, walk_decided
from draftsmith.models.decoding.token_columns import ALL_TOKENS, TokenColumns

SAMPLINGS = [Sampling(1.0), Sampling(0.6), Sampling(1.3, top_k=2), Sampling(1.0, top_p=0.7)]
PATHS = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 0, 0], [2, 0, 0], [2, 0, 1]]
CPU = torch.device("cpu")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("parents", SAMPLED_TREES.values(), ids=SAMPLED_TREES.keys())
@pytest.mark.parametrize("seed", [0, 1])
def test_sampled_trees_keep_the_distribution(parents: tuple[int, ...], sampling: Sampling, seed: int) -> None:
    target_of, draft_logits = target_and_draft(seed)
    q_of_depth = [sampling.probabilities(logits) for logits in draft_logits]
    if not can_be_drawn(parents, q_of_depth):
        pytest.skip("the builders never draw more siblings than q has tokens")
    joint = joint_distribution(parents, target_of, q_of_depth, None, sampling, every_decision)
    torch.testing.assert_close(joint, wanted_joint(target_of, sampling), atol=1e-9, rtol=0)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("parents", "tokens"), DETERMINISTIC_TREES)
def test_deterministic_trees_keep_the_distribution(
    parents: tuple[int, ...], tokens: list[int], sampling: Sampling
) -> None:
    target_of, _ = target_and_draft(2)
    joint = joint_distribution(parents, target_of, None, tokens, sampling, every_decision)
    torch.testing.assert_close(joint, wanted_joint(target_of, sampling), atol=1e-9, rtol=0)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("models", MERGED_DRAWS)
def test_merged_trees_keep_the_distribution(models: tuple[int, ...], sampling: Sampling) -> None:
    target_of, draft_logits = target_and_draft(1)
    q_of_model = [sampling.probabilities(logits) for logits in draft_logits]
    joint = merged_joint_distribution(target_of, q_of_model, models, sampling, every_decision)
    torch.testing.assert_close(joint, wanted_joint(target_of, sampling), atol=1e-9, rtol=0)


def drawn_tree(parents: tuple[int, ...], q: Tensor, generator: torch.Generator) -> DraftTree:
    """Siblings drawn from q [V] without replacement."""
    shape = TreeShape.of(parents)
    tokens = [0] * len(shape)
    for children in shape.children:
        if children:
            drawn = torch.multinomial(q, len(children), generator=generator).tolist()
            for child, token in zip(children, drawn, strict=True):
                tokens[child] = token
    return DraftTree(tokens, shape, q.expand(len(shape), V))


def outcomes(tree: DraftTree, logits: Tensor, sampling: Sampling, at_once: bool) -> dict[tuple[int, ...], float]:
    """Path and next token to its probability."""
    every = every_decision if at_once else every_verdict
    found: Counter[tuple[int, ...]] = Counter()
    for probability, verdict in every(tree, logits, sampling):
        found[(*verdict.path, -1, verdict.next_token)] += probability  # type: ignore[assignment]
    return {outcome: probability for outcome, probability in found.items() if probability > 1e-15}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("parents", SAMPLED_TREES.values(), ids=SAMPLED_TREES.keys())
def test_each_path_is_as_likely_as_the_walk_has_it(parents: tuple[int, ...], seed: int) -> None:
    """Of the walk, which asks one node after the other: not only the tokens' distribution is the same."""
    generator = torch.Generator().manual_seed(seed)
    sampling = Sampling(0.8)
    q = torch.randn(V, generator=generator, dtype=torch.float64).softmax(-1)
    logits = torch.randn(len(parents), V, generator=generator, dtype=torch.float64)
    tree = drawn_tree(parents, q, generator)
    for one in (tree, DraftTree(tree.tokens, tree.shape)):
        wanted, found = (outcomes(one, logits, sampling, at_once) for at_once in (False, True))
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("kind", ["sampled", "deterministic", "merged"])
def test_chance_decides_by_these_probabilities(kind: str) -> None:
    """Chi-square of 3,000 verifications over all paths and next tokens."""
    generator = torch.Generator().manual_seed(5)
    sampling = Sampling(1.0)
    q = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    logits = torch.randn(4, V, generator=generator, dtype=torch.float64)
    shape = TreeShape.of((-1, 0, 0, 1))
    tree = DraftTree([0, 1, 3, 2], shape, q.expand(4, V))
    if kind == "deterministic":
        tree = DraftTree(tree.tokens, shape)
    elif kind == "merged":
        other = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
        draws = [[(1, 0), (2, 1), (1, 0)], [(3, 1)], [], []]
        tree = DraftTree(tree.tokens, shape, torch.stack([q, other]), draws=draws)
    wanted = outcomes(tree, logits, sampling, at_once=True)
    counts: Counter[tuple[int, ...]] = Counter()
    times = 3000
    on_device = DeviceTree.of(tree, CPU)
    for _ in range(times):
        decided = verify_at_once(on_device, logits, sampling, generator)
        assert decided.places == decided.verdict.path
        counts[(*decided.verdict.path, -1, decided.verdict.next_token)] += 1
    assert counts.keys() <= wanted.keys()
    statistic = sum((counts[o] - times * p) ** 2 / (times * p) for o, p in wanted.items())
    freedom = len(wanted) - 1
    assert freedom >= 7
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_greedy_follows_the_argmax() -> None:
    tree = DeviceTree.of(DraftTree([7, 1, 2, 3, 0], TreeShape.of((-1, 0, 0, 2, 3))), CPU)
    logits = torch.full((5, V), -1.0)
    for node, token in enumerate([2, 0, 3, 1, 0]):
        logits[node, token] = 1.0
    decided = verify_at_once(tree, logits, Sampling())
    assert (decided.verdict.path, decided.verdict.next_token) == ([0, 2, 3], 1)


def test_what_was_not_drawn_is_no_node() -> None:
    """q has one token where the shape has two children: the second, and what is below it, is not there."""
    shape = TreeShape.of((-1, 0, 0, 1, 2, 3))
    q = torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 4)
    tree = DeviceTree.shaped(torch.tensor([0, 1, -1, 1, 1, 1]), shape, q)
    logits = torch.zeros(6, V)
    logits[:, 1] = 50.0
    decided = verify_at_once(tree, logits, Sampling(1.0), torch.Generator().manual_seed(0))
    assert decided.tree.tokens == [0, 1, 1, 1]
    assert decided.tree.parents == (-1, 0, 1, 2)
    assert (decided.verdict.path, decided.places, decided.nodes) == ([0, 1, 2, 3], [0, 1, 3, 5], [0, 1, 3, 5])


def test_a_tree_of_unknown_shape_is_cut_where_it_is_read() -> None:
    tree = path_pool(5, 2, 3, CPU)
    assert tree is not None
    drafted = tree.best(torch.tensor([9]), torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([[-0.1, -3.0]] * 3), 5)
    read = {"tokens": drafted.tokens.tolist(), "following": [1, 3, 5, 0, 0, 0], "parents": drafted.parents.tolist()}  # type: ignore[union-attr]
    assert walk_decided(drafted, read).tree.shape.max_depth == 3
    decided = walk_decided(drafted.cut_to_depth(1), read)
    assert decided.tree.shape.max_depth == 1
    assert (decided.verdict.path, decided.verdict.next_token) == ([0, 1], 3)


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Each node's tokens from the root to its confidence."""
    assert tree.log_confidence is not None
    return {
        tuple(tree.tokens[step] for step in tree.shape.path_to(node)): tree.log_confidence[node]
        for node in range(len(tree))
    }


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("nodes", "branch", "depths"), [(12, 4, 4), (30, 30, 2), (1, 3, 5), (40, 3, 6), (9, 2, 3)])
def test_the_pool_has_the_best_tree(nodes: int, branch: int, depths: int, seed: int) -> None:
    """The heap's, node for node; and who sees whom follows from its parents."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(depths, 40, generator=generator)
    builder = BestFirstBuilder(nodes, branch)
    wanted = builder.build(9, logits, Sampling(0.7), None)
    drafted = builder.build_on_device(torch.tensor([9]), logits, Sampling(0.7), None)
    assert drafted.parents is not None
    assert drafted.log_confidence is not None
    shape = TreeShape.of(tuple(drafted.parents.tolist()))
    found = DraftTree(drafted.tokens.tolist(), shape, log_confidence=drafted.log_confidence.tolist())
    assert paths_of(found) == pytest.approx(paths_of(wanted), abs=1e-5)
    assert drafted.depths.tolist() == list(shape.depths) == sorted(shape.depths)
    assert torch.equal(drafted.seen, shape.attention_mask)


def test_the_pool_where_tokens_are_certain_or_impossible() -> None:
    """Of paths that are equally likely the parent stays; of a drafter that leaves one token a depth, a chain."""
    logits = torch.full((4, 10), -torch.inf)
    logits[torch.arange(4), torch.tensor([3, 1, 4, 1])] = 0.0
    drafted = BestFirstBuilder(6, 3).build_on_device(torch.tensor([9]), logits, Sampling(), None)
    assert drafted.parents is not None
    read = {"tokens": drafted.tokens.tolist(), "following": [0] * 7, "parents": drafted.parents.tolist()}
    tree = walk_decided(drafted, read).tree
    assert tree.tokens == [9, 3, 1, 4, 1]
    assert tree.shape.is_chain


def test_a_tree_too_large_for_a_pool_is_the_hosts() -> None:
    assert path_pool(255, 16, 16, CPU) is None
    logits = torch.randn(16, 40, generator=torch.Generator().manual_seed(0))
    builder = BestFirstBuilder(255, 16)
    drafted = builder.build_on_device(torch.tensor([9]), logits, Sampling(), None)
    assert drafted.host is not None
    assert paths_of(drafted.host) == paths_of(builder.build(9, logits, Sampling(), None))


@pytest.mark.parametrize("builder", [ChainBuilder(), ChainBuilder(2), StaticBuilder(PATHS)])
@pytest.mark.parametrize("columns", [ALL_TOKENS, TokenColumns(torch.arange(3, 23), 40)])
def test_builders_leave_the_same_tree_on_the_device(builder: MarginalBuilder, columns: TokenColumns) -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    wanted = builder.build(9, logits, Sampling(), None, columns)
    drafted = builder.build_on_device(torch.tensor([9]), logits, Sampling(), None, columns)
    assert drafted.tokens.tolist() == wanted.tokens
    assert drafted.shape == wanted.shape
    assert torch.equal(drafted.seen, wanted.shape.attention_mask)
    sampled = builder.build_on_device(
        torch.tensor([9]), logits, Sampling(0.9), torch.Generator().manual_seed(2), columns
    )
    of_host = builder.build(9, logits, Sampling(0.9), torch.Generator().manual_seed(2), columns)
    assert sampled.q is not None
    assert sampled.families is not None
    assert of_host.q is not None
    for node, row in zip(sampled.families.nodes.tolist(), sampled.families.rows[:, 0].tolist(), strict=True):
        torch.testing.assert_close(sampled.q[row], of_host.q[node])
    tokens = sampled.tokens.tolist()
    for children in wanted.shape.children:
        assert len({tokens[child] for child in children}) == len(children)
        assert all(tokens[child] in columns for child in children)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9)])
@pytest.mark.parametrize("columns", [ALL_TOKENS, TokenColumns(torch.tensor([0, 1, 3, 4]), 5)])
def test_growers_leave_the_same_tree_on_the_device(sampling: Sampling, columns: TokenColumns) -> None:
    """At T = 0 token for token; at T > 0 every node's q is what the decoder says after the path to it."""
    table = random_table(3, vocabulary=5, num_depths=3)
    for grower in (ChainGrower(), StaticGrower(PATHS)):
        decoder, generator = TableDecoder(table, 3, columns), torch.Generator().manual_seed(0)
        drafted = grower.propose_on_device(torch.tensor([2]), decoder, sampling, generator)
        assert drafted.shape is not None
        tree = DraftTree(drafted.tokens.tolist(), drafted.shape)
        if sampling.greedy:
            wanted = grower.propose(2, decoder, sampling, None)
            assert (tree.tokens, tree.shape) == (wanted.tokens, wanted.shape)
            continue
        assert drafted.q is not None
        assert drafted.families is not None
        for node, row in zip(drafted.families.nodes.tolist(), drafted.families.rows[:, 0].tolist(), strict=True):
            logits = table[tuple(tree.tokens[step] for step in tree.shape.path_to(node)[1:])]
            logits = logits if columns.ids is None else logits[columns.ids]
            torch.testing.assert_close(drafted.q[row], columns.widened(sampling.probabilities(logits), 0.0))
        for children in tree.shape.children:
            assert len({tree.tokens[child] for child in children}) == len(children)


def test_a_known_shape_is_cut_before_it_is_run() -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    drafted = StaticBuilder(PATHS).build_on_device(torch.tensor([9]), logits, Sampling(0.9), None)
    for depth in (3, 2, 1, 0):
        cut = drafted.cut_to_depth(depth)
        assert cut.shape is not None
        nodes = [node for node, at in enumerate(TreeShape.of(drafted.shape.parents).depths) if at <= depth]  # type: ignore[union-attr]
        assert cut.tokens.tolist() == drafted.tokens[nodes].tolist()
        inner = [node for node in nodes if cut.shape.children[node]]
        assert (cut.q is None) == (depth == 0)
        if cut.families is not None:
            assert cut.families.nodes.tolist() == inner
            assert len(cut.q) == len(inner)  # type: ignore[arg-type]
