"""Lookups in a drafter's tree: what they find, what they are worth, and that the tree is the best of both sources."""

import math
import random

import pytest
import torch
from support.table_decoder import DepthsDecoder
from support.tiny_models import tiny_drafter_of, tiny_target

from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import TreeDrafter, build_tree_drafter, tree_builder
from draftsmith.eval.trees.adaptive import AdaptiveTree
from draftsmith.eval.trees.path_lookup import MAX_NGRAM, PRIOR, PRIOR_OBSERVATIONS, PathLookup, with_lookups
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import MethodConfig

PROMPT = [5, 9, 33, 12, 5, 9, 40, 5, 9]


def find_by_brute_force(ids: list[int], path: list[int]) -> tuple[int, int] | None:
    """The token after the latest occurrence within `ids` of the longest of the last n-grams of both."""
    whole = [*ids, *path]
    for length in range(min(MAX_NGRAM, len(whole)), 0, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == whole[-length:]:
                return ids[end], length
    return None


@pytest.mark.parametrize("seed", range(20))
def test_the_latest_of_the_longest(seed: int) -> None:
    chance = random.Random(seed)
    ids = [chance.randrange(2 + seed % 3) for _ in range(60)]
    lookup = PathLookup()
    lookup.start(ids[:10])
    lookup.observe(ids[10:55])
    for path in ([], ids[55:57], [chance.randrange(9) for _ in range(12)]):
        # The sequence's own end has nothing behind it yet, in `find_by_brute_force` neither.
        assert lookup.find(path) == find_by_brute_force(ids[:55], path)
    lookup.start([3])
    assert lookup.find([]) is None


def test_what_it_is_worth_is_learnt_by_length() -> None:
    lookup = PathLookup()
    lookup.start([1, 2, 3, 1, 2])
    before = [PRIOR[length] * PRIOR_OBSERVATIONS / (PRIOR_OBSERVATIONS + 1) for length in range(2)]
    assert [math.exp(lookup.log_probability(length)) for length in (1, 2)] == pytest.approx(before)
    lookup.observe([3, 7])  # (1, 2) said 3, which is right; (1, 2, 3) said 1, which is wrong
    after = [(0.56 * 8 + 1) / 10, 0.65 * 8 / 10, 0.70 * 8 / 9]
    assert [math.exp(lookup.log_probability(length)) for length in (2, 3, 4)] == pytest.approx(after)
    lookup.start([1])
    assert math.exp(lookup.log_probability(2)) == pytest.approx(before[1])
    for temperature, share in ((0.5, 0.455), (1.0, 0.35), (1.7, 0.35)):
        assert math.exp(PathLookup(temperature).log_probability(2)) == pytest.approx(share * 8 / 9)


def best_by_force(tree: DraftTree, lookup: PathLookup, nodes: int) -> list[float]:
    """Log probabilities of the best paths among all, every edge being worth what the better of its sources says."""
    assert tree.log_confidence is not None
    log_confidence, found = tree.log_confidence, list[float]()

    def visit(path: list[int], at: int | None, total: float) -> None:
        edges = {}
        for child in () if at is None else tree.children(at):
            edges[tree.tokens[child]] = (log_confidence[child] - log_confidence[at or 0], child)
        if (said := lookup.find(path)) is not None:
            edge, child = edges.get(said.token, (-math.inf, None))
            edges[said.token] = (max(edge, lookup.log_probability(said.length)), child)
        for token, (edge, child) in edges.items():
            found.append(total + edge)
            if len(path) + 1 < nodes:
                visit([*path, token], child, total + edge)

    visit([], 0, 0.0)
    return sorted(found, reverse=True)[:nodes]


@pytest.mark.parametrize("seed", range(8))
def test_the_best_paths_of_both(seed: int) -> None:
    chance, nodes = random.Random(seed), 3 + seed % 5
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)) * 2
    recipe = MethodConfig(name="x", tree="best_first", nodes=nodes, branch=3)
    lookup = PathLookup()
    lookup.start([chance.randrange(6) for _ in range(12)])
    decoder = DepthsDecoder(logits)
    tree = tree_builder(recipe, decoder).propose(4, decoder, Sampling(), None)
    both = with_lookups(tree, lookup, nodes)
    assert both.q is None
    assert both.log_confidence is not None
    assert both.log_confidence[1:] == pytest.approx(best_by_force(tree, lookup, nodes))
    paths = [tuple(both.tokens[node] for node in both.shape.path_to(leaf)) for leaf in range(len(both))]
    assert len(set(paths)) == len(both) == nodes + 1


@pytest.mark.parametrize(("kind", "options"), [("parallel", {}), ("eagle", {}), ("parallel", {"draft_vocab_size": 32})])
def test_no_token_changes_and_more_are_accepted(kind: str, options: dict[str, int]) -> None:
    """On a target that starts to repeat itself, with a drafter that knows nothing; in a batch too."""
    target = tiny_target(initializer_range=0.02).double()
    drafter = tiny_drafter_of(kind, target, **options).double()

    def method(lookup: bool) -> TreeDrafter:
        recipe = MethodConfig(name="x", tree="best_first", nodes=6, branch=3, lookup=lookup)
        return build_tree_drafter(recipe, drafter.decoder(96), Sampling())

    with TargetSession(target, 96, drafter.feature_layers) as session:
        wanted = generate(session, Autoregressive(), PROMPT, Sampling(), 60).ids
        plain, both = (generate(session, method(lookup), PROMPT, Sampling(), 60) for lookup in (False, True))
    assert plain.ids == both.ids == wanted
    assert both.rounds < 0.8 * plain.rounds
    assert max(both.draft_lengths) == 6  # deeper than the drafter reaches
    assert both.outside_tokens is None


def test_of_which_trees() -> None:
    for wrong in ({"tree": "chain"}, {"kind": "ngram", "tree": "best_first"}):
        with pytest.raises(ValueError, match="`lookup: true` goes with a drafter's `tree: best_first`"):
            MethodConfig(name="x", lookup=True, **wrong)


def test_sampled_trees_are_neither_continued_nor_cut() -> None:
    """Verification of what q itself has chosen among draws from q would not keep the target's distribution."""
    sampled = DraftTree([1, 2, 3], TreeShape.chain(2), torch.full((3, 5), 0.2), log_confidence=[0.0, -1.0, -2.0])
    with pytest.raises(ValueError, match="not sampled ones"):
        with_lookups(sampled, PathLookup(), 3)
    with pytest.raises(ValueError, match="only deterministic trees"):
        AdaptiveTree().cut(sampled)
