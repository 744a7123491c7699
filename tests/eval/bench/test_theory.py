"""alpha as E[sum min(p, q)]: by hand and against predicted acceptances; operations by parameter counts."""

from typing import Any

import pytest
import torch
from support.tiny_models import tiny_drafter_of, tiny_target
from torch import Tensor

from draftsmith.eval.bench.theory import (
    LinearOperations,
    OverlapMeter,
    theory_row,
)
from draftsmith.eval.decoding.generate import AnswerRecord, Round, generate
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import TreeDrafter, tree_builder
from draftsmith.eval.methods.lookahead import Lookahead
from draftsmith.eval.trees.verify import DraftTree, TreeShape, Verification
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import MethodConfig

PROMPT = [5, 9, 33, 12]
NONE = torch.empty(0)
# p of the target at nodes 0, 1 and 2 of a tree.
P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.9, 0.0], [0.2, 0.2, 0.6]])


class Fixed:
    """Method that always proposes one tree."""

    name = "fixed"
    sequential = False

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        pass

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        pass

    def propose(self) -> DraftTree:
        return self.tree


def run_rounds(
    tree: DraftTree, path: list[int], sampling: Sampling, kept: int | None = None, rounds: int = 1, p: Tensor = P
) -> OverlapMeter:
    """Meter rounds that accept this path and commit `kept` of its tokens and the target's own; by default all."""
    meter = OverlapMeter(Fixed(tree), sampling)
    meter.start([0], NONE)
    meter.observe([0], NONE)
    for _ in range(rounds):
        meter.on_round(Round(meter.propose(), p.log(), Verification(path, 0), kept or len(path), torch.empty(0)))
    return meter


def test_sampled_chain_by_hand() -> None:
    """.2 + .2 + .2 at the root, .1 below it; the leaf has no draft to verify, and rejected nodes do not count."""
    q = torch.tensor([[0.2, 0.2, 0.6], [1.0, 0.0, 0.0], [9.0, 9.0, 9.0]])
    tree = DraftTree([0, 2, 0], TreeShape.chain(2), q)
    assert run_rounds(tree, [0, 1, 2], Sampling(1.0)).overlap == pytest.approx([0.6, 0.1])
    assert run_rounds(tree, [0, 1], Sampling(1.0)).overlap == pytest.approx([0.6, 0.1])
    assert run_rounds(tree, [0], Sampling(1.0)).overlap == pytest.approx([0.6])
    # Nodes after the end of an answer do not count.
    ended = run_rounds(tree, [0, 1, 2], Sampling(1.0), kept=1, rounds=2)
    assert ended.overlap == pytest.approx([0.6, 0.6])
    assert ended.committed_tokens == 1  # in the second round


def test_deterministic_draft_by_hand() -> None:
    """For a point mass on the first child alpha is its p. At T = 0 it is 1 or 0."""
    tree = DraftTree([0, 1, 2, 1], TreeShape.of((-1, 0, 0, 1)))
    sampled = run_rounds(tree, [0, 1], Sampling(1.0), rounds=2)
    assert sampled.overlap == pytest.approx([0.3, 0.9] * 2)
    # Top-k = 2 leaves .5 and .3 of the root's, so p is .3 / .8.
    assert run_rounds(tree, [0], Sampling(1.0, top_k=2)).overlap == pytest.approx([0.375])
    assert run_rounds(tree, [0], Sampling()).overlap == [0.0]
    assert run_rounds(DraftTree([0, 0, 1], TreeShape.chain(2)), [0, 1], Sampling()).overlap == [1.0, 1.0]
    figures = sampled.figures(target_operations=100)
    assert figures["alpha_overlap"] == pytest.approx(0.6)
    assert (figures["positions"], figures["alpha_drafter"]) == (4, None)
    # The second round verifies 4 nodes for 2 tokens; their drafting was free.
    assert (figures["operations_ratio"], figures["operations_per_token"]) == (0, 4 / 2)
    empty = OverlapMeter(Fixed(tree), Sampling()).figures(100)
    assert (empty["alpha_overlap"], empty["operations_ratio"], empty["operations_per_token"]) == (None, None, None)


def test_several_models_by_hand() -> None:
    """Rows of q are models; only the draw that is verified first counts.

    At the root that is the second model's token (.5 + .3 + .0), below it the first one's (.1 + .2 + .0).
    """
    q = torch.tensor([[0.8, 0.2, 0.0], [0.7, 0.3, 0.0]])
    draws = [[(1, 1), (2, 0)], [(3, 0), (3, 1)], [], []]
    tree = DraftTree([0, 1, 0, 1], TreeShape.of((-1, 0, 0, 1)), q, draws=draws)
    p = torch.cat([P, P[2:]])
    assert run_rounds(tree, [0, 1, 3], Sampling(1.0), p=p).overlap == pytest.approx([0.8, 0.3])
    assert run_rounds(tree, [0, 2], Sampling(1.0), p=p).overlap == pytest.approx([0.8])


def build_method(kind: str, tree: dict[str, Any], temperature: float) -> tuple[Any, TreeDrafter, Any, torch.Generator]:
    target = tiny_target()
    drafter = tiny_drafter_of(kind, target)
    sampling, generator = Sampling(temperature), torch.Generator().manual_seed(2)
    decoder = drafter.decoder(128)
    builder = tree_builder(MethodConfig(name="x", **tree), decoder)
    return target, TreeDrafter("x", decoder, builder, sampling, generator), drafter, generator


TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain"},
    "best first": {"tree": "best_first", "nodes": 5},
    "static": {"tree": "static", "paths": [[0], [1], [0, 0], [1, 0]]},
}


@pytest.mark.parametrize(
    ("kind", "shape", "temperature"),
    [
        ("parallel", "chain", 0.0),
        ("parallel", "best first", 1.5),
        ("parallel", "static", 0.0),
        ("hydra", "chain", 1.5),
        ("eagle", "best first", 0.0),
        ("eagle", "static", 1.5),
    ],
)
def test_meter_does_not_change_answers(kind: str, shape: str, temperature: float) -> None:
    """Answers are equal with the meter; if children are drawn from q, q is the drafter's distribution."""
    tree = TREES[shape]
    target, method, drafter, generator = build_method(kind, tree, temperature)
    sampling = Sampling(temperature)
    meter = OverlapMeter(method, sampling)
    answers = []
    with TargetSession(target, 128, drafter.feature_layers) as session:
        for drafts in (method, meter):
            generator.manual_seed(5)
            watch = meter.on_round if drafts is meter else None
            answers.append(generate(session, drafts, PROMPT, sampling, 16, (), generator, on_round=watch))
    assert answers[0].ids == answers[1].ids
    assert sum(answers[1].accept_lengths[1:]) == meter.committed_tokens
    assert len(meter.overlap) == answers[1].tried == len(meter.drafter)
    assert meter.operations.total > 0
    if temperature == 0 or tree["tree"] != "best_first":
        assert meter.drafter == pytest.approx(meter.overlap, abs=1e-6)
    if temperature == 0 and tree["tree"] == "chain":
        assert sum(meter.overlap) == sum(answers[1].draft_lengths)


def test_metered_method_still_reads_logits() -> None:
    target = tiny_target()
    with TargetSession(target, 128) as session:
        plain = generate(session, Lookahead("x"), PROMPT, Sampling(), 40)
        meter = OverlapMeter(Lookahead("x"), Sampling())
        metered = generate(session, meter, PROMPT, Sampling(), 40, on_round=meter.on_round)
    assert metered.accept_lengths == plain.accept_lengths
    assert metered.ids == plain.ids


def test_operations_are_two_per_parameter_and_row() -> None:
    """Target: 2 layers of 32 x (32 + 16 + 16 + 32) and 3 x 32 x 48, LM head 61 x 32; without attention scores."""
    target = tiny_target()
    target_step = LinearOperations()
    with TargetSession(target, 64) as session:
        session.prefill(PROMPT)
        with torch.inference_mode(), target_step.counted():
            session.forward_tree(DraftTree([7], TreeShape.chain(0)))
        of_one = target_step.total
        assert of_one == 2 * (2 * (32 * 96 + 3 * 32 * 48) + 61 * 32)
        with torch.inference_mode(), target_step.counted():
            session.forward_tree(DraftTree([7, 8, 9], TreeShape.of((-1, 0, 0))))
    assert target_step.total == of_one + 3 * of_one


def answer(draft_lengths: list[int], depths: list[int], tried: int) -> AnswerRecord:
    return AnswerRecord(draft_lengths=draft_lengths, draft_depths=depths, tried=tried)


def test_theory_by_hand() -> None:
    """3 of 5 verified tokens accepted at depths 2, 2, 1: alpha .6, tau (1.96 + 1.96 + 1.6) / 3, c = .5 per round."""
    answers = [answer([2, 0, 1], [2, 2, 1], 4), answer([0], [2], 1)]
    untimed = {"alpha_overlap": 0.61, "alpha_drafter": 0.62, "operations_ratio": 0.1, "operations_per_token": 1.5}
    row = theory_row(answers, True, 0.5, untimed)
    assert (row["gamma"], row["alpha"]) == (2, 0.6)
    tau = (3 * 1.96 + 1.6) / 4
    assert row["tau_predicted_iid"] == pytest.approx(tau)
    assert row["speedup_predicted_iid"] == pytest.approx(tau / 1.5)
    assert row["c"] == pytest.approx(0.5 / (7 / 4))
    assert row["operations_factor"] == pytest.approx((2 * 0.1 + 3) / 1.96)  # theorem 3.11 at gamma 2
    assert (row["alpha_overlap"], row["alpha_drafter"], row["operations_measured"]) == (0.61, 0.62, 1.5)
    # 1, 1.6 / 1.2857, 1.96 / 1.5714, 2.176 / 1.8571: gamma 2 is slightly the best.
    assert row["best_gamma"] == 2
    at_once = theory_row([answer([2, 0, 1], [2, 2, 1], 5)], False, 0.5, None)
    assert at_once["c"] == 0.5
    assert at_once["best_gamma"] == 9  # .6^10 = .006 is the first power below .01
    assert (at_once["alpha_overlap"], at_once["operations_factor"]) == (None, None)
