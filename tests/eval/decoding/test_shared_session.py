"""Several sequences in one forward: each equals its run alone; bitwise with our kernels, in `test_cpu_layers.py`."""

import pytest
import torch
from support.half_right import PATHS_IN_TREES, TINY, run_trees
from transformers import AutoModelForCausalLM

from draftsmith.eval.decoding.session import TargetSession
from draftsmith.models.decoding.kv_cache import PAGE
from draftsmith.models.target.features import FINAL_FEATURES

PROMPTS = [[5, 6, 7, 8], [90, 3], list(range(PAGE - 3))]  # the last path of the last one crosses a page border


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_each_sequence_equals_its_run_alone(name: str) -> None:
    """Alternating, together and in other orders; one starts in a reused slot while the others run."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(TINY[name]).eval()
    by_sequence = [PATHS_IN_TREES, PATHS_IN_TREES[1:] + PATHS_IN_TREES[:1], PATHS_IN_TREES[2:] + PATHS_IN_TREES[:2]]
    expected = []
    for prompt, trees in zip(PROMPTS, by_sequence, strict=True):
        with TargetSession(target, 2 * PAGE, (1, FINAL_FEATURES)) as session:
            expected.append(run_trees(session, prompt, trees))
    found: list[list[torch.Tensor]] = [[], [], []]
    with TargetSession(target, 2 * PAGE, sequences=3) as session:
        session.read_layers((1, FINAL_FEATURES))
        session.current = 2
        session.prefill([17] * 40)
        session.forward_tree(PATHS_IN_TREES[1][0])
        session.commit(PATHS_IN_TREES[1][1])
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
