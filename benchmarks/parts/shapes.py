"""Sizes to measure at, a random target of such a size, and random drafters for it.

No weights are read from anywhere: what a step costs does not depend on them. What a loop costs depends on how much is
accepted, so there the LM heads are given a bias towards one token (`agree`).
"""

import heapq
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftsmith.eval.trees.builders import StaticPaths
from draftsmith.eval.trees.tree import DraftTree
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.cpu_kernels import use_grouped_sdpa

SEED = 0
FAVOURITE = 7  # the token that is agreed on
# Of kinds that draft otherwise than their defaults say.
OPTIONS: dict[str, dict[str, Any]] = {"parallel": {"num_masks": 4, "inputs": "both"}}


@dataclass(frozen=True)
class Shape:
    """Hold the sizes of a target, and how much is done with it.

    Args:
        dtype: Of the target, and of drafters while decoding; they are trained in fp32, under autocast if this is half.
        length: S, tokens of a row in training.
        prompt, answer: tokens, in decoding.
        repeats: of what takes about a step.
        tree_nodes: root included, the most important first.
        drafted_nodes: of what drafters draft.
        num_masks: K.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    dtype: str
    length: int
    prompt: int
    answer: int
    repeats: int
    tree_nodes: tuple[int, ...] = (1, 48, 64, 32, 16, 8, 4, 2)
    drafted_nodes: int = 48
    num_masks: int = 4

    @property
    def session_tokens(self) -> int:
        """Length of a sequence, with room for drafting again and again."""
        return self.prompt + 4 * self.answer

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            dtype=self.dtype,
        )


SHAPES = {
    # Llama 3.1 8B's and Llama 3.2 1B's.
    "8b": Shape(4096, 14336, 32, 32, 8, 128_256, "bfloat16", 2048, 512, 96, 20),
    "1b": Shape(2048, 8192, 16, 32, 8, 128_256, "bfloat16", 2048, 512, 96, 20),
    # On a CPU: SmolLM2-135M's, and the embedded target's, where what our own code adds weighs most.
    "135m": Shape(576, 1536, 30, 9, 3, 49_152, "float32", 256, 64, 48, 5),
    "embedded": Shape(192, 512, 8, 3, 1, 4096, "float32", 512, 64, 48, 20),
    # To see that everything runs, anywhere.
    "tiny": Shape(64, 96, 2, 4, 2, 331, "float32", 32, 12, 20, 2, tree_nodes=(1, 5, 3), drafted_nodes=5),
}


def random_target(shape: Shape, device: torch.device) -> PreTrainedModel:
    """Make a target where it stays: the host never holds it."""
    torch.manual_seed(SEED)
    with torch.device(device):
        target = LlamaForCausalLM._from_config(shape.config, dtype=shape.torch_dtype)
    target.eval().requires_grad_(False)
    use_grouped_sdpa(target)
    return target


def random_drafter(kind: str, target: PreTrainedModel, **options: Any) -> Drafter:
    """Make a drafter as a training begins with it: in fp32, attached."""
    torch.manual_seed(SEED)
    with torch.device(target.device):
        return load_drafter_class(kind).from_target(target, {**OPTIONS.get(kind, {}), **options})


def agree(target: PreTrainedModel, drafter: Drafter, share: float = 0.7) -> None:
    """Make both give about this share of their probability to one token, and all of it when they are greedy.

    A head's bias, which costs nothing: so drafts are accepted, at T = 0 all and at T = 1 most of them. The next drafter
    starts from a target whose bias was taken off again.
    """
    vocabulary = target.config.vocab_size
    heads = [each for each in drafter.modules() if isinstance(each, nn.Linear) and each.out_features == vocabulary]
    for linear in [target.get_output_embeddings(), *heads]:
        # Logits of normed states are normal: their exponentials add up to V exp(s^2 / 2).
        deviation = float(linear.weight.detach().float().std()) * math.sqrt(linear.in_features)
        rest = math.log(vocabulary) + deviation**2 / 2
        bias = torch.zeros(vocabulary, dtype=linear.weight.dtype, device=linear.weight.device)
        bias[FAVOURITE] = rest + math.log(share / (1 - share))
        linear.bias = nn.Parameter(bias, requires_grad=False)


def tree_paths(nodes: int, depth: int) -> list[list[int]]:
    """Return the best tree of so many nodes, root included, no path longer than `depth`, if rank r costs 1 + r."""
    paths: list[list[int]] = []
    heap: list[tuple[int, list[int]]] = [(1, [0])]
    while heap and len(paths) < nodes - 1:
        cost, path = heapq.heappop(heap)
        paths.append(path)
        heapq.heappush(heap, (cost + 1, [*path[:-1], path[-1] + 1]))
        if len(path) < depth:
            heapq.heappush(heap, (cost + 1, [*path, 0]))
    return paths


def random_tree(nodes: int, depth: int = 5) -> DraftTree:
    """Make a tree of so many nodes, root included, with any tokens."""
    shape = StaticPaths.of(tree_paths(nodes, depth)).shape
    return DraftTree([3 + node for node in range(nodes)], shape)


def random_prompt(shape: Shape) -> list[int]:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(3, shape.vocabulary, (shape.prompt,), generator=generator).tolist()
