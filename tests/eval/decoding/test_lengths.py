"""What changes with the length of the text: answers that cross it are those of one forward over all tokens.

Windows and chunks, which change masks, are in `tests/models/target/test_windows.py`. `generate` of transformers 5.19 is
no reference: at Phi-3's switch it drops the cache and goes on with the newest token alone.
"""

from typing import Any

import pytest
import torch
from support.half_right import BUILDERS, GREEDY, HalfRightDecoder
from support.tiny_models import tiny_target

from draftsmith.errors import UserError
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import TreeDrafter
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.target.loading import longest_sequence_tokens
from draftsmith.models.target.windows import rope_switch

LENGTH, NEW_TOKENS = 24, 30  # of the trained text, which every answer leaves
END = LENGTH + 1 + NEW_TOKENS  # of the longest answer
ORIGINAL = {"rope_theta": 10_000.0, "original_max_position_embeddings": LENGTH, "factor": 4.0}
LONG = {**ORIGINAL, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 8.0]}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": LENGTH, "sliding_window": None}),
    "yarn": ("llama", {"rope_parameters": {**ORIGINAL, "rope_type": "yarn"}}),
    "llama3": (
        "llama",
        {"rope_parameters": {**ORIGINAL, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ),
    # Sessions end where its angles change: at the positions, whatever was the trained length.
    "dynamic": ("llama", {"rope_parameters": {**ORIGINAL, "rope_type": "dynamic"}, "max_position_embeddings": END}),
    "doge": ("doge", {"keep_window_size": END}),
}


@torch.inference_mode()
def recompute(target: Any, prompt: list[int], count: int) -> list[int]:
    """Answer greedily without a cache: every token by one forward over all before it."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(target(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", ROPES)
def test_answers_across_the_trained_length(kind: str) -> None:
    """With and without drafts, from prompts before the border, at it and beyond it."""
    model_type, values = ROPES[kind]
    target = tiny_target(model_type, **values).double()
    assert rope_switch(target) == (LENGTH if kind == "longrope" else None)
    end = longest_sequence_tokens(target)
    assert end == (END if kind in ("dynamic", "doge") else 128)
    with TargetSession(target, end) as session:
        for length in (6, LENGTH - 1, LENGTH, LENGTH + 1):
            prompt = [3 + 7 * place % 50 for place in range(length)]
            answer = recompute(target, prompt, NEW_TOKENS)
            assert generate(session, Autoregressive(), prompt, GREEDY, NEW_TOKENS).ids == answer
            for tree in ("chain", "best_first"):
                decoder = HalfRightDecoder(answer, target.config.vocab_size)
                method = TreeDrafter("x", decoder, BUILDERS[tree], GREEDY)
                record = generate(session, method, prompt, GREEDY, NEW_TOKENS)
                assert record.ids == answer, (length, tree)
                assert record.accepted_drafts > 0


def test_trees_across_the_switch_are_refused() -> None:
    model_type, values = ROPES["longrope"]
    with TargetSession(tiny_target(model_type, **values), 80) as session:
        session.prefill([5] * (LENGTH - 2))
        assert session.deepest_draft == 1
        with pytest.raises(ValueError, match=f"RoPE changes after {LENGTH} tokens"):
            session.forward_tree(DraftTree([7, 8, 9], TreeShape.chain(2)))


def test_scales_by_the_place_of_a_row_limit_the_length() -> None:
    """Llama 4's queries: 300 - 1 - 256 nodes of the largest tree."""
    values = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "floor_scale": 300}
    target = tiny_target("llama4_text", **values)
    assert longest_sequence_tokens(target) == 43
    with pytest.raises(UserError, match="44 tokens do not fit into the target's 43 positions"):
        TargetSession(target, 44)
