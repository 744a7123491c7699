"""Trees whose topology is on the device run as the same trees of the host, bitwise, and are read once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.half_right import SIZES, TINY
from support.tiny_models import tiny_target
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.eval.decoding.compiled_forward import Compiler
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.verify import DeviceTokens, DraftTree, TreeShape
from draftsmith.models.kernels.cpu_kernels import pack_linears, use_grouped_sdpa

PROMPTS = [[5, 9, 33, 12], [8, 3]]
TREES = [
    DraftTree([7, 3, 20, 21, 22, 23, 24, 25], TreeShape.of((-1, 0, 0, 1, 2, 2, 4, 6))),
    DraftTree([11, 4, 5, 6], TreeShape.of((-1, 0, 1, 1))),
]
LARGE = DraftTree([7, *range(63)], TreeShape.of((-1, *((node - 1) // 2 for node in range(1, 64)))))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def on_device(tree: DraftTree) -> DraftTree:
    """Return the tree with its topology on the device; all that the host knows is a chain as deep, and other nodes."""
    shape, drafted = tree.shape, len(tree) - 1
    rows = [list(row)[1:] for row in (tree.tokens, shape.depths, shape.ancestor_bits)]
    deepest = shape.max_depth
    outline = TreeShape.of((-1, *range(deepest), *[0] * (drafted - deepest)))
    return DraftTree(DeviceTokens(tree.tokens[0], torch.tensor(rows)), outline)


STATIC, ONE_SIZE = Compiler("eager", is_static=True), Compiler("eager", is_static=True, same_size=True)
SLOW = [pytest.param(compiler, marks=pytest.mark.slow) for compiler in (STATIC, ONE_SIZE)]


@pytest.mark.parametrize("compiler", [None, *SLOW])
def test_one_sequence(compiler: Compiler | None) -> None:
    """Padded to the sizes of compiled forwards too, and to that of a larger tree."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(TINY["llama"]).eval()
    steps: list[list[Any]] = []
    for change in (lambda tree: tree, on_device):
        steps.append([])
        with TargetSession(target, 80, compiler=compiler) as session:
            session.prefill(PROMPTS[0])
            for tree, path in ((TREES[0], [0, 2, 4, 6]), (TREES[1], [0, 1, 3]), (LARGE, [0, 2]), (TREES[0], [0])):
                changed = change(tree)
                steps[-1].append(session.forward_tree(changed))
                session.commit(path)
                assert not isinstance(changed.tokens, DeviceTokens) or changed.tokens._on_host is None
            if compiler is ONE_SIZE:
                session.forward_tree(DraftTree([7] * 80, TreeShape.chain(79)))
                steps[-1].append(session.forward_tree(change(LARGE)))
                assert session.compiled is not None
                assert session.compiled.sizes == [80]
    for theirs, ours in zip(*steps, strict=True):
        assert torch.equal(ours.logits, theirs.logits)
        assert torch.equal(ours.features, theirs.features)


@pytest.mark.parametrize("compiler", [None, SLOW[0]])
def test_two_sequences(compiler: Compiler | None) -> None:
    """Both on the device, or one; compiled, four rows of padding follow the last tree's."""
    target, steps = tiny_target(), list[list[Any]]()
    for changes in ([0, 0], [1, 1], [1, 0], [0, 1]):
        steps.append([])
        with TargetSession(target, 64, sequences=2, compiler=compiler) as session:
            for session.current in (0, 1):
                session.prefill(PROMPTS[session.current])
            for _ in range(2):
                trees = [on_device(tree) if change else tree for tree, change in zip(TREES, changes, strict=True)]
                steps[-1] += session.forward_trees(list(enumerate(trees)))
                session.commit([0, 2, 4, 6], 0)
                session.commit([0, 1, 3], 1)
    for ours in steps[1:]:
        for mine, theirs in zip(ours, steps[0], strict=True):
            assert torch.equal(mine.logits, theirs.logits)
            assert torch.equal(mine.features, theirs.features)


def test_beyond_a_sliding_window() -> None:
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(TINY["gemma2"]).eval()
    with TargetSession(target, 100) as session:
        session.prefill([*range(3, 68)])
        assert session._windows.reached(session.cache.length)
        wanted, found = (session.forward_tree(tree) for tree in (TREES[0], on_device(TREES[0])))
    assert torch.equal(found.logits, wanted.logits)


def test_a_cpu_target_in_one_call_reads_the_tree() -> None:
    wide = LlamaConfig(**{**SIZES, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2})
    target = AutoModelForCausalLM.from_config(wide).eval().requires_grad_(False)
    use_grouped_sdpa(target)
    pack_linears(target)
    with TargetSession(target, 40) as session:
        if not session.runs_in_one_call:
            pytest.skip("needs a C++ compiler")
        session.prefill(PROMPTS[0])
        wanted, found = (session.forward_tree(tree) for tree in (TREES[0], on_device(TREES[0])))
    assert torch.equal(found.logits, wanted.logits)
