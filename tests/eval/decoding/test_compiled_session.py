"""Compiled decoding: the same greedy tokens, nothing compiled after the warm-up, one sentence where it cannot be."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.half_right import BUILDERS, GREEDY, SIZES, TINY, HalfRightDecoder
from support.tiny_models import tiny_drafter_of, tiny_target
from torch._inductor import config as inductor_config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from draftsmith.eval.bench import measured_methods
from draftsmith.eval.decoding.compiled_session import CompiledSession, DynamicSession, open_session
from draftsmith.eval.decoding.loop import generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import DrafterMethod
from draftsmith.eval.methods.prompt_lookup import PromptLookup
from draftsmith.eval.trees.builders import tree_builder
from draftsmith.eval.trees.tree import DraftTree, TreeShape
from draftsmith.models.base.registry import drafter_kinds
from draftsmith.models.cpu_kernels import has_kernels
from draftsmith.models.decoding.protocols import Compilable
from draftsmith.models.target.grouped_sdpa import use_grouped_sdpa
from draftsmith.models.target.packed_linear import pack_linears
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import MethodRecipe

PROMPTS = [[5, 6, 7, 8], [90, 3]]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def has_compiler() -> bool:
    try:
        return bool(get_cpp_compiler())
    except (InvalidCxxCompiler, RuntimeError):
        return False


def check_session(target: Any, backend: str, drafts: tuple[str, ...], new_tokens: int = 24) -> set[int]:
    """All trees through one session; after a round of warm-up nothing may be compiled. Returns the sizes of graphs."""
    with TargetSession(target, 48) as session:
        wanted = [generate(session, Autoregressive(), prompt, GREEDY, new_tokens).ids for prompt in PROMPTS]

    def methods(answer: list[int]) -> list[Method]:
        lookup = [PromptLookup("pld", num_tokens=4, partial=True)] if "prompt_lookup" in drafts else []
        trees = {name: BUILDERS[name] for name in drafts if name in BUILDERS}
        drafting = [DrafterMethod(n, HalfRightDecoder(answer, 97), b, GREEDY) for n, b in trees.items()]
        return [Autoregressive(), *lookup, *drafting]

    with CompiledSession(target, 48, backend=backend) as session:
        for method in methods(wanted[0]):
            with session.learning():
                generate(session, method, PROMPTS[0], GREEDY, 8)
        for method in methods(wanted[0]):
            generate(session, method, PROMPTS[0], GREEDY, new_tokens)
        torch.compiler.set_stance("fail_on_recompile")
        for prompt, answer in zip(PROMPTS, wanted, strict=True):
            for method in methods(answer):
                out = generate(session, method, prompt, GREEDY, new_tokens)
                assert out.ids == answer, method.name
        return set(session._sizes)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in TINY if n != "llama")])
def test_greedy_identity_without_recompilation(name: str) -> None:
    """Traced, but not translated to machine code, which takes a minute for each."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(TINY[name]).eval()
    sizes = check_session(target, "eager", ("prompt_lookup", "chain", "best_first"))
    assert {1, 5, 13} <= sizes <= {1, 2, 3, 4, 5, 13}  # prompt lookup finds more or less


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler on a CPU; there is none")
def test_greedy_identity_in_machine_code() -> None:
    """Of one tree and two layers: every size and every kind of layer takes its time to translate."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "num_hidden_layers": 2})).eval()
    assert check_session(target, "inductor", ("best_first",)) == {1, 13}


@pytest.mark.slow
def test_features_of_each_method() -> None:
    """Whoever reads fewer layers than another gets its own, in its order, compiled or not."""
    target = tiny_target()
    prompt, tree = [5, 9, 33], PromptLookup("pld", partial=True)
    with TargetSession(target, 40) as plain, CompiledSession(target, 40, backend="eager") as session:
        for _ in range(2):
            for layers in ((-1,), (1, -1), (-1, 0), (2,)):
                plain.read_layers(layers)
                session.read_layers(layers)
                torch.testing.assert_close(session.prefill(prompt).features, plain.prefill(prompt).features)
                tree.start([1, 2, 3, 1, 2], torch.empty(0))
                if 3 not in session._sizes:
                    with session.learning():
                        session.forward_tree(tree.propose())
                mine, theirs = session.forward_tree(tree.propose()), plain.forward_tree(tree.propose())
                torch.testing.assert_close(mine.features, theirs.features, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(mine.logits, theirs.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tree", ["chain", "best_first"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("parallel", {}),
        ("parallel", {"markov_rank": 5}),
        *(pytest.param(kind, {}, marks=pytest.mark.slow) for kind in drafter_kinds() if kind != "parallel"),
    ],
)
def test_compiled_drafters(kind: str, options: dict[str, Any], tree: str) -> None:
    """The same answers and the same accepted lengths as without compilation, and nothing compiled twice."""
    target = tiny_target(num_hidden_layers=4).double()
    drafter = tiny_drafter_of(kind, target, **options).double()
    recipe = MethodRecipe.model_validate({"name": "x", "tree": tree, "nodes": 7, "branch": 3})
    prompts = [[5, 9, 33, 12, 40, 7], [8], [*range(10, 30)]]
    with TargetSession(target, 64, drafter.feature_layers) as session:
        decoder: Any = drafter.decoder(64)
        method = DrafterMethod("x", decoder, tree_builder(recipe, decoder), GREEDY)
        wanted = [generate(session, method, prompt, GREEDY, 24) for prompt in prompts]
        decoder = drafter.decoder(64)

        assert isinstance(decoder, Compilable)
        decoder.compile(backend="eager")
        method = DrafterMethod("x", decoder, tree_builder(recipe, decoder), GREEDY)
        for stance in ("default", "fail_on_recompile"):
            torch.compiler.set_stance(stance)
            outs = [generate(session, method, prompt, GREEDY, 24) for prompt in prompts]
            assert [out.ids for out in outs] == [out.ids for out in wanted]
            assert [out.accept_lengths for out in outs] == [out.accept_lengths for out in wanted]


@pytest.mark.parametrize("kind", ["parallel", "eagle"])
def test_compiled_drafters_write_into_memory_that_stays(kind: str) -> None:
    """CUDA graphs are given up where an input of the graph changes in place, unless its address is known to stay."""
    target = tiny_target()
    drafter = tiny_drafter_of(kind, target)
    changed: list[torch.fx.Node] = []

    def watching(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for node in graph.graph.nodes:
            if node.target == "index_copy_":
                source = node.args[0]
                while source.op != "placeholder":
                    source = source.args[0]
                changed.append(source)
        return graph.forward

    decoder: Any = drafter.decoder(64)
    decoder.compile(backend=watching)
    recipe = MethodRecipe.model_validate({"name": "x", "tree": "chain"})
    with TargetSession(target, 64, drafter.feature_layers) as session:
        generate(session, DrafterMethod("x", decoder, tree_builder(recipe, decoder), GREEDY), [5, 9, 33], GREEDY, 12)
    assert len(changed) >= 2  # keys and values of every layer
    # What torch's own `_get_static_input_indices` looks for.
    assert {node.meta["tensor_dict"].get("_dynamo_static_input_type") for node in changed} == {"unguarded"}


def test_a_tree_larger_than_any_known_runs_without_compilation() -> None:
    target, tree = tiny_target(), PromptLookup("pld", partial=True)
    torch.compiler.set_stance("fail_on_recompile")
    with TargetSession(target, 40) as plain, CompiledSession(target, 40, backend="eager") as session:
        for one in (plain, session):
            one.prefill([5, 9, 33])
        tree.start([1, 2, 3, 1, 2], torch.empty(0))
        wanted = plain.forward_tree(tree.propose()).logits
        torch.testing.assert_close(session.forward_tree(tree.propose()).logits, wanted)
        assert session._sizes == [1]


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in TINY if n != "llama")])
def test_one_graph_for_every_tree_on_a_cpu(name: str) -> None:
    """Chains, trees and single tokens in turns: the same greedy tokens, and one graph for all of them."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(TINY[name]).eval()
    with TargetSession(target, 48) as session:
        wanted = [generate(session, Autoregressive(), prompt, GREEDY, 24).ids for prompt in PROMPTS]
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    with DynamicSession(target, 48, backend=counting) as session:
        for prompt, answer in zip(PROMPTS, wanted, strict=True):
            lookup: list[Method] = [PromptLookup("pld", num_tokens=4, partial=True)]
            trees = [DrafterMethod(n, HalfRightDecoder(answer, 97), b, GREEDY) for n, b in BUILDERS.items()]
            for method in [*trees, Autoregressive(), *lookup]:
                assert generate(session, method, prompt, GREEDY, 24).ids == answer, method.name
    assert len(graphs) == 1


def test_features_on_a_cpu() -> None:
    """Whoever reads fewer layers than another gets its own; layers that nobody asked for before make a new graph."""
    target, tree = tiny_target(), PromptLookup("pld", partial=True)
    tree.start([1, 2, 3, 1, 2], torch.empty(0))
    with TargetSession(target, 40) as plain, DynamicSession(target, 40, backend="eager") as session:
        for layers in ((-1,), (1, -1), (-1, 0)):
            for each in (plain, session):
                each.read_layers(layers)
                each.prefill([5, 9, 33])
            mine, theirs = session.forward_tree(tree.propose()), plain.forward_tree(tree.propose())
            torch.testing.assert_close(mine.features, theirs.features, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(mine.logits, theirs.logits, atol=1e-5, rtol=1e-5)


def test_two_sessions_on_a_cpu_do_not_share_a_graph() -> None:
    """Nothing about a call is looked at, so that the second one would run the first one's target."""
    torch.manual_seed(0)
    targets = [AutoModelForCausalLM.from_config(TINY["llama"]).eval() for _ in range(2)]
    answers = []
    for target in targets:
        with TargetSession(target, 48) as plain, DynamicSession(target, 48, backend="eager") as session:
            wanted = generate(plain, Autoregressive(), PROMPTS[0], GREEDY, 16).ids
            assert generate(session, Autoregressive(), PROMPTS[0], GREEDY, 16).ids == wanted
            answers.append(wanted)
    assert answers[0] != answers[1]


@pytest.mark.slow
@pytest.mark.skipif(not has_kernels(), reason="needs a C++ compiler")
def test_in_bf16_a_token_has_the_same_bits_alone_and_in_a_tree() -> None:
    """In machine code: what makes greedy answers identical in half precision too."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**SIZES, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    )
    target = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False).bfloat16()
    use_grouped_sdpa(target)
    pack_linears(target)
    prompt = [5, 9, 33, 12]
    with DynamicSession(target, 64) as session:
        session.prefill(prompt)
        tree = DraftTree([7, 3, 20, 21, 22, 23, 24, 25], TreeShape.of((-1, 0, 0, 1, 2, 2, 4, 6)))
        in_tree = session.forward_tree(tree)
        session.commit([0, 2, 4, 6])
        after = session.forward_tree(DraftTree([30], TreeShape.chain(0))).logits[0]
        session.prefill(prompt)
        for token, node in ((7, 0), (20, 2), (22, 4), (24, 6)):
            step = session.forward_tree(DraftTree([token], TreeShape.chain(0)))
            assert torch.equal(step.logits[0], in_tree.logits[node])
            assert torch.equal(step.features[0], in_tree.features[node])
            session.commit([0])
        assert torch.equal(session.forward_tree(DraftTree([30], TreeShape.chain(0))).logits[0], after)


def test_a_target_on_a_cpu_that_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By default; a recipe that asks for compilation is told that it is not to be had."""
    target = tiny_target()
    with TargetSession(target, 40) as plain:
        wanted = generate(plain, Autoregressive(), [5, 9, 33], GREEDY, 20).ids
    forward = target.base_model.layers[0].forward
    monkeypatch.setattr(
        target.base_model.layers[0], "forward", lambda *a, **o: (torch._dynamo.graph_break(), forward(*a, **o))[1]
    )
    with open_session(target, 40, compiles=True) as session:
        assert generate(session, Autoregressive(), [5, 9, 33], GREEDY, 20).ids == wanted
    assert "target LlamaForCausalLM cannot be compiled" in caplog.text
    assert "going on without" in caplog.text
    with (
        open_session(target, 40, compiles=True, must=True) as session,
        pytest.raises(UserError, match=r"eval\.compile"),
    ):
        generate(session, Autoregressive(), [5, 9, 33], GREEDY, 20)


def test_a_target_that_breaks_the_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    layer = target.base_model.layers[0]
    forward = layer.forward

    def breaking(*inputs: Any, **options: Any) -> Any:
        torch._dynamo.graph_break()
        return forward(*inputs, **options)

    monkeypatch.setattr(layer, "forward", breaking)
    with (
        CompiledSession(target, 40, backend="eager") as session,
        pytest.raises(UserError, match=r"target LlamaForCausalLM cannot be compiled .*use eval.compile=false"),
    ):
        generate(session, Autoregressive(), [5, 9, 33], GREEDY, 20)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inductor_config.cpp, "cxx", (str(tmp_path / "no-such-compiler"),))
    monkeypatch.setattr(inductor_config, "fx_graph_cache", False)
    target = tiny_target()
    with (
        CompiledSession(target, 40) as session,
        pytest.raises(UserError, match=r"InductorError: InvalidCxxCompiler.*use eval.compile=false"),
    ):
        generate(session, Autoregressive(), [5, 9, 33], GREEDY, 20)


@pytest.mark.parametrize(
    ("asked", "device", "has_one", "expected"),
    [(None, "cuda", True, True), (None, "cpu", True, True), (None, "cpu", False, False), (None, "mps", True, False)]
    + [(asked, device, True, asked) for asked in (True, False) for device in ("cpu", "cuda")],
)
def test_compiles_by_default_where_a_compiler_is(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, device: str, has_one: bool, expected: bool
) -> None:
    monkeypatch.setattr(measured_methods, "target_device", lambda _: torch.device(device))
    monkeypatch.setattr(measured_methods, "can_compile", lambda: has_one)
    recipe = load_recipe("quickstart", [] if asked is None else [f"eval.compile={str(asked).lower()}"])
    assert measured_methods.compiles(recipe) is expected


def test_a_sliding_window_limits_the_session() -> None:
    config = MistralConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, sliding_window=16)
    with pytest.raises(UserError, match="17 tokens do not fit into the target's 16 positions"):
        CompiledSession(AutoModelForCausalLM.from_config(config).eval(), 17)
