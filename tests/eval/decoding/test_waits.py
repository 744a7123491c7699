"""Waits of the host for a GPU per round, counted on a ghost device (`support.ghost_device`).

It does not measure the cost of a wait: 10 to 20 us, in rounds of 10 to 30 ms for a target of 8B.
"""

from typing import Any

import pytest
import torch
from support.ghost_device import NOT_WAITED_FOR, GhostDevice, ghost_device
from support.half_right import TREES, tree_method
from support.table_decoder import paths_in
from support.tiny_models import tiny_drafter_of, tiny_target

from draftsmith.eval.decoding.generate import Round, generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.prompt_lookup import PromptLookup
from draftsmith.models.base.registry import drafter_kinds
from draftsmith.models.decoding.decoders import SequenceDecoder, StepwiseDecoder
from draftsmith.models.sampling import Sampling

PROMPT = [5, 9, 33, 12, 40, 7]
# One kind drafts in one forward, one level by level; every other kind is like one of them.
FEW_FIRST = [
    "parallel",
    pytest.param("hydra", marks=pytest.mark.slow),
    *(pytest.param(k, marks=pytest.mark.nightly) for k in drafter_kinds() if k not in ("parallel", "hydra")),
]


def count_waits(method: Method, layers: tuple[int, ...], target: Any, sampling: Sampling) -> tuple[float, float, Any]:
    """Return a round's waits for results of the device and for copies to it, with the prompt, without the end.

    And the answer with its draft trees.
    """
    generator, rounds = torch.Generator(), list[Round]()
    with TargetSession(target, 64, layers) as session:
        generate(session, method, PROMPT, sampling, 12, (), generator.manual_seed(2))  # one-time setup
        prefill = session.prefill

        def counting(prompt_ids: list[int]) -> Any:
            GhostDevice.forget()
            GhostDevice.counting = True
            return prefill(prompt_ids)

        session.prefill = counting  # type: ignore[method-assign]
        answer = generate(
            session, method, PROMPT, sampling, 12, (), generator.manual_seed(2),
            on_round=rounds.append,
        )  # fmt: skip
        GhostDevice.counting = False
    assert answer.rounds >= 3
    back = GhostDevice.of("back") - 2  # the first token, and the end of the answer for timing
    sent = GhostDevice.of("in") - GhostDevice.counts["in", NOT_WAITED_FOR]
    trees = [[round_.tree.tokens[0], *paths_in(round_.tree)] for round_ in rounds]
    return back / answer.rounds, sent / answer.rounds, (answer.ids, trees)


def waits_and_calls(
    kind: str, tree: str, sampling: Sampling, device: str = "cuda:0"
) -> tuple[float, float, Any, SequenceDecoder]:
    """Return what `count_waits` does, and the drafter's decoder."""
    with ghost_device():
        target = tiny_target(num_hidden_layers=4)
        drafter = tiny_drafter_of(kind, target)
        target.to(device)
        drafter = drafter.to(device).attach(target)
        method = tree_method(drafter.decoder(64), tree, sampling, torch.Generator().manual_seed(2))
        return *count_waits(method, drafter.feature_layers, target, sampling), method.decoder


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", FEW_FIRST)
def test_a_greedy_round_waits_once_unless_its_tree_is_made_on_the_host(kind: str, tree: str) -> None:
    """Then for its draft once, or once a level, too; and nobody waits for what is sent to the device.

    Trees and answer are those of a CPU.
    """
    back, sent, (ids, trees), decoder = waits_and_calls(kind, tree, Sampling())
    levels = decoder.num_depths if isinstance(decoder, StepwiseDecoder) else 1
    if tree in ("chain", "static"):
        assert back == 1
    else:
        assert back == 2 if levels == 1 else 2 < back <= levels + 1
    assert sent == 0
    assert (ids, trees) == waits_and_calls(kind, tree, Sampling(), "cpu")[2]


@pytest.mark.parametrize("kind", FEW_FIRST)
def test_a_sampled_chain_waits_once(kind: str) -> None:
    assert waits_and_calls(kind, "chain", Sampling(1.0, top_p=0.9))[:2] == (1, 0)


def test_a_sampled_tree_waits_for_every_draw_that_is_tried() -> None:
    """Between three times, where the first draw is accepted and the last, and six in the mean."""
    back, sent, *_ = waits_and_calls("parallel", "static", Sampling(1.0))
    assert 3 <= back < 6
    assert sent == 0


@pytest.mark.parametrize("tree", ["best_first", "lookup"])
def test_a_deterministic_tree_at_t_1_waits_for_the_draft_and_each_committed_token(tree: str) -> None:
    back, sent, (ids, trees), *_ = waits_and_calls("parallel", tree, Sampling(1.0))
    assert back == pytest.approx(1 + (len(ids) - 1) / len(trees))
    assert sent == 0


def test_round_without_drafts_waits_once() -> None:
    with ghost_device():
        target = tiny_target().to("cuda:0")
        for method in (Autoregressive(), PromptLookup("lookup", num_tokens=4, partial=True)):
            assert count_waits(method, (-1,), target, Sampling())[:2] == (1, 0)
