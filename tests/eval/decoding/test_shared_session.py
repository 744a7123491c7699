"""Several sequences in one forward: each equals its run alone, bitwise with our kernels."""

import itertools
from typing import Any

import pytest
import torch
from support.half_right import SIZES, TINY
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.verify import DraftTree, TreeShape, root_only
from draftsmith.models.cpu_kernels import has_kernels, pack_linears, use_grouped_sdpa
from draftsmith.models.decoding.kv_cache import PAGE
from draftsmith.models.target.features import FINAL_FEATURES

# A chain, a tree whose path is not in order, and a single token; the last path crosses a page border.
TREES = [
    (DraftTree([7, 3, 20, 21], TreeShape.of((-1, 0, 1, 2))), [0, 1, 2]),
    (DraftTree([9, 4, 5, 6, 8], TreeShape.of((-1, 0, 0, 2, 3))), [0, 2, 3, 4]),
    (root_only(11), [0]),
]
PROMPTS = [[5, 6, 7, 8], [90, 3], list(range(PAGE - 3))]


def run_alone(target: Any, prompt: list[int], trees: list[tuple[DraftTree, list[int]]]) -> list[torch.Tensor]:
    """Return logits and features of the prompt and of every tree."""
    with TargetSession(target, 2 * PAGE, (1, FINAL_FEATURES)) as session:
        step = session.prefill(prompt)
        found = [step.logits, step.features]
        for tree, path in trees:
            step = session.forward_tree(tree)
            found += [step.logits, step.features]
            session.commit(path)
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_each_sequence_equals_its_run_alone(name: str) -> None:
    """Alternating, together and in other orders; one starts in a reused slot while the others run."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(TINY[name]).eval()
    by_sequence = [TREES, TREES[1:] + TREES[:1], TREES[2:] + TREES[:2]]
    expected = [run_alone(target, prompt, trees) for prompt, trees in zip(PROMPTS, by_sequence, strict=True)]
    found: list[list[torch.Tensor]] = [[], [], []]
    with TargetSession(target, 2 * PAGE, sequences=3) as session:
        session.read_layers((1, FINAL_FEATURES))
        session.current = 2
        session.prefill([17] * 40)
        session.forward_tree(TREES[1][0])
        session.commit(TREES[1][1])
        for number in (0, 1):
            session.current = number
            step = session.prefill(PROMPTS[number])
            found[number] += [step.logits, step.features]
        for turn, order in enumerate(([0, 1], [2, 1, 0], [0, 2, 1], [2])):
            if turn == 1:
                session.current = 2
                step = session.prefill(PROMPTS[2])
                found[2] += [step.logits, step.features]
            parts = [(number, *by_sequence[number][turn - (number == 2)]) for number in order]
            steps = session.forward_trees([(number, tree) for number, tree, _ in parts])
            for (number, _, path), step in zip(parts, steps, strict=True):
                found[number] += [step.logits, step.features]
                session.commit(path, number)
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not has_kernels(), reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_forward_is_bitwise_equal(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = LlamaConfig(
        **{**SIZES, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    )
    target = AutoModelForCausalLM.from_config(wide).eval().to(dtype).requires_grad_(False)
    use_grouped_sdpa(target)
    pack_linears(target)
    tree, path = TREES[1]
    expected = [run_alone(target, prompt, [(tree, path)] * 3) for prompt in PROMPTS]
    with TargetSession(target, 2 * PAGE, sequences=3) as session:
        session.read_layers((1, FINAL_FEATURES))
        found = []
        for number, prompt in enumerate(PROMPTS):
            session.current = number
            step = session.prefill(prompt)
            found.append([step.logits, step.features])
        for _ in range(3):
            for number, step in enumerate(session.forward_trees([(number, tree) for number in range(3)])):
                found[number] += [step.logits, step.features]
                session.commit(path, number)
    for ours, theirs in itertools.chain(*(zip(*both, strict=True) for both in zip(found, expected, strict=True))):
        assert torch.equal(ours, theirs)
