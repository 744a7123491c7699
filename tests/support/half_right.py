"""Tiny targets of many architectures, drafters that are sometimes right, and every kind of tree."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from draftsmith.eval.methods.drafter import (
    BestFirstBuilder,
    BestFirstGrower,
    ChainBuilder,
    ChainGrower,
    StaticBuilder,
    StaticGrower,
    TreeBuilder,
)
from draftsmith.models.decoding.decoders import ALL_TOKENS
from draftsmith.models.sampling import Sampling

GREEDY = Sampling()
DEPTHS = 4
BUILDERS: dict[str, TreeBuilder] = {
    "chain": ChainBuilder(),
    "short chain": ChainBuilder(max_depth=1),
    "static": StaticBuilder([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]),
    "best_first": BestFirstBuilder(nodes=12, branch=4),
    "wide": BestFirstBuilder(nodes=30, branch=30, max_depth=2),
}
GROWERS: dict[str, TreeBuilder] = {
    "chain": ChainGrower(),
    "short chain": ChainGrower(max_depth=1),
    "static": StaticGrower([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]),
    "best_first": BestFirstGrower(nodes=12, branch=4),
    "wide": BestFirstGrower(nodes=30, branch=30, max_depth=2),
}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
TINY = {
    name: AutoConfig.for_model(name, **SIZES, **changes)
    for name, changes in {
        "llama": {},
        "qwen2": {},
        "qwen3": {"head_dim": 8},
        "mistral": {"sliding_window": None},
        "gemma": {"head_dim": 8},
        "gemma2": {"head_dim": 8, "sliding_window": 64},
        "phi": {},
    }.items()
} | {
    "gpt_neox": AutoConfig.for_model("gpt_neox", **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "tied llama": AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=True),
    "gpt2": AutoConfig.for_model(
        "gpt2", vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=128, initializer_range=0.3
    ),
}


class HalfRightDecoder:
    """Decoder that drafts the known answer with random wrong depths, so that all kinds of paths are accepted."""

    columns = ALL_TOKENS

    def __init__(self, answer: list[int], vocabulary: int) -> None:
        self._answer, self._vocabulary = answer, vocabulary
        self._generator = torch.Generator().manual_seed(0)
        self._done = 0

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        self._done = 0

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        assert len(committed_ids) == len(features)
        self._done += len(committed_ids)

    def draft(self) -> Tensor:
        return torch.cat([self._logits_after(self._answer[self._done : self._done + depth]) for depth in range(DEPTHS)])

    def _logits_after(self, drafted: list[int]) -> Tensor:
        """Return logits [1, V]: noise, with the answer's next token if the path so far is right."""
        logits = torch.rand(1, self._vocabulary, generator=self._generator)
        rest = self._answer[self._done :]
        if drafted == rest[: len(drafted)] and len(drafted) < len(rest):
            # Often the most likely token, else the second or third, or not to be found.
            logits[0, rest[len(drafted)]] += float(torch.rand((), generator=self._generator)) * 1.2
        return logits


class HalfRightStepwiseDecoder(HalfRightDecoder):
    """Stepwise variant: it drafts the answer's next token only below nodes whose path is right."""

    num_depths = DEPTHS

    def begin(self) -> Tensor:
        self._paths: list[list[int]] = [[]]
        return self._logits_after([])

    def expand(self, tokens: list[int] | Tensor, parents: list[int]) -> Tensor:
        tokens = torch.as_tensor(tokens).tolist()
        added = [[*self._paths[parent], token] for token, parent in zip(tokens, parents, strict=True)]
        self._paths += added
        return torch.cat([self._logits_after(path) for path in added])


def greedy_reference(target: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Return transformers' greedy tokens, not stopped by an end token."""
    ids = target.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()
