"""The function that stands for vLLM's on a CPU."""

import torch

from draftsmith.eval.serving.cpu_sampling import expanded


def test_each_requests_value_for_each_of_its_drafted_tokens() -> None:
    """Requests of 2, 0 and 3 drafted tokens; a temperature of -1 (greedy) becomes 1."""
    output = torch.full((5,), 7.0)
    expanded(output, torch.tensor([0.7, 0.3, -1.0]), torch.tensor([2, 2, 5], dtype=torch.int32), -1, 1)
    assert torch.equal(output, torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0]))


def test_whole_numbers_stay_whole() -> None:
    output = torch.zeros(3, dtype=torch.int32)
    expanded(output, torch.tensor([50, 3], dtype=torch.int32), torch.tensor([1, 3]), 0, 0, MAX_NUM_TOKENS=4)
    assert output.tolist() == [50, 3, 3]
