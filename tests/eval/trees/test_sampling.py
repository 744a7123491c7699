"""Greedy choices."""

import pytest
import torch

from draftsmith.eval.trees.sampling import largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_of_equal_logits_the_first_is_the_largest(dtype: torch.dtype) -> None:
    """bf16 has many ties: greedy decoding is the same wherever the first is taken."""
    logits = torch.randn(7, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[3, [4, 900, 4999]] = 9.0
    assert torch.equal(largest(logits), logits.argmax(-1))
    assert largest(logits)[3] == 4
    assert int(largest(logits[3])) == 4
