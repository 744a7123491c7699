"""Drafters for real engines by kind, format and options, each drafting three tokens, and our decoder's acceptance."""

from dataclasses import dataclass
from typing import Any

import torch
from support.drafter_cases import greedy_logits
from transformers import PreTrainedModel

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.formats.layout import drafted_tokens
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.schema import TargetRecipe

NEW_TOKENS = 48  # of a compared answer
QUESTIONS = 12
TRAINING_STEPS, STEPS_WITH_MASKS = 60, 400  # masks train slowly

SERVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eagle": ("eagle", "vllm", {"draft_depth": 3, "first_token": False}),
    "eagle3": ("eagle3", "vllm", {"ttt_steps": 3, "first_token": False}),
    "eagle3-reduced": (
        "eagle3",
        "vllm",
        {"ttt_steps": 3, "draft_vocab_size": 1000, "feature_layers": [0, 3, 6, 7], "first_token": False},
    ),
    "eagle3.1": (
        "eagle3",
        "vllm",
        {"ttt_steps": 3, "fc_norm": True, "norm_output": True, "feature_layers": [2, 7], "first_token": False},
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
    "speculators-normed": (
        "eagle3",
        "speculators",
        {"ttt_steps": 3, "norm_before_fc": True, "norm_output": True, "first_token": False},
    ),
    "speculators-peagle-normed": ("peagle", "speculators", {"num_masks": 2, "fc_norm": True, "first_token": False}),
    "dflash": ("dflash", "vllm", {"block_size": 4, "num_layers": 2}),
    "dflash-reduced": ("dflash", "vllm", {"block_size": 4, "num_layers": 1, "draft_vocab_size": 1000}),
    "dflash-window": ("dflash", "vllm", {"block_size": 4, "num_layers": 1, "sliding_window": 24}),
    "dflash-causal": ("dflash", "vllm", {"block_size": 4, "num_layers": 1, "feature_layers": [4, 7], "causal": True}),
    "medusa": ("medusa", "vllm", {"num_heads": 3}),
    "medusa-shared": ("medusa", "vllm", {"num_heads": 3, "lm_heads": "shared", "num_layers": 2}),
    "draft_model": ("draft_model", "vllm", {"draft_depth": 3, "num_layers": 1}),
    "parallel": (
        "parallel",
        "vllm",
        {"num_masks": 2, "num_layers": 2, "feature_layers": [4, -1], "mask_residual": True, "first_token": False},
    ),
    "parallel-reduced": (
        "parallel",
        "vllm",
        {
            "num_masks": 2,
            "feature_layers": [2, 4, -1],
            "intermediate_size": 384,
            "markov_rank": 32,
            "draft_vocab_size": 1000,
            "first_token": False,
        },
    ),
    "parallel-hidden": (
        "parallel",
        "vllm",
        {
            "num_masks": 2,
            "inputs": "hidden",
            "feature_layers": [0, 7],
            "sliding_window": 24,
            "layers": "qwen3",
            "first_token": False,
        },
    ),
    "parallel-embedding": (
        "parallel",
        "vllm",
        {"num_masks": 2, "inputs": "embedding", "shared_mask": True, "first_token": False},
    ),
    "dflash2": ("dflash2", "vllm", {"block_size": 4, "num_layers": 2, "selector_rank": 16, "selector_top_k": 8}),
    "speculators-dflash": ("dflash", "speculators", {"block_size": 4, "num_layers": 1, "draft_vocab_size": 1000}),
    "speculators-dflash2": ("dflash2", "speculators", {"block_size": 4, "num_layers": 1, "selector_rank": 16}),
    "dspark": ("dspark", "vllm", {"block_size": 3, "num_layers": 2, "markov_rank": 32}),
    "dspark-reduced": ("dspark", "vllm", {"block_size": 3, "num_layers": 1, "draft_vocab_size": 1000}),
}

# Kinds that only vLLM's newer runner supports.
BY_THE_NEWER_RUNNER = ("dflash2", "dspark")

# Kinds for real llama.cpp.
IN_LLAMACPP: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"ttt_steps": 3, "first_token": False}),
    "eagle3-reduced": (
        "eagle3",
        {
            "ttt_steps": 3, "draft_vocab_size": 1000, "first_token": False, "norm_before_residual": True,
            "norm_before_fc": True, "feature_layers": [1, 4, 7],
        },
    ),
    "dflash": ("dflash", {"block_size": 4, "num_layers": 2}),
    "dflash-window": ("dflash", {"block_size": 4, "num_layers": 1, "sliding_window": 24}),
    "dflash-reduced": (
        "dflash",
        {"block_size": 4, "num_layers": 1, "draft_vocab_size": 1000, "feature_layers": [4, 7], "causal": True},
    ),
    "dflash2": (
        "dflash2",
        {"block_size": 4, "num_layers": 2, "selector_rank": 16, "selector_top_k": 8, "sliding_window": 24},
    ),
    "dspark": ("dspark", {"block_size": 3, "num_layers": 2, "markov_rank": 32}),
    "dspark-reduced": ("dspark", {"block_size": 3, "num_layers": 1, "markov_rank": 32, "draft_vocab_size": 1000}),
    "draft_model": ("draft_model", {"draft_depth": 3, "num_layers": 2}),
}  # fmt: skip


def load_embedded() -> tuple[PreTrainedModel, Any, list[list[int]]]:
    """Return the embedded target in fp32, its tokenizer, and the prompts of a few questions."""
    target, tokenizer = load_target(TargetRecipe(model="embedded", dtype="float32", device="cpu"))
    asked = [question.turns[0] for question in load_questions("embedded")][:QUESTIONS]
    return target, tokenizer, [prompt_token_ids(tokenizer, [Turn("user", text)]) for text in asked]


def train_briefly(
    kind: str, options: dict[str, Any], target: Any, prompts: list[list[int]], answers: list[list[int]]
) -> Drafter:
    """Train on the answers that are measured, so that every depth is sometimes accepted."""
    torch.manual_seed(5)
    drafter = load_drafter_class(kind).from_target(target, options)
    if options.get("draft_vocab_size"):
        said = torch.tensor([token for answer in answers for token in answer])
        drafter.choose_draft_vocab(torch.bincount(said, minlength=target.config.vocab_size))
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=2e-3)
    drafter.train()
    rows = [torch.tensor([prompt + answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    for step in range(STEPS_WITH_MASKS if {"num_masks", "block_size"} & options.keys() else TRAINING_STEPS):
        ids = rows[step % len(rows)]
        loss_mask = torch.zeros_like(ids)
        loss_mask[:, len(prompts[step % len(rows)]) :] = 1
        features, teacher = drafter.training_features(target, ids)
        loss = drafter(ids, features, loss_mask, teacher_features=teacher).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.freeze()


@torch.no_grad()
def share_first_key_norm(drafter: Drafter) -> None:
    """Reproduce a bug of vLLM 0.32 on a CPU, where `rms_norm` uses the first row of a weight for each layer.

    It norms the context's keys of all layers in one call (qwen3_dflash.py, _normalize_context_k).
    """
    for layer in drafter.layers:
        layer.self_attn.k_norm.weight.copy_(drafter.layers[0].self_attn.k_norm.weight)


@dataclass
class Setup:
    """The target, prompts, and greedy answers beyond the compared length."""

    target: Any
    prompts: list[list[int]]
    answers: list[list[int]]  # greedy, beyond the compared length


def count_our_rounds(drafter: Drafter, setup: Setup, within: bool = False) -> tuple[int, list[int], int]:
    """Count rounds, accepted draft tokens by position, and draft tokens of a chain in our decoder.

    Args:
        within: Draft up to the second to last token only, as llama.cpp; vLLM always drafts a whole chain.
    """
    longest = drafted_tokens(drafter.config)
    rounds, accepted, drafted = 0, [0] * longest, 0
    for prompt, answer in zip(setup.prompts, setup.answers, strict=True):
        ids = torch.tensor(prompt + answer)
        features = target_features(setup.target, ids.unsqueeze(0), layers=drafter.feature_layers)[0]
        decoder = drafter.decoder(len(ids))
        known = len(prompt)
        decoder.start(ids[:known], features[:known])
        new = 1  # the prefill's token
        while known - len(prompt) < NEW_TOKENS:
            decoder.observe(ids[known : known + new], features[known - 1 : known + new - 1])
            known += new
            if known - len(prompt) >= NEW_TOKENS:
                break
            depth = min(longest, NEW_TOKENS - 1 - (known - len(prompt))) if within else longest
            if not depth:
                break
            drafted += depth
            drafts = decoder.columns.tokens(greedy_logits(decoder, depth).argmax(-1).tolist())
            right = [a == b for a, b in zip(drafts, ids[known:].tolist(), strict=False)]
            count = right.index(False) if False in right else depth
            rounds += 1
            for place in range(count):
                accepted[place] += 1
            new = count + 1
    return rounds, accepted, drafted
