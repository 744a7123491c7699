"""The tau predicted from a trace equals that of real trees of the same drafter; the chosen tree is stored."""

import json
from pathlib import Path

import pytest
from support.half_right import HalfRightDecoder, greedy_reference
from support.tiny_models import VOCABULARY, tiny_target

from draftsmith.eval.commands.artifacts import resolve_tuned, tree_settings, write_tuned
from draftsmith.eval.commands.tune import (
    Trace,
    candidates,
    describe,
    expected_tau,
    speed_and_gain,
    traced_path,
)
from draftsmith.eval.decoding.generate import Round, generate
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import TreeDrafter, tree_builder
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import MethodConfig


def test_expected_tau_by_hand() -> None:
    trace = [[[0, 2, 9], [3], [], [0, 1]]]
    assert expected_tau(trace, depth=3, nodes=48) == 1 + 6 / 4
    assert expected_tau(trace, depth=2, nodes=48) == 1 + 5 / 4
    assert expected_tau(trace, depth=3, nodes=3) == 1 + 4 / 4
    assert expected_tau(trace, depth=1, nodes=1) == 1 + 2 / 4
    other_tasks: Trace = [
        [[0, 1]] * 6,
        [],
    ]  # six rounds count as much as the four; none without rounds
    assert expected_tau([*trace, *other_tasks], depth=3, nodes=48) == 1 + (6 / 4 + 2) / 2


def test_fastest_tree_is_chosen_by_the_mean_over_tasks() -> None:
    """Twice as fast on one task and equal on the other: 1.5 times; pooled, 25 over 15 tokens/s would be 1.67."""
    first, other = {"qa": [10.0, 1.0], "rag": [20.0, 1.0]}, {"qa": [10.0, 1.0], "rag": [40.0, 1.0]}
    speed, gain = speed_and_gain(other, first)
    assert (speed, gain) == (25.0, 1.5)


def test_best_candidate_depends_on_the_costs() -> None:
    trace, chain_trace, draft_s = [[[5, 7]] * 3 + [[0]]], [[[0], [], [], []]], {1: 1.0, 2: 1.0}
    flat = candidates(trace, chain_trace, [[[]]], [1, 2], ((1, 10.0), (64, 10.0)), draft_s)
    assert describe(flat[0].method) == "best_first of 8 nodes"
    assert flat[0].tau == 1 + 7 / 4
    steep = candidates(trace, chain_trace, [[[]]], [1, 2], ((1, 1.0), (64, 640.0)), draft_s)
    assert describe(steep[0].method) == "chain to depth 1"
    looking = candidates(trace, chain_trace, [[[0, 1, 2, 3, 4, 5], []]], [1, 2], ((1, 10.0), (64, 10.0)), draft_s)
    assert describe(looking[0].method) == "best_first of 6 nodes with lookups"
    assert looking[0].tau == 1 + 6 / 2


@pytest.mark.slow
def test_predicted_tau_equals_measured_tau() -> None:
    """Exact for the traced tree; approximate for a smaller one and a chain, whose rounds start elsewhere."""
    target = tiny_target(max_position_embeddings=512).double()
    prompt, new_tokens = [5, 6, 7], 400
    wanted = greedy_reference(target, prompt, new_tokens)
    greedy = Sampling()

    def run(method: MethodConfig) -> tuple[Trace, float]:
        decoder = HalfRightDecoder(wanted, VOCABULARY)
        drafting = TreeDrafter("x", decoder, tree_builder(method, decoder), greedy)
        rounds: list[Round] = []
        with TargetSession(target, 420) as session:
            out = generate(session, drafting, prompt, greedy, new_tokens, on_round=rounds.append)
        assert out.ids == wanted
        return [[traced_path(round_) for round_ in rounds]], sum(out.accept_lengths) / out.rounds

    def tree(nodes: int) -> MethodConfig:
        return MethodConfig(name="x", tree="best_first", nodes=nodes, branch=6)

    trace, tau = run(tree(30))
    assert expected_tau(trace, depth=4, nodes=30) == pytest.approx(tau, abs=0.03)  # the limit cuts the last round
    assert expected_tau(trace, depth=4, nodes=8) == pytest.approx(run(tree(8))[1], rel=0.12)
    chain_trace, tau = run(MethodConfig(name="x"))
    assert expected_tau(chain_trace, depth=4, nodes=4) == pytest.approx(tau, abs=0.03)
    short = run(MethodConfig(name="x", max_depth=2))[1]
    assert expected_tau(chain_trace, depth=2, nodes=2) == pytest.approx(short, rel=0.12)


def test_tuned_tree_is_saved_with_the_drafter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "draftsmith-parallel"}))
    row = MethodConfig(name="mine", tree="tuned")
    assert resolve_tuned(row, tmp_path).tree == "best_first"  # never tuned
    found = MethodConfig(name="x", tree="best_first", nodes=10, branch=8, max_depth=3, lookup=True)
    write_tuned(tmp_path, found)
    resolved = resolve_tuned(row, tmp_path)
    assert tree_settings(resolved) == tree_settings(found)
    assert resolved.name == "mine"
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "draftsmith-parallel"
    assert resolve_tuned(found, tmp_path) is found
