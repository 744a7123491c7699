"""Checks of assumptions about a target by running it, for `doctor` and the start of a training."""

from contextlib import closing

import torch
from transformers import PreTrainedModel

from draftsmith.models.target.architectures import logit_shape, other_logits
from draftsmith.models.target.features import FINAL_FEATURES, FeatureTap, target_features
from draftsmith.models.target_logits import LogitShape

NUM_TRIED = 12  # tokens whose logits are compared
# Largest difference to the target's own logits, as a share of the largest logit: bf16 keeps 8 bits.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
TOLERANCE_OF_HALF = 0.03
# Documents by which a target shows that it keeps them apart; its tolerance is relative to the features' size, in half
# precision a multiple of its rounding unit.
PACKED_LENGTHS = (5, 9, 3)
PACKED_TOLERANCE_FRAC, PACKED_TOLERANCE_UNITS = 1e-3, 8.0


@torch.no_grad()
def check_logits(target: PreTrainedModel) -> LogitShape:
    """Check `logit_shape` against the target's own logits of a few tokens; return the shape.

    Raises:
        UserError: The target's logits are another function of the LM head's product.
    """
    shape, vocabulary = logit_shape(target), target.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, NUM_TRIED + 1, device=target.device)[None] * 7919 % vocabulary
    with closing(FeatureTap(target, (FINAL_FEATURES,))) as tap:
        logits = target(input_ids=ids, use_cache=False).logits
        product = target.get_output_embeddings()(tap.take())
    if logits.shape != product.shape:
        raise other_logits(target)
    difference = float((shape(product) - logits).abs().amax())
    if not difference <= TOLERANCE.get(product.dtype, TOLERANCE_OF_HALF) * float(logits.abs().amax()):
        raise other_logits(target, f" (largest difference {difference:.2g})")
    return shape


def keeps_documents_apart(target: PreTrainedModel) -> bool:
    """Return True if packed documents get the same features as each document alone; runs a short forward."""
    ids_s = torch.arange(sum(PACKED_LENGTHS), device=target.device) % target.get_input_embeddings().weight.shape[0]
    positions_s = torch.cat([torch.arange(length, device=target.device) for length in PACKED_LENGTHS])
    packed_sd = target_features(target, ids_s[None], None, positions_s[None])[0]
    alone_sd = torch.cat([target_features(target, part[None])[0] for part in ids_s.split(PACKED_LENGTHS)])
    tolerance_frac = max(PACKED_TOLERANCE_FRAC, PACKED_TOLERANCE_UNITS * torch.finfo(alone_sd.dtype).eps)
    return bool((packed_sd - alone_sd).float().abs().mean() <= tolerance_frac * alone_sd.float().abs().mean())
