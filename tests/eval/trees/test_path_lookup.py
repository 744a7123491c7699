"""Lookups in a drafter's tree: matches, learned probabilities, and the best tree of both sources."""

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
from draftsmith.eval.trees.path_lookup import MAX_NGRAM, PRIOR, PRIOR_OBSERVATIONS, PathLookup, with_lookups
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import MethodConfig

PROMPT = [5, 9, 33, 12, 5, 9, 40, 5, 9]


def find_by_brute_force(ids: list[int], path: list[int]) -> tuple[int, int] | None:
    """Return the token after the latest occurrence in `ids` of the longest n-gram that ends `ids` and `path`."""
    whole = [*ids, *path]
    for length in range(min(MAX_NGRAM, len(whole)), 0, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == whole[-length:]:
                return ids[end], length
    return None


@pytest.mark.parametrize("seed", range(20))
def test_latest_of_the_longest_match(seed: int) -> None:
    chance = random.Random(seed)
    ids = [chance.randrange(2 + seed % 3) for _ in range(60)]
    lookup = PathLookup()
    lookup.start(ids[:10])
    lookup.observe(ids[10:55])
    for path in ([], ids[55:57], [chance.randrange(9) for _ in range(12)]):
        # The end of the sequence has no next token yet, also in `find_by_brute_force`.
        assert lookup.find(path) == find_by_brute_force(ids[:55], path)
    lookup.start([3])
    assert lookup.find([]) is None


def test_probability_is_learned_by_match_length() -> None:
    lookup = PathLookup()
    lookup.start([1, 2, 3, 1, 2])
    before = [PRIOR[length] * PRIOR_OBSERVATIONS / (PRIOR_OBSERVATIONS + 1) for length in range(2)]
    assert [math.exp(lookup.log_probability(length)) for length in (1, 2)] == pytest.approx(before)
    lookup.observe([3, 7])  # (1, 2) gave 3, which is right; (1, 2, 3) gave 1, which is wrong
    after = [(0.56 * 8 + 1) / 10, 0.65 * 8 / 10, 0.70 * 8 / 9]
    assert [math.exp(lookup.log_probability(length)) for length in (2, 3, 4)] == pytest.approx(after)
    lookup.start([1])
    assert math.exp(lookup.log_probability(2)) == pytest.approx(before[1])
    for temperature, share in ((0.5, 0.455), (1.0, 0.35), (1.7, 0.35)):
        assert math.exp(PathLookup(temperature).log_probability(2)) == pytest.approx(share * 8 / 9)


def best_by_force(tree: DraftTree, lookup: PathLookup, nodes: int) -> list[float]:
    """Return log probabilities of the best paths, where each edge has the higher probability of its sources."""
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
def test_tree_has_the_best_paths_of_both_sources(seed: int) -> None:
    chance, nodes = random.Random(seed), 3 + seed % 5
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)) * 2
    recipe = MethodConfig(name="x", tree="best_first", nodes=nodes, branch=3)
    lookup = PathLookup()
    lookup.start([chance.randrange(6) for _ in range(12)])
    decoder = DepthsDecoder(logits)
    tree = tree_builder(recipe).draft(4, decoder, Sampling(), None)
    both = with_lookups(tree, lookup, nodes)
    assert both.q is None
    assert both.log_confidence is not None
    assert both.log_confidence[1:] == pytest.approx(best_by_force(tree, lookup, nodes))
    paths = [tuple(both.tokens[node] for node in both.shape.path_to(leaf)) for leaf in range(len(both))]
    assert len(set(paths)) == len(both) == nodes + 1


@pytest.mark.parametrize(("kind", "options"), [("parallel", {}), ("eagle", {}), ("parallel", {"draft_vocab_size": 32})])
def test_lookups_accept_more_and_do_not_change_answers(kind: str, options: dict[str, int]) -> None:
    """The target starts to repeat itself and the drafter is untrained; also in a batch."""
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
    assert max(both.draft_lengths) == 6  # deeper than the drafter
    assert both.outside_tokens is None


def test_lookups_need_a_best_first_tree() -> None:
    for wrong in ({"tree": "chain"}, {"kind": "ngram", "tree": "best_first"}):
        with pytest.raises(ValueError, match="`lookup: true` goes with a drafter's `tree: best_first`"):
            MethodConfig(name="x", lookup=True, **wrong)


def test_sampled_trees_are_not_continued() -> None:
    """If q selected among draws from q, verification would not keep the target's distribution."""
    sampled = DraftTree([1, 2, 3], TreeShape.chain(2), torch.full((3, 5), 0.2), log_confidence=[0.0, -1.0, -2.0])
    with pytest.raises(ValueError, match="not a sampled one"):
        with_lookups(sampled, PathLookup(), 3)
