"""Speculative sampling with a published draft model (arXiv 2211.17192, 2302.01318).

Any causal language model with the target's vocabulary, any tree, any temperature. Its KV cache keeps accepted draft
tokens; the others are overwritten. `models/drafters/draft_model.py` is the kind of drafter that is trained here.

Shapes: R rows of a forward, W tree nodes of a call, V the target's vocabulary, P prompt, n newly committed tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.eval.methods.drafter import TreeDrafter, build_tree_drafter
from draftsmith.eval.methods.registry import DecodingSetting
from draftsmith.models.decoding.decoders import ALL_TOKENS, GrowingTree
from draftsmith.models.decoding.forward import Forward
from draftsmith.models.decoding.kv_cache import LONGEST_TREE_NODES, KVCache
from draftsmith.models.kernels.attention import use_own_attention
from draftsmith.models.kernels.cpu_kernels import pack_linears
from draftsmith.models.target.windows import architecture, has_recurrent_layers, tokens_within_windows
from draftsmith.models.weights import load_weights, read_pretrained
from draftsmith.recipes.schema import Section


class DraftModelDecoder:
    """`draftsmith.models.decoding.decoders.StepwiseDecoder` that drafts with a causal language model.

    Args:
        model: The draft model, in eval mode.
        num_depths: gamma, the most draft tokens along one path.
        max_length_tokens: Most committed tokens, the prompt included.
        vocab_size: V, the size of the target's vocabulary. The draft model's token ids from V on are never drafted;
            tokens of the target that it lacks get probability 0.
    """

    def __init__(self, model: Any, num_depths: int, max_length_tokens: int, vocab_size: int) -> None:
        self.num_depths, self.columns = num_depths, ALL_TOKENS
        self._vocab_size, self._cache = vocab_size, KVCache(max_length_tokens + LONGEST_TREE_NODES)
        self._forward = Forward(model, self._cache)
        self._pending: list[int] = []
        self._tree = GrowingTree()  # node i > 0 has row i - 1 after the committed ones
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and token

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
        self._cache.length = 0
        self._pending = prompt_ids.tolist()
        self._nodes.clear()

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        ids, node = committed_ids.tolist(), 0
        accepted_rows: list[int] = []  # rows of the drafted path that was committed
        for token in ids[:-1]:  # the newest is read next, though a tree may have dropped a node of it
            if (node, token) not in self._nodes:
                break
            node = self._nodes[node, token]
            accepted_rows.append(node - 1)
        self._cache.keep(accepted_rows)
        self._pending += ids[len(accepted_rows) :]
        self._nodes.clear()

    def begin(self) -> Tensor:
        """Read the newly committed tokens; return fp32 logits [1, V] of the token after the newest."""
        count = len(self._pending)
        if self._cache.length == 0:
            logits, _ = self._forward.read_prompt(self._pending)
        else:
            logits, _ = self._forward(self._pending, tuple(range(-1, count - 1)), range(count))
            self._cache.length += count
        self._pending = []
        self._tree.begin()
        return self._of_target(logits[-1:])

    def expand(self, tokens: list[int] | Tensor, parents: list[int]) -> Tensor:
        """Add W nodes with these tokens below `parents` to the tree; return fp32 logits [W, V] for their children."""
        tokens = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        for node, below in enumerate(zip(parents, tokens, strict=True), start=len(self._tree.depths)):
            self._nodes.setdefault(below, node)
        depths = [depth - 1 for depth in self._tree.grow(parents)]
        return self._of_target(self._forward(tokens, tuple(self._tree.parents), depths)[0])

    def _of_target(self, logits: Tensor) -> Tensor:
        """Return fp32 logits [R, V] of the target's tokens."""
        logits = logits[:, : self._vocab_size].float()
        missing = self._vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class DraftModelMethod:
    """Method `draft_model` of a recipe: speculative sampling with a published draft model."""

    class Options(Section):
        """Options of method `draft_model`: a Hugging Face causal LM with the target's vocabulary."""

        model: str = Field(description="Hub id or local folder of the draft model")
        num_tokens: int = Field(4, ge=1, description="gamma, the most draft tokens along one path")

    @classmethod
    def make(cls, options: Options, setting: DecodingSetting) -> TreeDrafter:
        decoder = draft_model_decoder(options.model, options.num_tokens, setting)
        return build_tree_drafter(setting.recipe, decoder, setting.sampling, setting.generator)


def draft_model_decoder(location: str, num_tokens: int, setting: DecodingSetting) -> DraftModelDecoder:
    """Load a draft model from a folder or Hub id; return a decoder that drafts paths of up to `num_tokens` tokens.

    Raises:
        UserError: The draft model cannot be loaded, or has another vocabulary, recurrent layers or too few positions.
    """
    model = _load(location, setting.target, setting.tokenizer)
    if has_recurrent_layers(model):
        raise UserError(
            f"method {setting.recipe.name}: {location} ({architecture(model.config)}) has recurrent layers, which are "
            "supported in targets only: use a draft model with attention layers"
        )
    limit = tokens_within_windows(model)  # its trees have a mask for full attention alone
    if limit is not None and limit < setting.max_length_tokens:
        raise UserError(
            f"method {setting.recipe.name}: {location} has {limit} positions, but a sequence may grow to "
            f"{setting.max_length_tokens} tokens: lower eval.max_new_tokens or use another draft model"
        )
    vocab_size = setting.target.config.get_text_config().vocab_size
    return DraftModelDecoder(model, num_tokens, setting.max_length_tokens, vocab_size)


@lru_cache(maxsize=8)
def _load(location: str, target: PreTrainedModel, tokenizer: Any) -> PreTrainedModel:
    tokens = read_pretrained("draft model", location, lambda: AutoTokenizer.from_pretrained(location))
    vocabulary = tokens.get_vocab()
    model = load_weights("draft model", location, AutoModelForCausalLM, dtype=target.dtype)
    if vocabulary != tokenizer.get_vocab():
        raise UserError(
            f"draft model {location} has another vocabulary than the target: speculative sampling compares tokens, so "
            "use a model of the same family"
        )
    model = model.to(target.device).eval().requires_grad_(False)
    use_own_attention(model)
    pack_linears(model)
    return model


METHOD = DraftModelMethod
