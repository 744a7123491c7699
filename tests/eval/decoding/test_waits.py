"""Waits of the host for a GPU per round, counted on a ghost device (`support.ghost_device`).

It does not measure the cost of a wait: 10 to 20 us, in rounds of 10 to 30 ms for a target of 8B.
"""

from typing import Any

import pytest
import torch
from support.ghost_device import NOT_WAITED_FOR, GhostDevice, ghost_device
from support.tiny_models import tiny_drafter_of, tiny_target

from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.eval.methods.prompt_lookup import PromptLookup
from draftsmith.models.base.registry import drafter_kinds
from draftsmith.models.decoding.decoders import StepwiseDecoder
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import MethodConfig

PROMPT = [5, 9, 33, 12, 40, 7]
TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain"},
    "static": {"tree": "static", "paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
    "best_first": {"tree": "best_first", "nodes": 9, "branch": 3},
    "adaptive": {"tree": "adaptive", "nodes": 9, "branch": 3, "lookup": True},
}
# One kind drafts in one forward, one level by level; every other kind is like one of them.
FEW_FIRST = [k if k in ("parallel", "hydra") else pytest.param(k, marks=pytest.mark.nightly) for k in drafter_kinds()]


def count_waits(method: Method, layers: tuple[int, ...], target: Any, sampling: Sampling) -> tuple[float, float]:
    """Return a round's waits for results of the device and for copies to it, with the prompt, without the end."""
    generator = torch.Generator()
    with TargetSession(target, 64, layers) as session:
        generate(session, method, PROMPT, sampling, 12, (), generator.manual_seed(2))  # one-time setup
        prefill = session.prefill

        def counting(prompt_ids: list[int]) -> Any:
            GhostDevice.forget()
            GhostDevice.counting = True
            return prefill(prompt_ids)

        session.prefill = counting  # type: ignore[method-assign]
        answer = generate(session, method, PROMPT, sampling, 12, (), generator.manual_seed(2))
        GhostDevice.counting = False
    assert answer.rounds >= 3
    back = GhostDevice.of("back") - 2  # the first token, and the end of the answer for timing
    sent = GhostDevice.of("in") - GhostDevice.counts["in", NOT_WAITED_FOR]
    return back / answer.rounds, sent / answer.rounds


def waits_and_calls(kind: str, tree: str, sampling: Sampling) -> tuple[float, float, int]:
    """Return also how often the drafter is called in a round."""
    with ghost_device():
        target = tiny_target(num_hidden_layers=4)
        drafter = tiny_drafter_of(kind, target)
        target.to("cuda:0")
        drafter = drafter.to("cuda:0")
        drafter.attach(target)
        recipe = MethodConfig.model_validate({"name": "x", **TREES[tree]})
        method = build_tree_drafter(recipe, drafter.decoder(64), sampling, torch.Generator().manual_seed(2))
        levels = method.decoder.num_depths if isinstance(method.decoder, StepwiseDecoder) else 1
        return *count_waits(method, drafter.feature_layers, target, sampling), levels


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", FEW_FIRST)
def test_greedy_round_waits_for_draft_and_verification(kind: str, tree: str) -> None:
    """It waits once per draft, or once per level, and never for copies to the device."""
    back, sent, levels = waits_and_calls(kind, tree, Sampling())
    assert back == 2 if levels == 1 else 2 < back <= levels + 1
    assert sent == 0


@pytest.mark.parametrize("tree", TREES)
def test_sampled_round_waits_for_every_verified_draw(tree: str) -> None:
    """Three times if the first draw is always accepted, below six on average."""
    back, sent, _ = waits_and_calls("parallel", tree, Sampling(1.0))
    assert 3 <= back < 6
    assert sent == 0


def test_round_without_drafts_waits_once() -> None:
    with ghost_device():
        target = tiny_target().to("cuda:0")
        for method in (Autoregressive(), PromptLookup("lookup", num_tokens=4, partial=True)):
            assert count_waits(method, (-1,), target, Sampling()) == (1, 0)


def test_ghost_device_counts_a_wait() -> None:
    """A counter that never counts would pass all tests above."""
    with ghost_device():
        target = tiny_target(num_hidden_layers=4, head_dim=16).to("cuda:0")
        with TargetSession(target, 64) as session:
            step = session.prefill(PROMPT)
            GhostDevice.counting = True
            step.logits.max().item()
        assert GhostDevice.of("back") == 1
        with pytest.raises(RuntimeError, match="same device"):
            target.lm_head.weight @ torch.zeros(32)
