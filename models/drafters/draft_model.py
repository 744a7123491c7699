"""A separate draft model: speculative sampling as first published (arXiv 2211.17192 and 2302.01318).

A language model of the target's own kind, with fewer layers, that reads tokens only. It is trained on the target's
answers like every drafter, by default towards the target's distribution (distillation raises alpha: 2310.08461), and
drafts one token at a time over its own KV cache (`TreeDecoder`).

It shares the target's embedding and LM head, frozen, so its width is the target's. A draft model that somebody else
has trained needs no training here: `kind: draft_model` in `eval.methods` takes any causal language model.

Shapes: D hidden, E = D input width of the layers.
"""

import copy

from pydantic import Field
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.group_wise import GroupWiseDrafter, GroupWiseOptions
from draftsmith.models.base.options import DraftDepth, Init, Layers, NumLayers
from draftsmith.models.target.view import FULL_ATTENTION


class DraftModelConfig(DrafterConfig):
    model_type = MODEL_TYPE_PREFIX + "draft_model"

    class Options(GroupWiseOptions):
        """Options of `drafter.kind: draft_model`. Layers of the target that it starts from are spread evenly."""

        num_layers: NumLayers = 2
        draft_depth: DraftDepth = 5
        init: Init = "target"
        layers: Layers = Field(None, validate_default=True)


class DraftModel(GroupWiseDrafter):
    """The draft model q: decoder layers of the target's kind that read tokens only."""

    config_class = DraftModelConfig

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """With `init: target`, copy layers of the target, evenly spread from first to last, and its final norm."""
        if not self.takes_target_layers:
            return
        source = target.base_model
        step = (len(source.layers) - 1) / max(1, len(self.layers) - 1)
        for index, layer in enumerate(self.layers):
            layer.load_state_dict(source.layers[round(index * step)].state_dict())
        self.norm.load_state_dict(source.norm.state_dict())

    def real_inputs(self, input_ids: Tensor, previous_features: Tensor) -> Tensor:
        """Return the layers' inputs, embeddings [..., E] of tokens [...]; features are not read."""
        return self.attached.embedding(input_ids).to(self.dtype)


def as_causal_lm(drafter: GroupWiseDrafter, target: PreTrainedModel, tied: bool) -> PreTrainedModel:
    """Put the drafter's layers between copies of the target's embedding and LM head, in the drafter's dtype.

    For transformers' assisted generation and for serving engines: `save_pretrained` it with the tokenizer.

    Args:
        drafter: A drafter whose layers read embeddings only.
        tied: Whether embedding and head are one tensor.
    """
    config = copy.deepcopy(target.config)
    if drafter.config.layers != "target":
        kept = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
        config = AutoConfig.for_model(**drafter.config.layers_of, **{key: getattr(config, key, None) for key in kept})
    config.num_hidden_layers, config.tie_word_embeddings = len(drafter.layers), tied
    config.intermediate_size = drafter.config.layers_of["intermediate_size"]
    if getattr(config, "sliding_window", None):  # the target's, which the drafter's layers do not take over
        config.sliding_window = None
    if getattr(config, "layer_types", None):
        config.layer_types = [FULL_ATTENTION] * len(drafter.layers)
    model = AutoModelForCausalLM.from_config(config).to(dtype=drafter.dtype, device=target.device)
    model.get_input_embeddings().load_state_dict(target.get_input_embeddings().state_dict())
    model.get_output_embeddings().load_state_dict(target.get_output_embeddings().state_dict())
    model.base_model.layers.load_state_dict(drafter.layers.state_dict())
    model.base_model.norm.load_state_dict(drafter.norm.state_dict())
    return model.eval().requires_grad_(False)


DRAFTER = DraftModel
