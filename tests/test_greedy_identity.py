"""Invariant 1: every method and every tree returns exactly the target's greedy tokens.

The reference is `generate` of transformers, which shares no code with ours.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from draftsmith.eval.decoding.loop import generate
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.draft_model import DraftModelDecoder
from draftsmith.eval.methods.drafter import DrafterMethod
from draftsmith.eval.methods.lookahead import Lookahead
from draftsmith.eval.methods.ngram import NgramDecoder, NgramModel
from draftsmith.eval.methods.prompt_lookup import PromptLookup
from draftsmith.eval.methods.registry import Autoregressive, Method
from draftsmith.eval.methods.specinfer import SpecInfer
from draftsmith.eval.trees.builders import BestFirstBuilder, ChainBuilder, StaticBuilder, TreeBuilder
from draftsmith.eval.trees.growers import BestFirstGrower, ChainGrower, StaticGrower
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.models.base.drafter import StepwiseDecoder, load_drafter_class

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
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral with a window": MistralConfig(**SIZES, sliding_window=64),  # longer than the sequences: must not matter
    "gemma": GemmaConfig(**SIZES, head_dim=8),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=64),
    "phi": PhiConfig(**SIZES),
    "gpt_neox": GPTNeoXConfig(**{key: value for key, value in SIZES.items() if key != "num_key_value_heads"}),
    "tied llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=128, initializer_range=0.3),
}
MATERIAL = Path(__file__).parents[2] / "shared" / "material" / "models"


class HalfRightDecoder:
    """Knows the answer and drafts it, with each depth spoiled now and then, so that all kinds of paths are accepted."""

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
        """[1, V]: noise, with the answer's next token where what was drafted is the answer so far."""
        logits = torch.rand(1, self._vocabulary, generator=self._generator)
        rest = self._answer[self._done :]
        if drafted == rest[: len(drafted)] and len(drafted) < len(rest):
            # Often the most likely token, else the second or third, or not to be found.
            logits[0, rest[len(drafted)]] += float(torch.rand((), generator=self._generator)) * 1.2
        return logits


class HalfRightStepwiseDecoder(HalfRightDecoder):
    """The same, a level at a time: a node knows how to go on only where the path to it is right."""

    num_depths = DEPTHS

    def begin(self) -> Tensor:
        self._paths: list[list[int]] = [[]]
        return self._logits_after([])

    def expand(self, tokens: list[int], parents: list[int]) -> Tensor:
        added = [[*self._paths[parent], token] for token, parent in zip(tokens, parents, strict=True)]
        self._paths += added
        return torch.cat([self._logits_after(path) for path in added])


def greedy_reference(target: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """transformers' own greedy tokens, not stopped by an end token."""
    ids = target.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


def check_all_trees(
    target: Any,
    prompts: list[list[int]],
    new_tokens: int,
    decoder_of: type[HalfRightDecoder] = HalfRightDecoder,
    builders: dict[str, TreeBuilder] = BUILDERS,
) -> None:
    vocabulary = target.config.vocab_size
    with TargetSession(target, max(map(len, prompts)) + new_tokens) as session:
        for prompt in prompts:
            wanted = greedy_reference(target, prompt, new_tokens)
            assert generate(session, Autoregressive(), prompt, GREEDY, new_tokens).ids == wanted
            for name, builder in builders.items():
                method = DrafterMethod(name, decoder_of(wanted, vocabulary), builder, GREEDY)
                out = generate(session, method, prompt, GREEDY, new_tokens)
                assert out.ids == wanted, name
                assert out.rounds < len(wanted) - 1, f"{name}: no draft was accepted, so nothing was tested"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TINY)
def test_tiny_targets(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(TINY[name]).to(dtype).eval()
    check_all_trees(target, [[5, 6, 7, 8], [90, 3]], new_tokens=40)


@pytest.mark.parametrize("name", TINY)
def test_methods_without_training(name: str) -> None:
    """A draft model here is the target with other weights: its own cache must be right for its architecture too."""
    torch.manual_seed(0)
    target, draft = (AutoModelForCausalLM.from_config(TINY[name]).double().eval() for _ in range(2))
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            mine.copy_(0.3 * mine + 0.7 * theirs)
    prompt, new_tokens = [5, 6, 7, 8, 5, 6], 40
    wanted = greedy_reference(target, prompt, new_tokens)
    decoder = DraftModelDecoder(draft, 4, 50, 97)
    methods: list[Method] = [PromptLookup("prompt_lookup"), Lookahead("lookahead")]
    decoders: list[StepwiseDecoder] = [decoder, DraftModelDecoder(target, 2, 50, 97)]
    methods += [
        SpecInfer("specinfer", decoders, [1, 2, 1, 1], 1, GREEDY),
        SpecInfer("alone", decoders[:1], [3], 2, GREEDY),
    ]
    counts = NgramModel([(np.array([*prompt, *wanted[:25], 1, 2]), np.ones(33))], 2, 97)
    ngram = NgramDecoder(counts, 4, target.device)
    methods += [DrafterMethod(f"ngram, {tree}", ngram, GROWERS[tree], GREEDY) for tree in GROWERS]
    methods += [DrafterMethod(f"draft model, {tree}", decoder, GROWERS[tree], GREEDY) for tree in GROWERS]
    with TargetSession(target, len(prompt) + new_tokens) as session:
        for method in methods:
            assert generate(session, method, prompt, GREEDY, new_tokens).ids == wanted, method.name


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_grown_trees(name: str) -> None:
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(TINY[name]).eval()
    check_all_trees(target, [[5, 6, 7, 8]], 40, HalfRightStepwiseDecoder, GROWERS)


def test_eager_attention() -> None:
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(TINY["llama"], attn_implementation="eager").eval()
    check_all_trees(target, [[5, 6, 7, 8]], new_tokens=30)


@pytest.mark.parametrize("name", ["stories260K", "neo3m_chat"])
def test_real_targets(name: str) -> None:
    if not (MATERIAL / name).is_dir():
        pytest.skip(f"{MATERIAL / name} is not there")
    target = AutoModelForCausalLM.from_pretrained(MATERIAL / name, dtype=torch.float32).eval()
    check_all_trees(target, [[1, 40, 50, 60], [1, 300, 301, 302, 17, 18]], new_tokens=60)


@pytest.mark.parametrize("inputs", ["embedding", "hidden", "both"])
def test_parallel_drafter(inputs: str) -> None:
    """An untrained drafter with its real cache: mostly wrong, never visible in the output."""
    torch.manual_seed(0)
    if (MATERIAL / "stories260K").is_dir():
        target = AutoModelForCausalLM.from_pretrained(MATERIAL / "stories260K", dtype=torch.float32).eval()
    else:
        target = AutoModelForCausalLM.from_config(TINY["llama"]).eval()
    drafter = load_drafter_class("parallel").from_target(target, {"num_masks": 3, "inputs": inputs}).eval()
    prompt, new_tokens = [1, 40, 50, 60], 40
    wanted = greedy_reference(target, prompt, new_tokens)
    with TargetSession(target, 60) as session:
        decoder = drafter.decoder(60)
        for _ in range(2):
            for name, builder in BUILDERS.items():
                out = generate(session, DrafterMethod(name, decoder, builder, GREEDY), prompt, GREEDY, new_tokens)
                assert out.ids == wanted, name
