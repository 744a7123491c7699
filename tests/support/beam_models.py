"""Tiny fp64 models for beam search, one of them nearly another."""

import torch
from support.tiny_models import smallest_llama
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

V = 23
PROMPT = [5, 9, 3, 12]


def model(seed: int, like: PreTrainedModel | None = None, kind: str = "llama") -> PreTrainedModel:
    """fp64. `like`: most of another model's weights, for a draft model that is right now and then."""
    torch.manual_seed(seed)
    made: PreTrainedModel
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
        config = GPT2Config(vocab_size=V, bos_token_id=1, eos_token_id=2, initializer_range=0.4, **sizes)
        made = AutoModelForCausalLM.from_config(config).double().eval()
    else:
        made = smallest_llama(seed, V)
    if like is not None:
        with torch.no_grad():
            for mine, theirs in zip(made.parameters(), like.parameters(), strict=True):
                mine.copy_(0.12 * mine + 0.88 * theirs)
    return made
