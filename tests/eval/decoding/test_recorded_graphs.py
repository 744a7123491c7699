"""Decoding with recorded CUDA graphs, on a ghost device.

A replay runs the recorded function again into the memory of its first results, as CUDA does. Operations within a graph
are not counted, and nothing is compiled.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.ghost_device import NOT_WAITED_FOR, GhostDevice, ghost_device
from support.half_right import tree_method
from support.tiny_models import tiny_drafter_of, tiny_target
from torch import Tensor

from draftsmith.eval.decoding.generate import Round, generate
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.verify import DraftTree, TreeShape, root_only
from draftsmith.models import compiling
from draftsmith.models.base.registry import drafter_kinds
from draftsmith.models.decoding.decoders import Compilable, PathDecoder, StepwiseDecoder
from draftsmith.models.decoding.forward import Compiler
from draftsmith.models.sampling import Sampling

PROMPT = [*range(5, 25)]
FEW_FIRST = [
    kind
    if kind in ("parallel", "medusa", "eagle", "hydra", "dflash")
    else pytest.param(kind, marks=pytest.mark.nightly)
    for kind in drafter_kinds()
]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record graphs on the ghost device; return the names of replayed functions while launches are counted."""
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


def build_on_ghost(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    target = tiny_target(num_hidden_layers=4)
    drafter = tiny_drafter_of(kind, target).to(dtype)
    target.to(dtype).to("cuda:0")
    drafter = drafter.to("cuda:0")
    return target, drafter.attach(target)


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["chain", "best_first"])
@pytest.mark.parametrize("kind", FEW_FIRST)
def test_round_has_few_launches(kind: str, tree: str, replays: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """A draft is one graph, or one per level; answers equal those without graphs; only results are waited for."""
    target, drafter = build_on_ghost(kind)
    with TargetSession(target, 64, drafter.feature_layers) as session:
        plain = generate(session, tree_method(drafter.decoder(64), tree), PROMPT, Sampling(), 12)
    decoder = drafter.decoder(64)
    assert isinstance(decoder, Compilable)
    decoder.compile()
    levels = decoder.num_depths if isinstance(decoder, StepwiseDecoder) else 1
    method, rounds = tree_method(decoder, tree), list[Any]()

    def count(round_: Round) -> None:
        waits = GhostDevice.of("in") - GhostDevice.counts["in", NOT_WAITED_FOR] + GhostDevice.of("back")
        rounds.append((len(replays), waits, GhostDevice.of("launch")))
        GhostDevice.forget()
        replays.clear()
        GhostDevice.counting = True

    with TargetSession(target, 64, drafter.feature_layers, compiler=Compiler()) as session:
        for _ in range(2):
            rounds.clear()
            answer = generate(session, method, PROMPT, Sampling(), 12, on_round=count)
            GhostDevice.counting = False
    assert (answer.ids, answer.accept_lengths) == (plain.ids, plain.accept_lengths)
    assert "running" not in caplog.text
    # A draft is a graph a level, and verification one. A best-first tree is read once for each of its levels.
    for graphs, waits, launches in rounds[1:]:
        if isinstance(decoder, PathDecoder):  # its one forward is a graph; what makes paths of it is not recorded
            assert graphs == 2
            continue
        assert graphs == levels + 1 if tree == "chain" else graphs <= levels + 1
        assert waits == (1 if tree == "chain" else graphs)
        # Of a chain a level's tokens are chosen and copied to the next. Of a best-first tree a level's most likely
        # tokens are six operations, as is a path that is moved in the cache.
        assert launches <= (3 * graphs + 2 if tree == "chain" else 7 * graphs + 6)


@pytest.mark.parametrize(
    "kind", ["parallel", *(pytest.param(k, marks=pytest.mark.slow) for k in ("eagle", "hydra", "dflash", "medusa"))]
)
def test_draft_that_cannot_be_compiled_runs_eagerly(
    kind: str, replays: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It gives equal answers after one warning, and the current tree is completed."""
    target, drafter = build_on_ghost(kind)

    def answer(decoder: Any) -> Any:
        with TargetSession(target, 64, drafter.feature_layers) as session:
            out = generate(session, tree_method(decoder, "best_first"), PROMPT, Sampling(), 12)
        return out.ids, out.accept_lengths

    wanted = answer(drafter.decoder(64))
    for good in (0, 1):  # functions that can be compiled: the first one of drafters that work level by level
        calls = iter(range(good))

        def compile_few(function: Any, *_: Any, calls: Iterator[int] = calls, **__: Any) -> Any:
            if next(calls, None) is None:
                raise RuntimeError("no C compiler")
            return function

        monkeypatch.setattr(compiling, "_compile", compile_few)
        decoder = drafter.decoder(64)
        decoder.compile()
        caplog.clear()
        assert answer(decoder) == wanted
        is_one_function = kind in ("parallel", "dflash", "medusa")
        assert len(caplog.messages) == (0 if good and is_one_function else 1)
        assert all(message.endswith("no C compiler); running without compilation") for message in caplog.messages)


CHAIN = DraftTree([7, 3, 20, 21, 22, 23], TreeShape.chain(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_forwards_in_16_bits_have_one_size(dtype: torch.dtype, replays: list[str]) -> None:
    target = tiny_target().to(dtype).to("cuda:0")
    with TargetSession(target, 100, compiler=Compiler()) as session, torch.inference_mode():
        session.prefill(PROMPT)
        sizes = []
        for tree in (root_only(7), CHAIN, DraftTree([7] * 11, TreeShape.of((-1, *[0] * 10))), root_only(7)):
            assert len(session.forward_tree(tree).logits) == len(tree)
            sizes.append(list(session.forward.sizes))
        session.forward.keep_sizes()
        session.forward_tree(DraftTree([7] * 17, TreeShape.of((-1, *[0] * 16))))
        sizes.append(session.forward.sizes)
    if dtype == torch.float32:
        assert sizes == [[1], [1, 8], [1, 8, 16], [1, 8, 16], [1, 8, 16]]
    else:
        assert sizes == [[8], [8], [16], [16], [16]]


@pytest.mark.parametrize("rows", [6, 64])
def test_step_padded_to_a_tree_is_bitwise_equal(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a chain in bf16 the logits after each accepted token are equal; a padded step writes one token."""
    monkeypatch.setattr(compiling, "_compile", lambda function, *_, **__: function)
    target = tiny_target(num_hidden_layers=3).bfloat16()
    chain = DraftTree([7, *(10 + node % 50 for node in range(rows - 1))], TreeShape.chain(rows - 1))
    compiler = Compiler("eager", same_size=True)
    with (
        TargetSession(target, 128, compiler=compiler) as session,
        TargetSession(target, 128) as plain,
        torch.inference_mode(),
    ):
        for one in (session, plain):
            one.prefill(PROMPT)
        at_once = session.forward_tree(chain).logits
        torch.testing.assert_close(at_once, plain.forward_tree(chain).logits, atol=0.05, rtol=0.05)
        for node, token in enumerate(chain.tokens[:9]):
            step = session.forward_tree(root_only(token))
            assert torch.equal(step.logits[0], at_once[node]), node
            session.commit([0])
            assert session.cache.length == len(PROMPT) + node + 1
        assert session.forward.sizes == [-(-rows // 8) * 8]
