"""Rounds whose tree stays on the device: the answers and figures of the walked ones, and one copy each way.

Copies and waits are counted on a ghost of a GPU (`support.ghost_device`), which cannot show what they cost.
"""

import contextlib
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.ghost_device import GhostDevice, ghost_device
from support.tiny_models import tiny_drafter_of, tiny_target

from draftsmith.eval.decoding.answer import AnswerRecord
from draftsmith.eval.decoding.compiled_session import CompiledSession
from draftsmith.eval.decoding.loop import OpenAnswer, Round, generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.draft_model import DraftModelDecoder
from draftsmith.eval.methods.drafter import DrafterMethod
from draftsmith.eval.methods.lookahead import Lookahead
from draftsmith.eval.methods.ngram import NgramDecoder, NgramModel
from draftsmith.eval.methods.prompt_lookup import PromptLookup
from draftsmith.eval.methods.specinfer import SpecInfer
from draftsmith.eval.trees.builders import tree_builder
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.models.base.registry import drafter_kinds
from draftsmith.models.decoding.protocols import StepwiseDecoder
from draftsmith.recipes.schema import MethodRecipe

GREEDY = Sampling()
PROMPT = [5, 9, 33, 12, 40, 7]
TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain"},
    "static": {"tree": "static", "paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
    "best_first": {"tree": "best_first", "nodes": 9, "branch": 3},
}
FEW = ("parallel", "hydra")  # one that drafts all depths at once, one level by level; the others are slow ones
FEW_FIRST = [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in drafter_kinds()]
REDUCED = {"draft_vocab_size": 40}
LAYERS = {"eagle3": 4, "peagle": 4}  # of targets that they can read
NEW_TOKENS = 12  # on the ghost, which is slow


def drafter_method(
    kind: str,
    tree: str,
    target: Any,
    sampling: Sampling = GREEDY,
    device: str = "cpu",
    compiles: bool = False,
    lookup: bool = False,
    generator: torch.Generator | None = None,
    **options: Any,
) -> tuple[DrafterMethod, tuple[int, ...]]:
    """A drafter's method on this device, which draws from `generator`, and the features that it reads."""
    # Made on the CPU with a target of its own, and told of the one that it drafts for.
    drafter = tiny_drafter_of(kind, target, **(REDUCED if kind in ("eagle3", "peagle") else {}), **options)
    if device != "cpu":
        target.to(device)
        drafter = drafter.to(device)
        drafter.attach(target)
        drafter.freeze()
    decoder: Any = drafter.decoder(64)
    if compiles:
        decoder.compile(backend="eager")
    recipe = MethodRecipe.model_validate({"name": "x", **TREES[tree]})
    draws = generator or torch.Generator().manual_seed(1)
    lookup_nodes = recipe.nodes if lookup else 0
    method = DrafterMethod(
        "x", decoder, tree_builder(recipe, decoder), sampling, None if sampling.greedy else draws, lookup_nodes
    )
    return method, drafter.feature_layers


def figures(answer: AnswerRecord) -> tuple[Any, ...]:
    return (
        answer.ids, answer.accept_lengths, answer.draft_lengths, answer.draft_depths, answer.tried,
        answer.outside_tokens, answer.ended_outside,
    )  # fmt: skip


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", FEW_FIRST)
def test_greedy_answers_and_figures_are_those_of_the_walk(kind: str, tree: str) -> None:
    target = tiny_target(num_hidden_layers=4).double()
    drafter, layers = drafter_method(kind, tree, target)
    with TargetSession(target, 64, layers) as session:
        for prompt, end_ids in (([*PROMPT], ()), ([8], {11, 30})):
            walked, at_once = (
                generate(session, drafter, prompt, GREEDY, 27, end_ids, at_once=way) for way in (False, True)
            )
            assert figures(at_once) == figures(walked)
    assert walked.rounds > 0


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_of_methods_whose_trees_the_host_makes(compiles: bool) -> None:
    """Prompt lookup, Lookahead, n-grams, a draft model and SpecInfer, in a compiled session too."""
    torch._dynamo.reset()
    target = tiny_target().double()
    model = NgramModel([(np.array([*PROMPT, 3, 4, 5] * 3), np.ones(27))], 3, target.config.vocab_size)
    draft = tiny_target(num_hidden_layers=1).double()

    def drafting(decoder: StepwiseDecoder, tree: str) -> DrafterMethod:
        recipe = MethodRecipe.model_validate({"name": tree, **TREES[tree]})
        return DrafterMethod(tree, decoder, tree_builder(recipe, decoder), GREEDY)

    def draft_model() -> DraftModelDecoder:
        return DraftModelDecoder(draft, 4, 64, target.config.vocab_size)

    methods: list[Method] = [
        Autoregressive(),
        PromptLookup("lookup", num_tokens=4, partial=True),
        Lookahead("lookahead"),
        Lookahead("accepting", accept_window=True),
        drafting(NgramDecoder(model, 4, target.device), "best_first"),
        *(drafting(draft_model(), tree) for tree in TREES),
        SpecInfer("specinfer", [draft_model(), draft_model()], [2, 1], 1, GREEDY),
    ]
    session = CompiledSession(target, 64, backend="eager") if compiles else TargetSession(target, 64)
    with session:
        for method in methods:
            if isinstance(session, CompiledSession):
                with session.learning():
                    generate(session, method, PROMPT, GREEDY, 27, at_once=True)
            walked, at_once = (generate(session, method, PROMPT, GREEDY, 27, at_once=way) for way in (False, True))
            assert figures(at_once) == figures(walked), method.name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parallel", "eagle", "hydra"])
def test_compiled_from_end_to_end(kind: str) -> None:
    torch._dynamo.reset()
    target = tiny_target(num_hidden_layers=4).double()
    plain, layers = drafter_method(kind, "best_first", target)
    method, _ = drafter_method(kind, "best_first", target, compiles=True)
    with TargetSession(target, 64, layers) as session:
        wanted = generate(session, plain, PROMPT, GREEDY, 27)
    with CompiledSession(target, 64, layers, backend="eager") as padded:
        with padded.learning():
            generate(padded, method, PROMPT, GREEDY, 27, at_once=True)
        for stance in ("default", "fail_on_recompile"):
            torch.compiler.set_stance(stance)
            assert figures(generate(padded, method, PROMPT, GREEDY, 27, at_once=True)) == figures(wanted)
    torch.compiler.set_stance("default")


@pytest.mark.parametrize("tree", TREES)
def test_rounds_are_handed_over_as_the_walk_does(tree: str) -> None:
    target = tiny_target(num_hidden_layers=4).double()
    method, layers = drafter_method("parallel", tree, target)
    of_ways: list[list[Round]] = [[], []]
    with TargetSession(target, 64, layers) as session:
        for way, rounds in enumerate(of_ways):
            generate(session, method, PROMPT, GREEDY, 27, on_round=rounds.append, at_once=bool(way))
    assert len(of_ways[0]) == len(of_ways[1]) > 1
    for walked, at_once in zip(*of_ways, strict=True):
        logits = []
        for round_ in (walked, at_once):
            paths = [
                tuple(round_.tree.tokens[n] for n in round_.tree.shape.path_to(i)) for i in range(len(round_.tree))
            ]
            order = sorted(range(len(paths)), key=paths.__getitem__)
            logits.append((sorted(paths), round_.logits[order]))
            if tree == "best_first":
                assert round_.tree.log_confidence is not None
                assert len(round_.tree.log_confidence) == len(paths)
        assert logits[0][0] == logits[1][0]
        torch.testing.assert_close(logits[0][1], logits[1][1], atol=1e-9, rtol=1e-9)
        assert (walked.kept, walked.verdict.next_token) == (at_once.kept, at_once.verdict.next_token)


def counted(
    method: Method, layers: tuple[int, ...], target: Any, temperature: float, generator: torch.Generator
) -> tuple[float, float]:
    """Copies from and to the ghost in a round, what is made once and for all being there from the answer before.

    Both answers are the same, as all chance comes from `generator`, the method's too: another one may need shapes that
    the first had not.
    """
    propose = OpenAnswer.propose_on_device

    def counting(answer: OpenAnswer, device: torch.device) -> Any:
        GhostDevice.counting = True  # from the first round on
        return propose(answer, device)

    answers: list[AnswerRecord] = []
    with TargetSession(target, 64, layers) as session, mock.patch.object(OpenAnswer, "propose_on_device", counting):
        for _ in range(2):
            GhostDevice.counting = False
            GhostDevice.forget()
            generator.manual_seed(2)
            answers.append(generate(session, method, PROMPT, Sampling(temperature), NEW_TOKENS, (), generator))
        GhostDevice.counting = False
    before, answer = answers
    assert figures(answer) == figures(before)
    assert answer.rounds >= 3
    # The one wait besides is the answer's, for its own time.
    assert GhostDevice.counts.pop(("back", "synchronize")) == 1
    return GhostDevice.of("back") / answer.rounds, GhostDevice.of("in") / answer.rounds


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", FEW_FIRST)
def test_one_copy_each_way_a_round(kind: str, tree: str, temperature: float) -> None:
    """Or one for each level that is drafted with the host's help: only the dynamic trees of stepwise drafters are."""
    with ghost_device():
        target = tiny_target(num_hidden_layers=LAYERS.get(kind, 2))
        sampling, generator = Sampling(temperature), torch.Generator()
        method, layers = drafter_method(kind, tree, target, sampling, device="cuda:0", generator=generator)
        back, sent = counted(method, layers, target, temperature, generator)
    if tree == "best_first" and isinstance(method.decoder, StepwiseDecoder):
        # The levels, and the verification; every level but the first is sent, then the tree and what is committed.
        assert 1 < back <= method.decoder.num_depths + 1
        assert 1 < sent <= method.decoder.num_depths + 1
    else:
        assert (back, sent) == (1, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", TREES)
def test_a_markov_head_is_as_other_stepwise_drafters(tree: str, temperature: float) -> None:
    """One copy each way but for best-first trees, whose levels the host chooses among; and the walk's answers."""
    sampling, target = Sampling(temperature), tiny_target()
    answers = []
    for at_once in (True, False):
        method, layers = drafter_method("parallel", tree, target, sampling, markov_rank=5)
        with TargetSession(target, 64, layers) as session:
            generator = torch.Generator().manual_seed(2)
            walking = mock.patch.object(DrafterMethod, "propose_on_device", DrafterMethod.propose)
            with contextlib.nullcontext() if at_once else walking:
                answers.append(generate(session, method, PROMPT, sampling, 24, (), generator).ids)
    if temperature == 0:  # sampled answers depend on the order of draws
        assert answers[0] == answers[1]
    with ghost_device():
        target, generator = tiny_target(), torch.Generator()
        options = {"device": "cuda:0", "generator": generator, "markov_rank": 5}
        method, layers = drafter_method("parallel", tree, target, sampling, **options)
        back, sent = counted(method, layers, target, temperature, generator)
    if tree == "best_first":
        assert 1 < back <= 5 + 1
        assert 1 < sent <= 5 + 1
    else:
        assert (back, sent) == (1, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lookups_cost_one_more_each_way(temperature: float) -> None:
    """The host makes the tree, of what the drafter found most likely."""
    with ghost_device():
        target, generator = tiny_target(), torch.Generator()
        options = {"device": "cuda:0", "generator": generator, "lookup": True}
        method, layers = drafter_method("parallel", "best_first", target, Sampling(temperature), **options)
        assert counted(method, layers, target, temperature, generator) == (2, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_copy_each_way_without_drafts(temperature: float) -> None:
    with ghost_device():
        target, generator = tiny_target().to("cuda:0"), torch.Generator()
        for method in (Autoregressive(), PromptLookup("lookup", num_tokens=4, partial=True)):
            assert counted(method, (-1,), target, temperature, generator) == (1, 1)


def test_the_ghost_sees_what_the_walk_costs() -> None:
    """A counter that counted nothing would pass all of the above: the walk waits three times and more."""
    with ghost_device():
        target = tiny_target(num_hidden_layers=4, head_dim=16)
        method, layers = drafter_method("parallel", "best_first", target, device="cuda:0")
        with TargetSession(target, 64, layers) as session:
            GhostDevice.counting = True
            answer = generate(session, method, PROMPT, GREEDY, 27, at_once=False)
        assert GhostDevice.of("back") >= 3 * answer.rounds
        with pytest.raises(RuntimeError, match="same device"):
            target.lm_head.weight @ torch.zeros(32)


def test_lenient_rounds_are_walked() -> None:
    target = tiny_target(num_hidden_layers=4).double()
    method, layers = drafter_method("parallel", "chain", target)
    with TargetSession(target, 64, layers) as session:
        walked, at_once = (
            generate(session, method, PROMPT, GREEDY, 27, lenience=0.3, at_once=way) for way in (False, True)
        )
    assert figures(at_once) == figures(walked)
