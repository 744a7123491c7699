"""Compiled decoding: equal greedy tokens, no compilation after the warm-up, one sentence if it is impossible.

With the backend `eager` graphs are traced but not compiled to machine code, which takes a minute each.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.half_right import BUILDERS, GREEDY, SIZES, TINY, HalfRightDecoder, tree_method
from support.tiny_models import tiny_drafter_of, tiny_target
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.errors import UserError
from draftsmith.eval.bench import measured_methods
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession, open_session
from draftsmith.eval.methods.drafter import TreeDrafter
from draftsmith.eval.methods.prompt_lookup import PromptLookup
from draftsmith.eval.trees.verify import DraftTree, TreeShape, root_only
from draftsmith.models import compiling
from draftsmith.models.base.registry import drafter_kinds
from draftsmith.models.decoding.decoders import Compilable, StepwiseDecoder
from draftsmith.models.decoding.forward import Compiler
from draftsmith.recipes.loading import load_recipe

pytestmark = pytest.mark.slow
PROMPTS = [[5, 6, 7, 8], [90, 3]]
TREE = DraftTree([7, 3, 20, 21, 22, 23, 24, 25], TreeShape.of((-1, 0, 0, 1, 2, 2, 4, 6)))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def methods(answer: list[int]) -> list[Method]:
    drafting = [TreeDrafter(n, HalfRightDecoder(answer, 97), BUILDERS[n], GREEDY) for n in ("chain", "best_first")]
    return [Autoregressive(), PromptLookup("pld", num_tokens=4, partial=True), *drafting]


def counting_backend() -> tuple[list[torch.fx.GraphModule], Any]:
    """Return a backend of `torch.compile` that runs graphs as they are, and the list of its graphs."""
    graphs: list[torch.fx.GraphModule] = []
    return graphs, lambda graph, _: (graphs.append(graph), graph.forward)[1]


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma2",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in TINY if name not in ("llama", "gemma2")),
    ],
)
def test_greedy_identity_in_few_graphs(name: str) -> None:
    """One graph for each size that trees are padded to, all compiled after one answer of each method."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(TINY[name]).eval()
    with TargetSession(target, 48) as session:
        wanted = [generate(session, Autoregressive(), prompt, GREEDY, 24).ids for prompt in PROMPTS]
    graphs, counting = counting_backend()
    with TargetSession(target, 48, compiler=Compiler(counting)) as session:
        for prompt, answer in zip(PROMPTS, wanted, strict=True):
            for method in methods(answer):
                assert generate(session, method, prompt, GREEDY, 24).ids == answer, method.name
            session.forward.keep_sizes()
            torch.compiler.set_stance("fail_on_recompile")
        sizes = session.forward.sizes
        assert len(graphs) == len(sizes)
        assert {1, 8, 16} <= set(sizes) <= {1, 2, 4, 8, 16}


def test_no_recompilation_over_1000_tokens() -> None:
    """One graph for a token and one for the tree at every length."""
    target = AutoModelForCausalLM.from_config(
        LlamaConfig(**SIZES | {"num_hidden_layers": 1, "max_position_embeddings": 2048})
    ).eval()
    graphs, counting = counting_backend()
    with TargetSession(target, 1100, compiler=Compiler(counting)) as session:
        session.prefill(PROMPTS[0])
        for number in range(1000 // 25 + 1):
            for tree in (root_only(5), DraftTree([*range(24)], TreeShape.chain(23))):
                session.forward_tree(tree)
                session.commit(list(range(len(tree))))
            if number == 0:
                torch.compiler.set_stance("fail_on_recompile")
        assert session.cache.length > 1000
    assert len(graphs) == 2


def test_features_of_each_method() -> None:
    """A method that reads fewer layers gets its own in its order; new layers need a new graph."""
    target, of_layers = tiny_target(), ((-1,), (1, -1), (-1,))
    steps: list[list[Any]] = []
    for compiler in (None, Compiler("eager")):
        steps.append([])
        with TargetSession(target, 40, compiler=compiler) as session:
            for layers in of_layers:
                session.read_layers(layers)
                steps[-1] += [session.prefill([5, 9, 33]), session.forward_tree(TREE)]
    for theirs, mine in zip(*steps, strict=True):
        torch.testing.assert_close(mine.features, theirs.features, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine.logits, theirs.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("same_size", [True, False])
def test_tree_of_the_most_nodes_fits_at_the_end(same_size: bool) -> None:
    target, compiler = tiny_target(), Compiler("eager", same_size=same_size)
    tree = DraftTree([7] * 257, TreeShape.of((-1, *[0] * 256)))
    with TargetSession(target, 40, compiler=compiler) as session:
        session.prefill([5] * 40)
        assert len(session.forward_tree(tree).logits) == 257


def test_tree_larger_than_any_known_runs_without_compilation() -> None:
    target = tiny_target()
    torch.compiler.set_stance("fail_on_recompile")
    compiler = Compiler("eager")
    with TargetSession(target, 40) as plain, TargetSession(target, 40, compiler=compiler) as session:
        session.forward.keep_sizes()
        for one in (plain, session):
            one.prefill([5, 9, 33])
        torch.testing.assert_close(session.forward_tree(TREE).logits, plain.forward_tree(TREE).logits)
        assert session.forward.sizes == [1]


@pytest.mark.parametrize("tree", ["chain", "best_first"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("parallel", {"markov_rank": 5, "sliding_window": 8}),
        *(
            (kind, {"sliding_window": 9} if kind == "eagle" else {})
            if kind in ("medusa", "eagle")
            else pytest.param(kind, {}, marks=pytest.mark.nightly)
            for kind in drafter_kinds()
        ),
        ("hydra", {"prefix_attention": True}),
        ("dflash", {"sliding_window": 8}),
    ],
)
def test_compiled_drafters(kind: str, options: dict[str, Any], tree: str, caplog: pytest.LogCaptureFixture) -> None:
    """Answers and accepted lengths equal those without compilation; nothing is recompiled over 1,000 tokens."""
    target = tiny_target(num_hidden_layers=4).double()
    drafter = tiny_drafter_of(kind, target, **options).double()
    prompts = [[5, 9, 33, 12, 40, 7], [8], [*range(10, 30)]]
    with TargetSession(target, 64, drafter.feature_layers) as session:
        decoder: Any = drafter.decoder(64)
        method = tree_method(decoder, tree)
        wanted = [generate(session, method, prompt, GREEDY, 24) for prompt in prompts]
        decoder, plain = drafter.decoder(1000), drafter.decoder(1000)
        assert isinstance(decoder, Compilable)
        decoder.compile(backend="eager")
        method = tree_method(decoder, tree)
        for stance in ("default", "fail_on_recompile"):
            torch.compiler.set_stance(stance)
            outs = [generate(session, method, prompt, GREEDY, 24) for prompt in prompts]
            assert [out.ids for out in outs] == [out.ids for out in wanted]
            assert [out.accept_lengths for out in outs] == [out.accept_lengths for out in wanted]
    far, near = drafts(drafter, plain, [980]), drafts(drafter, decoder, [*range(1, 8)] * 35)
    for theirs, mine in zip(far, near, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)
    assert "running without" not in caplog.text


@torch.inference_mode()
def drafts(drafter: Any, decoder: Any, rounds: list[int]) -> list[torch.Tensor]:
    """Return the logits of the last draft after a prompt of 20 tokens and rounds that commit `rounds` tokens each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 61, (1000,), generator=generator)
    features = torch.randn(1000, 32 * len(drafter.feature_layers), generator=generator, dtype=torch.float64)
    decoder.start(ids[:20], features[:20])
    begin, logits = 20, []
    for new in rounds:
        end = begin + new
        decoder.observe(ids[begin:end], features[begin - 1 : end - 1])
        begin = end
        if isinstance(decoder, StepwiseDecoder):
            levels = ([3, 4, 5], [0, 0, 0]), ([6, 7], [3, 1])
            logits = [decoder.begin().clone(), *(decoder.expand(*level).clone() for level in levels)]
        else:
            logits = [decoder.draft().clone()]
    return logits


@pytest.mark.parametrize("kind", ["parallel", "eagle", "dflash"])
def test_compiled_forwards_write_into_static_memory(kind: str) -> None:
    """torch's CUDA graphs are disabled if an input changes in place, unless its address is marked static.

    What changes is an input itself: if it were a view made in the graph, inductor would copy all of the input, there
    and back, in every layer.
    """
    target = tiny_target(num_hidden_layers=4)
    drafter = tiny_drafter_of(kind, target)
    changed: list[torch.fx.Node] = []

    def watching(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for node in graph.graph.nodes:
            if node.target == "index_copy_":
                changed.append(node.args[0])
        return graph.forward

    decoder: Any = drafter.decoder(64)
    decoder.compile(backend=watching)
    compiler = Compiler(watching)
    with TargetSession(target, 64, drafter.feature_layers, compiler=compiler) as session:
        generate(session, tree_method(decoder), [5, 9, 33], GREEDY, 12)
    assert len(changed) >= 2 * 4 + 2  # keys and values of every layer
    assert {node.op for node in changed} == {"placeholder"}
    # The attribute read by torch's `_get_static_input_indices`.
    assert {node.meta["tensor_dict"].get("_dynamo_static_input_type") for node in changed} == {"unguarded"}


def test_target_that_cannot_be_compiled_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This is the default; a recipe that requests compilation gets an error."""
    target = tiny_target()
    with TargetSession(target, 40) as plain:
        wanted = generate(plain, Autoregressive(), [5, 9, 33], GREEDY, 20).ids
    forward = target.base_model.layers[0].forward
    monkeypatch.setattr(
        target.base_model.layers[0], "forward", lambda *a, **o: (torch._dynamo.graph_break(), forward(*a, **o))[1]
    )
    with TargetSession(target, 40, compiler=Compiler("eager", must=False)) as session:
        assert generate(session, Autoregressive(), [5, 9, 33], GREEDY, 20).ids == wanted
    assert "target LlamaForCausalLM cannot be compiled" in caplog.text
    assert "running without" in caplog.text
    with (
        TargetSession(target, 40, compiler=Compiler("eager")) as session,
        pytest.raises(UserError, match=r"target LlamaForCausalLM cannot be compiled .*use eval.compile=false"),
    ):
        generate(session, Autoregressive(), [5, 9, 33], GREEDY, 20)


@pytest.mark.parametrize(
    ("requested", "device", "compiler", "expected"),
    [(None, "cuda", "c++", True), (None, "cpu", "c++", True), (None, "cpu", None, False), (None, "mps", "c++", False)]
    + [(requested, device, "c++", requested) for requested in (True, False) for device in ("cpu", "cuda")],
)
def test_compilation_is_the_default_with_a_compiler(
    monkeypatch: pytest.MonkeyPatch, requested: bool | None, device: str, compiler: str | None, expected: bool
) -> None:
    monkeypatch.delenv(compiling.SWITCH, raising=False)
    monkeypatch.setattr(measured_methods, "target_device", lambda _: torch.device(device))
    monkeypatch.setattr(compiling, "cpp_compiler", lambda: compiler)
    recipe = load_recipe("quickstart", [] if requested is None else [f"eval.compile={str(requested).lower()}"])
    assert measured_methods.compiles(recipe) is expected
    with open_session(tiny_target(), 40, requested) as session:
        assert session.forward.compiler is None  # on a CPU
