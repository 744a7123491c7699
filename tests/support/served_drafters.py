"""Drafters that real vLLM is shown: kind, format and options, each drafting three tokens."""

from typing import Any

SERVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eagle": ("eagle", "vllm", {"draft_depth": 3, "first_token": False}),
    "eagle3": ("eagle3", "vllm", {"ttt_steps": 3, "first_token": False}),
    "eagle3-reduced": (
        "eagle3",
        "vllm",
        {"ttt_steps": 3, "draft_vocab_size": 1000, "feature_layers": [0, 3, 6, 7], "first_token": False},
    ),
    "peagle": ("peagle", "vllm", {"num_masks": 2, "first_token": False}),
    "peagle-two-layers": (
        "peagle",
        "vllm",
        {"num_masks": 2, "num_layers": 2, "draft_vocab_size": 1000, "first_token": False},
    ),
    "speculators-eagle3": (
        "eagle3",
        "speculators",
        {"ttt_steps": 3, "feature_layers": [2, 7], "first_token": False, "norm_before_residual": True},
    ),
    "speculators-peagle": ("peagle", "speculators", {"num_masks": 2, "draft_vocab_size": 1000, "first_token": False}),
    "medusa": ("medusa", "vllm", {"num_heads": 3}),
    "medusa-shared": ("medusa", "vllm", {"num_heads": 3, "lm_heads": "shared", "num_layers": 2}),
    "draft_model": ("draft_model", "vllm", {"draft_depth": 3, "num_layers": 1}),
    "pard": ("parallel", "vllm", {"num_masks": 2, "inputs": "embedding", "shared_mask": True}),
}
