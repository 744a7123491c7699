"""Adaptive tree sizes by expected gain and cost; corrected confidence of the drafter; equal answers."""

import math
from typing import Any

import pytest
import torch
from support.half_right import HalfRightDecoder, HalfRightStepwiseDecoder, greedy_reference
from support.tiny_models import VOCABULARY, tiny_target

from draftsmith.eval.bench import costs
from draftsmith.eval.bench.measured_methods import Arm
from draftsmith.eval.decoding.generate import AnswerRecord, generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import TreeDrafter, build_tree_drafter, tree_builder
from draftsmith.eval.trees import adaptive as adaptive_module
from draftsmith.eval.trees.adaptive import MEMORY, PRIOR_ACCEPTED, AdaptiveTree, RoundCosts, isotonic_fit
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import MethodConfig

GREEDY = Sampling()
STEADY = RoundCosts(((1, 1.0), (4, 1.3), (7, 1.6)), draft=0.1, level=0.5)
FREE = RoundCosts(((1, 1.0), (64, 1.0)), draft=0.1)


@pytest.fixture(autouse=True)
def from_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive_module, "FIRST_ROUNDS", 0)


def build_tree(probabilities: list[float], parents: tuple[int, ...]) -> DraftTree:
    """Build a tree of tokens 10, 11, ... with each path's probability, without the root's 1."""
    return DraftTree(
        list(range(10, 10 + len(parents))), TreeShape.of(parents), log_confidence=[0.0, *map(math.log, probabilities)]
    )


def test_costs_between_and_beyond_measured_sizes() -> None:
    assert [STEADY.of(nodes) for nodes in (1, 2, 4, 9)] == pytest.approx([1.1, 1.2, 1.4, 1.7])
    assert STEADY.of(4, levels=3) == pytest.approx(2.4)


def test_more_nodes_never_take_less_time() -> None:
    rising = ((1, 1.0), (2, 1.5), (4, 1.5), (8, 2.0))
    assert isotonic_fit(rising) == rising
    dipping = ((1, 1.0), (2, 4.0), (3, 3.0), (4, 2.0), (5, 5.0), (6, 4.0))
    assert isotonic_fit(dipping) == ((1, 1.0), (2, 3.0), (3, 3.0), (4, 3.0), (5, 4.5), (6, 4.5))


def test_size_maximises_tokens_per_second() -> None:
    """At first a second is worth 1 / 1.2 tokens, and a node takes 0.1 s: it needs a probability of 0.083."""
    tree = build_tree([0.9, 0.45, 0.045], (-1, 0, 1, 2))
    assert AdaptiveTree(STEADY).cut(tree).tokens == [10, 11, 12]
    assert AdaptiveTree(FREE).cut(tree) is tree
    assert AdaptiveTree().cut(tree) is tree
    # 0.05 is too little, but confidence is learned from verified tokens only, so one always is.
    assert AdaptiveTree(STEADY).cut(build_tree([0.05, 0.04], (-1, 0, 0))).tokens == [10, 11]


def test_first_trees_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive_module, "FIRST_ROUNDS", 2)
    adaptive = AdaptiveTree(STEADY)
    sizes = []
    for _ in range(3):
        sizes.append(len(adaptive.cut(build_tree([0.9, 0.01], (-1, 0, 1)))))
        assert adaptive.level_pays_off([math.log(0.01)]) == (len(sizes) < 3)
        adaptive.observe([99])
    assert sizes == [3, 3, 2]


def test_most_confident_nodes_stay_with_their_parents() -> None:
    """Level by level, as in growers: below 1 node 3 (0.5), below 2 (0.3) node 4 (0.01)."""
    tree = build_tree([0.6, 0.3, 0.5, 0.01], (-1, 0, 0, 1, 2))
    cut = AdaptiveTree(STEADY).cut(tree)
    assert cut.tokens == [10, 11, 12, 13]
    assert cut.parents == (-1, 0, 0, 1)
    assert cut.log_confidence == pytest.approx([0.0, math.log(0.6), math.log(0.3), math.log(0.5)])


def test_confidence_is_corrected_by_acceptance() -> None:
    adaptive = AdaptiveTree(FREE)
    tree = build_tree([0.6, 0.3, 0.18], (-1, 0, 0, 1))
    adaptive.cut(tree)
    adaptive.observe([11, 13, 99])  # the first child and its child, then the target's own
    assert adaptive.probability(math.log(0.6)) == pytest.approx(0.6 * (PRIOR_ACCEPTED + 1) / (PRIOR_ACCEPTED + 0.6))
    assert adaptive.probability(math.log(0.3)) == pytest.approx(0.3 * PRIOR_ACCEPTED / (PRIOR_ACCEPTED + 0.3))
    assert adaptive.probability(math.log(0.18)) == pytest.approx(0.18 * (PRIOR_ACCEPTED + 1) / (PRIOR_ACCEPTED + 0.18))
    assert adaptive.probability(math.log(0.05)) == pytest.approx(0.05)
    adaptive.observe([1])  # of an uncut round
    before = adaptive.probability(math.log(0.3))
    for _ in range(10):
        adaptive.cut(build_tree([0.9], (-1, 0)))
        adaptive.observe([99])
    decayed = 0.3 * MEMORY**10
    assert (
        before < adaptive.probability(math.log(0.3)) == pytest.approx(0.3 * PRIOR_ACCEPTED / (PRIOR_ACCEPTED + decayed))
    )


def test_level_that_cannot_pay_off_is_not_drafted() -> None:
    """A level costs half a forward, at 1 token per 1.2 s."""
    assert AdaptiveTree(STEADY).level_pays_off([math.log(0.21), math.log(0.21)])
    assert not AdaptiveTree(STEADY).level_pays_off([math.log(0.21), math.log(0.2)])
    assert AdaptiveTree().level_pays_off([-50.0])


def test_rate_counts_all_rounds_with_their_drafted_levels() -> None:
    adaptive = AdaptiveTree(STEADY)
    assert adaptive.rate == pytest.approx(1 / 1.2)
    for drafted in range(1, 4):
        assert adaptive.num_worth_keeping([math.log(0.9), math.log(0.5)][:drafted]) == min(2, drafted)
    adaptive.cut(build_tree([0.9, 0.5], (-1, 0, 1)))
    adaptive.observe([11, 99])
    assert adaptive.rate == pytest.approx((1 + 2) / (1.2 + STEADY.of(3, levels=3)))
    adaptive.cut(build_tree([0.9, 0.5], (-1, 0, 1)))  # of a drafter without levels
    adaptive.observe([98])
    assert adaptive.rate == pytest.approx((1 + 3) / (1.2 + STEADY.of(3, levels=3) + STEADY.of(3)))


def test_new_answer_does_not_count_the_round_that_ended_the_last() -> None:
    """An answer's only round is not observed; the next answer's first token is none of its draft."""
    recipe = MethodConfig(name="x", tree="adaptive", nodes=3, branch=2)
    method = build_tree_drafter(recipe, HalfRightStepwiseDecoder([1] * 60, VOCABULARY), GREEDY)
    assert method.adaptive is not None
    method.adaptive.costs = STEADY
    features = torch.zeros(1, 4)
    for first_token in (5, 6):
        method.start([1], features)
        method.observe([first_token], features)
        assert method.adaptive.rate == 1 / STEADY.of(2)
        assert all(method.adaptive.probability(math.log(p)) == pytest.approx(p) for p in (0.9, 0.4, 0.01))
        method.propose()


def answered(decoder_of: Any, round_costs: RoundCosts | None, lookup_nodes: int = 0) -> tuple[AnswerRecord, list[int]]:
    target = tiny_target().double()
    prompt = [5, 6, 7, 8]
    wanted = greedy_reference(target, prompt, 60)
    recipe = MethodConfig(name="x", tree="adaptive", nodes=12, branch=4)
    adaptive, decoder = AdaptiveTree(round_costs), decoder_of(wanted, VOCABULARY)
    builder = tree_builder(recipe, decoder, adaptive)
    method = TreeDrafter("x", decoder, builder, GREEDY, lookup_nodes=lookup_nodes, adaptive=adaptive)
    with TargetSession(target, 96) as session:
        return generate(session, method, prompt, GREEDY, 60), wanted


@pytest.mark.parametrize("lookup_nodes", [0, 12])
@pytest.mark.parametrize("decoder_of", [HalfRightDecoder, HalfRightStepwiseDecoder])
def test_adaptive_trees_do_not_change_answers(
    monkeypatch: pytest.MonkeyPatch, decoder_of: Any, lookup_nodes: int
) -> None:
    monkeypatch.setattr(adaptive_module, "FIRST_ROUNDS", 8)
    whole, wanted = answered(decoder_of, None, lookup_nodes)
    steep = RoundCosts(((1, 1.0), (32, 4.0)), draft=0.1, level=0.1)
    cut, _ = answered(decoder_of, steep, lookup_nodes)
    assert whole.ids == cut.ids == wanted
    assert sum(cut.draft_lengths) < sum(whole.draft_lengths)
    assert len(set(cut.draft_lengths)) > 2, "sizes follow the confidence"


def test_costs_are_measured_once_per_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "TIMED_FORWARDS", 2)
    target = tiny_target()
    decoders = [HalfRightDecoder([1] * 60, VOCABULARY), HalfRightStepwiseDecoder([1] * 60, VOCABULARY)]
    recipe = MethodConfig(name="x", tree="adaptive")
    methods = [build_tree_drafter(recipe, decoder, GREEDY) for decoder in (*decoders, decoders[0])]
    measured = [Arm(method, GREEDY, None) for method in (Autoregressive(), *methods)]  # type: ignore[arg-type]
    with TargetSession(target, 96) as session:
        costs.measure_round_costs(session, measured, [5, 6, 7])
        known = [method.adaptive.costs for method in methods if method.adaptive]
        costs.measure_round_costs(session, measured, [5, 6, 7])
    assert known[0] is known[2] is methods[0].adaptive.costs  # type: ignore[union-attr]
    parallel, grown = known[:2]
    assert parallel is not None and grown is not None  # noqa: PT018
    assert parallel.verify == grown.verify
    assert [size for size, _ in parallel.verify] == [1, *(size + 1 for size in costs.SIZES)]
    assert parallel.level == 0 < parallel.draft


def test_costs_of_a_decoder_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next decoder may have its id."""
    monkeypatch.setattr(costs, "TIMED_FORWARDS", 1)
    recipe, known = MethodConfig(name="x", tree="adaptive"), list[RoundCosts | None]()
    with TargetSession(tiny_target(), 96) as session:
        measured = costs.MeasuredCosts(session, [5, 6, 7])
        for _ in range(3):
            method = build_tree_drafter(recipe, HalfRightDecoder([1] * 60, VOCABULARY), GREEDY)
            assert method.adaptive is not None
            measured.set_costs(method)
            known.append(method.adaptive.costs)
            del method
    assert len(set(map(id, known))) == 3


@pytest.mark.parametrize("wrong", [{"kind": "ngram"}, {"kind": "draft_model"}])
def test_methods_without_adaptive_trees_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="`tree: adaptive` goes with `kind: drafter` and with no other"):
        MethodConfig(name="x", tree="adaptive", **wrong)
