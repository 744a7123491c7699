"""Tiny targets of many architectures, drafters that are sometimes right, and every kind of tree."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import BestFirst, Chain, Static, TreeBuilder, TreeDrafter, build_tree_drafter
from draftsmith.eval.trees.verify import DraftTree, TreeShape, root_only
from draftsmith.models.decoding.decoders import ALL_TOKENS
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import MethodConfig

GREEDY = Sampling()
DEPTHS = 4
BUILDERS: dict[str, TreeBuilder] = {
    "chain": Chain(),
    "short chain": Chain(max_depth=1),
    "static": Static([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]),
    "best_first": BestFirst(nodes=12, branch=4),
    "wide": BestFirst(nodes=30, branch=30, max_depth=2),
}
# Keys of a recipe's method.
TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain"},
    "static": {"tree": "static", "paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
    "best_first": {"tree": "best_first", "nodes": 9, "branch": 3},
    "lookup": {"tree": "best_first", "nodes": 9, "branch": 3, "lookup": True},
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

# A chain, a tree whose path is not in order, and a single token, with the path that is committed.
PATHS_IN_TREES = [
    (DraftTree([7, 3, 20, 21], TreeShape.of((-1, 0, 1, 2))), [0, 1, 2]),
    (DraftTree([9, 4, 5, 6, 8], TreeShape.of((-1, 0, 0, 2, 3))), [0, 2, 3, 4]),
    (root_only(11), [0]),
]


def run_trees(session: TargetSession, prompt: list[int], rounds: Sequence[tuple[DraftTree, list[int]]]) -> list[Tensor]:
    """Return the logits and features of the prompt, and of every tree, whose path is committed."""
    step = session.prefill(prompt)
    outputs = [step.logits, step.features]
    for tree, path in rounds:
        step = session.forward_tree(tree)
        outputs += [step.logits, step.features]
        session.commit(path)
    return outputs


def tree_method(
    decoder: Any,
    tree: str = "chain",
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
    **keys: Any,
) -> TreeDrafter:
    """Make the method that drafts one of the `TREES`, with other values of some keys."""
    recipe = MethodConfig.model_validate({"name": "x", **TREES[tree], **keys})
    return build_tree_drafter(recipe, decoder, sampling, generator)


class HalfRightDecoder:
    """Decoder that drafts the known answer with random wrong depths, so that all kinds of paths are accepted."""

    columns = ALL_TOKENS

    def __init__(self, answer: list[int], vocabulary: int) -> None:
        self._answer, self._vocabulary = answer, vocabulary
        self._generator = torch.Generator().manual_seed(0)
        self._done = 0

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
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
