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

from draftsmith.eval.bench import arms
from draftsmith.eval.decoding.compiled_session import CompiledSession
from draftsmith.eval.decoding.loop import generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import DrafterMethod
from draftsmith.eval.methods.prompt_lookup import PromptLookup
from draftsmith.eval.trees.builders import tree_builder
from draftsmith.models.base.registry import drafter_kinds
from draftsmith.models.decoding.protocols import Compilable
from draftsmith.models.target import packed_linear
from draftsmith.models.target.packed_linear import PackedLinear, pack_linears
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


def test_packed_layers_are_read_by_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(
        packed_linear, "_packings", lambda layers, _: {layer.weight.shape: PackedLinear.packing for layer in layers}
    )
    pack_linears(target)
    if not isinstance(target.get_output_embeddings(), PackedLinear):
        pytest.skip("no oneDNN here")
    with CompiledSession(target, 40, backend="eager") as session:
        compiled = generate(session, Autoregressive(), [5, 9, 33], GREEDY, 20)
    with TargetSession(target, 40) as plain:
        assert compiled.ids == generate(plain, Autoregressive(), [5, 9, 33], GREEDY, 20).ids


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
    [(None, "cuda", True, True), (None, "cuda", False, False), (None, "cpu", True, False)]
    + [(asked, device, True, asked) for asked in (True, False) for device in ("cpu", "cuda")],
)
def test_compiles_by_default_on_cuda(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, device: str, has_one: bool, expected: bool
) -> None:
    monkeypatch.setattr(arms, "target_device", lambda _: torch.device(device))
    monkeypatch.setattr(arms, "can_compile", lambda: has_one)
    recipe = load_recipe("quickstart", [] if asked is None else [f"eval.compile={str(asked).lower()}"])
    assert arms.compiles(recipe) is expected


def test_a_sliding_window_limits_the_session() -> None:
    config = MistralConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, sliding_window=16)
    with pytest.raises(UserError, match="17 tokens do not fit into the target's 16 positions"):
        CompiledSession(AutoModelForCausalLM.from_config(config).eval(), 17)
