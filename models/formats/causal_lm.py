"""Draft models as complete causal language models: embedding and head are copies of the target's."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file

from draftsmith.errors import UserError
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.group_wise import GroupWiseDrafter
from draftsmith.models.drafters.draft_model import as_causal_lm
from draftsmith.models.formats.layout import Exporter, always, has_targets_class, no_scaled_embeddings, only
from draftsmith.models.formats.reading import Checkpoint, Parameters, read_layers, take_borrowed
from draftsmith.models.groups.layers import OTHER_KINDS

DRAFT_MODEL_RULES = (
    no_scaled_embeddings("and other layers' classes do not", tuple(OTHER_KINDS)),
    only("draft_vocab_size", None, "engines need a draft model with the target's whole vocabulary"),
    only("sliding_window", None, "export of draft models with a sliding window is not supported yet"),
)


def to_draft_model(drafter: Drafter) -> Checkpoint:
    """Convert a `draft_model` drafter to a standalone language model."""
    tied = bool(drafter.config.target_config.get("tie_word_embeddings"))
    model = as_causal_lm(cast(GroupWiseDrafter, drafter), drafter.attached.target, tied)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size="1000GB")
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return Checkpoint({**config, "torch_dtype": config["dtype"]}, load_file(Path(folder) / "model.safetensors"))


def parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """Convert a language model, whose embedding and head must be the target's, into our parameters.

    Raises:
        UserError: Its layers are of another shape than the target's, or it is a PARD drafter.
    """
    if checkpoint.keys.get("pard_token") is not None:
        raise UserError("config.json: a PARD drafter is not imported any more: train drafter.kind=parallel or peagle")
    kind, _, _ = read_layers(checkpoint, target_config, with_own_rope=False)
    state = {name.removeprefix("model."): value for name, value in checkpoint.tensors.items()}
    borrowed = take_borrowed(state)
    options = {"num_layers": checkpoint.keys.whole("num_hidden_layers", 1), "layers": kind}
    return Parameters("draft_model", options, state, borrowed)


EXPORTERS = {
    ("draft_model", to): Exporter(
        to_draft_model,
        parameters,
        DRAFT_MODEL_RULES,
        method,
        first_token=True,
        needs_target=always,
        logits_fit=has_targets_class,
    )
    for to, method in (("vllm", "draft_model"), ("sglang", "STANDALONE"))
}
