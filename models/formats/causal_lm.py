"""Drafters as complete causal language models: draft models, and PARD's shape (arXiv 2504.18583).

PARD drafts in one forward too: the newest token is followed by K equal mask tokens. That is a `parallel` drafter that
reads embeddings only and has one mask: the mask becomes the embedding of a token that no text has, the padding token
or the last one. Embedding and head are copies of the target's; readers take whole models.
"""

import json
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file

from draftsmith.errors import UserError
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.group_wise import GroupWiseDrafter, rarest_token
from draftsmith.models.drafters.draft_model import as_causal_lm
from draftsmith.models.formats.layout import (
    Exporter,
    Refusal,
    always,
    has_targets_class,
    no_scaled_embeddings,
    only,
)
from draftsmith.models.formats.reading import Checkpoint, Parameters, read_layers, take_borrowed
from draftsmith.models.groups.layers import OTHER_KINDS

DRAFT_MODEL_RULES = (
    no_scaled_embeddings("and other layers' classes do not", tuple(OTHER_KINDS)),
    only("draft_vocab_size", None, "engines need a draft model with the target's whole vocabulary"),
    only("sliding_window", None, "export of draft models with a sliding window is not supported yet"),
)
PARD_RULES = (
    Refusal(
        "distinct masks", lambda config: config.num_masks > 1 and not config.shared_mask,
        "PARD has one mask, and this drafter has {config.num_masks}",
        "drafter.options.shared_mask=true and drafter.options.inputs=embedding",
    ),
    only("inputs", "embedding", "a draft model reads tokens only, and this drafter reads {config.inputs}"),
    Refusal(
        "no masks", lambda config: not config.num_masks, "without masks it is a draft model", "drafter.kind=draft_model"
    ),
    only("mask_residual", False, "engines do not add the newest token's input to the masks"),
    only("markov_rank", 0, "PARD has no Markov head"),
    no_scaled_embeddings("and a mask is not scaled"),
    *DRAFT_MODEL_RULES,
)  # fmt: skip


def to_draft_model(drafter: Drafter) -> Checkpoint:
    """Convert a `draft_model` drafter to a standalone language model."""
    return _saved(drafter, tied=bool(drafter.config.target_config.get("tie_word_embeddings")), mask_token_id=None)


def to_pard(drafter: Drafter) -> Checkpoint:
    """Convert a parallel drafter with a shared mask to a language model in PARD's layout."""
    return _saved(drafter, tied=False, mask_token_id=rarest_token(drafter.config.target_config))


def _saved(drafter: Drafter, tied: bool, mask_token_id: int | None) -> Checkpoint:
    model = as_causal_lm(cast(GroupWiseDrafter, drafter), drafter.attached.target, tied)
    if mask_token_id is not None:
        model.get_input_embeddings().weight[mask_token_id] = cast(Any, drafter).masks[0]
        model.config.pard_token = mask_token_id
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size="1000GB")
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return Checkpoint({**config, "torch_dtype": config["dtype"]}, load_file(Path(folder) / "model.safetensors"))


def parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """Convert a language model, whose embedding and head must be the target's, into our parameters.

    Raises:
        UserError: Its layers are of another shape than the target's.
    """
    keys = checkpoint.keys
    of_parallel = keys.get("pard_token") is not None
    kind, own, _ = read_layers(checkpoint, target_config, with_own_rope=False, with_own_width=of_parallel)
    state = {name.removeprefix("model."): value for name, value in checkpoint.tensors.items()}
    borrowed = take_borrowed(state)
    options: dict[str, Any] = {"num_layers": keys.whole("num_hidden_layers", 1), "layers": kind, **own}
    if not of_parallel:
        return Parameters("draft_model", options, state, borrowed)
    mask, embedding = keys.whole("pard_token"), borrowed.get("embed_tokens")
    if embedding is None or embedding.ndim != 2 or mask >= len(embedding):
        raise UserError(f"config.json: `pard_token` is {mask}, which the checkpoint's embedding lacks: correct it")
    state["masks"] = embedding[mask : mask + 1].clone()
    options |= {"inputs": "embedding", "shared_mask": True}
    return Parameters("parallel", options, state, borrowed, other_row=mask)


_whole = partial(Exporter, read=parameters, needs_target=always, logits_fit=has_targets_class, first_token=True)
EXPORTERS = {
    ("draft_model", "vllm"): _whole(to_draft_model, refusals=DRAFT_MODEL_RULES, method="draft_model"),
    ("draft_model", "sglang"): _whole(to_draft_model, refusals=DRAFT_MODEL_RULES, method="STANDALONE"),
}
PARD_EXPORTERS = {
    ("parallel", "vllm"): _whole(to_pard, refusals=PARD_RULES, method="draft_model", parallel=True),
}
