"""A separate draft model: speculative sampling as it began (arXiv 2211.17192 and 2302.01318).

A language model of the target's own kind, with fewer layers, that reads tokens only. It is trained on the target's
answers like every drafter, by default towards the target's distribution (distillation raises alpha: 2310.08461), and
drafts one token at a time over its own KV cache (`TreeDecoder`).

It shares the target's embedding and LM head, frozen, so its width is the target's. A draft model that somebody else
has trained needs no training here: `kind: draft_model` in `eval.methods` takes any causal language model.

Shapes: N labelled rows, D hidden, E = D input width of the layers, W tree nodes of a call.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX, Drafter
from draftsmith.models.base.options import whole_number
from draftsmith.models.decoding.cached import TreeDecoder
from draftsmith.models.drafters.parallel import ParallelDrafter, ParallelDrafterConfig


class DraftModelConfig(ParallelDrafterConfig):
    """Options of the draft model, the keys of `drafter.options` in a recipe.

    Args:
        num_layers: Decoder layers of the target's kind.
        draft_depth: gamma, the longest path that is drafted, one forward of the layers a level.
        attention: Training backend: `folded`, `dense` or `flex`.
        loss: A name in `losses.LOSSES`; `ce` needs no teacher.
        init: Start from layers of the target, spread evenly from its first to its last (`target`), or at random.
    """

    model_type = MODEL_TYPE_PREFIX + "draft_model"

    def __init__(
        self,
        target_config: dict[str, Any] | None = None,
        target_name_or_path: str = "",
        num_layers: int = 2,
        draft_depth: int = 5,
        attention: str = "folded",
        loss: str = "kl",
        init: str = "target",
        **kwargs: Any,
    ) -> None:
        # One stream that reads tokens alone.
        fixed = {"num_masks": 0, "inputs": "embedding", "depth_weights": 1.0}
        options = {"num_layers": num_layers, "attention": attention, "loss": loss, "init": init}
        super().__init__(target_config, target_name_or_path, **{**kwargs, **options, **fixed})
        self.draft_depth = whole_number("draft_depth", draft_depth, at_least=1)


class DraftModel(ParallelDrafter):
    """The draft model q; see the module's docstring."""

    config_class = DraftModelConfig
    batch_decoders = Drafter.batch_decoders

    def build(self, config: ParallelDrafterConfig) -> None:
        super().build(config)
        self.masks.requires_grad_(False)  # there are none

    @torch.no_grad()
    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """With `init: target`, every so many of the target's layers and its final norm."""
        self.to(torch.promote_types(target.dtype, torch.float32))
        if self.config.init != "target":
            return
        source = target.base_model
        step = (len(source.layers) - 1) / max(1, len(self.layers) - 1)
        for index, layer in enumerate(self.layers):
            layer.load_state_dict(source.layers[round(index * step)].state_dict())
        self.norm.load_state_dict(source.norm.state_dict())

    def causal_lm(self, target: PreTrainedModel) -> PreTrainedModel:
        """The draft model as a model of its own, with a copy of the target's embedding and LM head.

        For transformers' assisted generation, and for serving engines: `save_pretrained` it beside the tokenizer.
        """
        config = copy.deepcopy(target.config)
        config.num_hidden_layers = len(self.layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: len(self.layers)]
        model = type(target)(config).to(dtype=target.dtype, device=target.device)
        model.get_input_embeddings().load_state_dict(target.get_input_embeddings().state_dict())
        model.get_output_embeddings().load_state_dict(target.get_output_embeddings().state_dict())
        model.base_model.layers.load_state_dict(self.layers.state_dict())
        model.base_model.norm.load_state_dict(self.norm.state_dict())
        return model.eval().requires_grad_(False)

    def feedback_of(self, hidden: Tensor) -> Tensor:
        """[R, D]; nothing is fed back but the token."""
        return hidden

    def drafted_inputs(self, input_ids: Tensor, feedback: Tensor) -> Tensor:
        """[W, E] of drafted tokens [W]."""
        return self.real_inputs(input_ids, feedback)

    def decoder(self, max_length_tokens: int) -> TreeDecoder:
        return TreeDecoder(self, max_length_tokens, self.config.draft_depth)


DRAFTER = DraftModel
