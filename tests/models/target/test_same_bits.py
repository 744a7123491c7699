"""Greedy decoding in bf16 needs bitwise equal logits of a token from a single step and from a tree."""

import pytest
import torch
from support.tiny_models import VOCABULARY, tiny_target

from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.cpu_kernels import DTYPES, has_kernels, pack_linears, use_grouped_sdpa

PROMPT = [5, 9, 33, 12, 7]
PATH = [8, 21, 40, 3]


@pytest.mark.skipif(not has_kernels(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_logits_of_a_token_are_bitwise_equal_in_a_step_and_in_a_tree(dtype: torch.dtype) -> None:
    """The MLP's size is whole vectors: torch's activations compute a remainder differently."""
    target = tiny_target(
        hidden_size=96, intermediate_size=128, num_attention_heads=6, num_key_value_heads=2, head_dim=32
    ).to(dtype)
    use_grouped_sdpa(target)
    pack_linears(target)
    # A root, and for each token of the path some wrong siblings before it and one after it.
    tokens, parents, path = [PATH[0]], [-1], [0]
    for wrong, token in zip((7, 2, 4), PATH[1:], strict=True):
        above = path[-1]
        path.append(len(tokens) + wrong)
        tokens += [*range(43, 43 + wrong), token, VOCABULARY - 1]
        parents += [above] * (wrong + 2)
    with TargetSession(target, 64) as session:
        session.prefill(PROMPT)
        steps = []
        for token in PATH:
            steps.append(session.forward_tree(DraftTree([token], TreeShape.chain(0))))
            session.commit([0])
        last = session.forward_tree(DraftTree([11], TreeShape.chain(0)))
        session.prefill(PROMPT)
        tree = session.forward_tree(DraftTree(tokens, TreeShape.of(tuple(parents))))
        for node, step in zip(path, steps, strict=True):
            assert torch.equal(tree.logits[node], step.logits[0])
            assert torch.equal(tree.features[node], step.features[0])
        # The committed path's cache equals the one written by the steps.
        session.commit(path)
        assert torch.equal(session.forward_tree(DraftTree([11], TreeShape.chain(0))).logits, last.logits)
