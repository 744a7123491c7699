"""Decoding with recorded CUDA graphs, on a ghost of a GPU: a replay runs the recorded function again, into the memory
of its first results, as CUDA does. What a graph runs is not counted; nothing is compiled.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.ghost_device import NOT_WAITED_FOR, GhostDevice, ghost_device
from support.tiny_models import tiny_drafter_of, tiny_target
from torch import Tensor

from draftsmith.eval.decoding.compiled_forward import Compiler
from draftsmith.eval.decoding.generate import Round, generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.eval.trees.verify import DraftTree, TreeShape, root_only
from draftsmith.models import compiling
from draftsmith.models.base.registry import drafter_kinds
from draftsmith.models.decoding.decoders import Compilable, StepwiseDecoder
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import MethodConfig

PROMPT = [*range(5, 25)]
TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain"},
    "best_first": {"tree": "best_first", "nodes": 9, "branch": 3},
}
FEW_FIRST = [
    kind
    if kind in ("parallel", "medusa", "eagle", "hydra", "dflash")
    else pytest.param(kind, marks=pytest.mark.nightly)
    for kind in drafter_kinds()
]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record graphs as the ghost can; the names of the functions that are replayed, while launches are counted."""
    names: list[str] = []

    def record_graph(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        recorded = uncounted(call)

        def replay() -> None:
            if GhostDevice.counting:
                names.append("graph")
            for held, new in zip(tensors(recorded), tensors(uncounted(call)), strict=True):
                uncounted(lambda held=held, new=new: held.copy_(new))

        return replay, recorded

    monkeypatch.setattr(
        compiling, "_compile", lambda function, backend, **_: lambda *inputs: uncounted(lambda: function(*inputs))
    )
    monkeypatch.setattr(compiling, "record_graph", record_graph)
    with ghost_device():
        yield names


def uncounted(call: Callable[[], Any]) -> Any:
    counting, GhostDevice.counting = GhostDevice.counting, False
    result = call()
    GhostDevice.counting = counting
    return result


def tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def on_ghost(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    target = tiny_target(num_hidden_layers=4)
    drafter = tiny_drafter_of(kind, target).to(dtype)
    target.to(dtype).to("cuda:0")
    drafter = drafter.to("cuda:0")
    return target, drafter.attach(target)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", FEW_FIRST)
def test_a_round_is_few_launches(kind: str, tree: str, replays: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """A draft is one graph, or one a level; the answers are those without graphs; nobody waits but for results."""
    target, drafter = on_ghost(kind)
    recipe = MethodConfig.model_validate({"name": "x", **TREES[tree]})
    with TargetSession(target, 64, drafter.feature_layers) as session:
        plain = generate(session, build_tree_drafter(recipe, drafter.decoder(64), Sampling()), PROMPT, Sampling(), 24)
    decoder = drafter.decoder(64)
    assert isinstance(decoder, Compilable)
    decoder.compile()
    levels = decoder.num_depths if isinstance(decoder, StepwiseDecoder) else 1
    method, rounds = build_tree_drafter(recipe, decoder, Sampling()), list[Any]()

    def count(_: Round) -> None:
        launches, back = GhostDevice.of("launch"), GhostDevice.of("back")
        waits = GhostDevice.of("in") - GhostDevice.counts["in", NOT_WAITED_FOR]
        rounds.append((launches, len(replays), back, waits))
        GhostDevice.forget()
        replays.clear()
        GhostDevice.counting = True

    with TargetSession(target, 64, drafter.feature_layers, compiler=Compiler()) as session:
        for _ in range(2):
            rounds.clear()
            answer = generate(session, method, PROMPT, Sampling(), 24, on_round=count)
            GhostDevice.counting = False
    assert (answer.ids, answer.accept_lengths) == (plain.ids, plain.accept_lengths)
    print(rounds, GhostDevice.lines)
    assert "running" not in caplog.text
