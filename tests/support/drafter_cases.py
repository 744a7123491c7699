"""Every kind of drafter, and every mechanism that an option enables, for tests of their common invariants."""

from typing import Any

import datasets
import torch
from support.tiny_models import VOCABULARY, tiny_drafter_of, tiny_target
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import Drafter, label_all_groups
from draftsmith.models.base.registry import drafter_kinds
from draftsmith.models.decoding.decoders import StepwiseDecoder
from draftsmith.train.drafter import parity

TARGET_LAYERS = 4  # enough for features of a low, a middle and a high layer
# Every mechanism that an option enables, once, combined with independent ones.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dflash": [
        {"sample_from_anchor": True, "causal": True, "loss": "kl", "block_size": 4, "markov_rank": 5, "init": "random"},
        {"draft_vocab_size": 40, "feature_layers": [0, 3], "mask_token_id": 7, "attention": "dense"},
        {"block_size": 4, "sliding_window": 6},
    ],
    "dflash2": [
        {
            "block_size": 4,
            "conv_kernel_size": 3,
            "conv_group_size": 8,
            "selector_rank": 6,
            "selector_top_k": 5,
            "selector_weight": 0.7,
            "sliding_window": 7,
        },
        {
            "block_size": 3,
            "sample_from_anchor": True,
            "loss": "kl",
            "selector_top_k": 4,
            "conv_kernel_size": 5,
            "draft_vocab_size": 40,
        },
    ],
    "draft_model": [{"loss": "ce", "num_layers": 3, "init": "random", "draft_vocab_size": 40, "sliding_window": 6}],
    "dspark": [
        {"draft_vocab_size": 40, "markov_rank": 5, "loss": "ce", "anchor_ratio": 0.9},
        {
            "sample_from_anchor": False,
            "markov_rank": 5,
            "loss": {"ce": 0.1, "tv": 1.8},
            "num_layers": 1,
            "mask_residual": True,
        },
        {"confidence_weight": 0.0, "markov_rank": 5, "loss": "ce", "causal": True, "sliding_window": 9},
    ],
    "eagle": [
        {
            "loss": {"kl": 0.5, "tv": 1.0},
            "attention": "dense",
            "fc_bias": True,
            "draft_vocab_size": 40,
            "first_token": False,
            "sliding_window": 7,
        }
    ],
    "eagle_parallel": [
        {"mask_residual": True, "keep_ratio": 0.8, "loss": "ce", "fc_bias": True, "first_token": False},
        {"markov_rank": 5, "draft_vocab_size": 40, "sliding_window": 6, "mask_residual": False},
        {"mask_residual": False},
    ],
    "eagle3": [
        {"draft_vocab_size": 40, "feature_layers": [0, 3], "norm_before_fc": True, "norm_before_residual": True},
        {"first_token": False, "fc_norm": True, "norm_output": True, "sliding_window": 6},
    ],
    "hydra": [
        {"prefix_attention": True, "draft_vocab_size": 40, "lm_head_bias": True, "sliding_window": 4},
        {"num_layers": 2, "lm_heads": "shared", "loss": "kl", "draft_vocab_size": 40, "embedding_norm": False},
    ],
    "medusa": [
        {"num_layers": 2, "lm_heads": "shared", "loss": "tv", "draft_vocab_size": 40},
        {"loss": {"tv": 0.5, "ce": 2.0}, "draft_vocab_size": 40},
    ],
    "medusa2": [{"lora_targets": ["q_proj", "down_proj"], "lm_loss": "ce", "draft_vocab_size": 40}],
    "parallel": [
        {"inputs": "embedding", "shared_mask": True, "num_layers": 2},
        {"inputs": "hidden", "mask_residual": True, "feature_layers": [0, 2, -1], "sliding_window": 6},
        {"markov_rank": 5, "draft_vocab_size": 40, "loss": {"kl": 1.0, "tv": 0.5}},
        {"first_token": False, "feature_layers": [1, -1]},
    ],
    "pass_embeddings": [{"draft_vocab_size": 40, "sliding_window": 6}],
    "peagle": [
        {"num_layers": 2, "first_token": False, "fc_norm": True, "sliding_window": 7},
        {"num_layers": 1},
        {
            "num_layers": 1,
            "draft_vocab_size": 40,
            "keep_ratio": 0.8,
            "keep_ratio_min": 0.5,
            "loss": "ce",
            "markov_rank": 5,
        },
    ],
}
# Two of three tokens, 40 in all, are in the data.
FREQUENT = datasets.Dataset.from_dict(
    {"input_ids": [[token for token in range(VOCABULARY) if token % 3]], "loss_mask": [[1] * 40]}
)
CASES = [
    (kind, options) for kind in drafter_kinds() for options in [{}, *VARIANTS.get(kind, [{"draft_vocab_size": 40}])]
]
# Row weights that depend on their group.
BY_GROUPS: list[tuple[str, dict[str, Any]]] = [
    (
        "eagle_parallel",
        {"until_first_error": True, "draft_vocab_size": 40, "loss": "ce", "class_weight": 1.0, "mask_residual": False},
    ),
    ("parallel", {"until_first_error": True, "loss": "kl"}),
    ("dflash", {"until_first_error": True}),
    ("medusa", {"until_first_error": True, "draft_vocab_size": 40, "loss": "ce"}),
    ("dflash2", {"until_first_error": True, "selector_rank": 6, "selector_top_k": 5}),
]


def target_and_drafter(
    kind: str, options: dict[str, Any], target: PreTrainedModel | None = None
) -> tuple[PreTrainedModel, Drafter]:
    """Build a drafter whose draft vocabulary, if any, is spread over the target's, and by default a target."""
    target = tiny_target(num_hidden_layers=TARGET_LAYERS) if target is None else target
    drafter = tiny_drafter_of(kind, target, **options)
    drafter.prepare_draft_vocab(FREQUENT)
    if "draft_vocab_size" in options:
        with torch.no_grad():
            for head in drafter.own_heads:  # which are initialised from the target's
                head.weight.add_(0.1 * torch.randn_like(head.weight))
    return target, drafter


def group_hidden(drafter: Drafter, ids: Tensor, features: Tensor) -> Tensor:
    """Return the hidden states of all depths before the final norm, [B, G, S, D]; zeros without a row."""
    groups, features = label_all_groups(drafter, ids, features, None)
    hidden_nd = drafter.hidden_states(groups, features)
    return groups.on_grid(groups.labelled_m, hidden_nd[groups.labelled_m])[:, :, : ids.shape[1]]


def drafted_logits(drafter: Drafter, decoder: Any, ids: Tensor, newest: int) -> Tensor:
    """Return logits [G, V] after the token at `newest`, where the drafter reads drafted tokens after the true ones."""
    return torch.stack([*parity.drafted_logits(drafter, decoder, ids[newest + 1 :], VOCABULARY)])


def greedy_logits(decoder: Any, depths: int) -> Tensor:
    """Return the logits [`depths` at most, V'] of a chain of the most likely tokens."""
    if not isinstance(decoder, StepwiseDecoder):
        return decoder.draft()[:depths]
    rows = [decoder.begin()[0]]
    for parent in range(min(depths, decoder.num_depths) - 1):
        rows.append(decoder.expand(decoder.columns.tokens([int(rows[-1].argmax())]), [parent])[0])
    return torch.stack(rows)
