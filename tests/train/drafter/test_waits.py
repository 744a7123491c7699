"""A training step waits for a CUDA device twice, and packed documents launch no further kernels: on a ghost device.

Autograd does not run on the ghost device: custom backwards do not wait, those of attention are called by hand.
"""

from typing import Any

import pytest
import torch
from support.ghost_device import NOT_WAITED_FOR, GhostDevice, ghost_device
from support.tiny_models import VOCABULARY, tiny_drafter_of, tiny_target
from torch import Tensor

from draftsmith.models.base.registry import drafter_kinds
from draftsmith.train.drafter.rows import collate_right_padded, pack_documents

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "dflash": [{"sample_from_anchor": True, "causal": True, "anchor_ratio": 0.6, "draft_vocab_size": 40}],
    "dspark": [{"markov_rank": 5, "draft_vocab_size": 40}],
    "eagle": [{"first_token": False, "draft_vocab_size": 40}],
    "eagle3": [{"draft_vocab_size": 40}, {"first_token": False}, {"fc_norm": True, "until_first_error": True}],
    "eagle_parallel": [{"keep_ratio": 0.6, "mask_residual": True, "draft_vocab_size": 40}],
    "hydra": [{"prefix_attention": True, "loss": "kl"}],
    "medusa": [{"until_first_error": True}],
    "parallel": [{"markov_rank": 5}],
    "peagle": [{"draft_vocab_size": 40, "keep_ratio": 0.7, "keep_ratio_min": 0.2}],
}
CASES: list[Any] = [
    *((kind, {}, 3) for kind in drafter_kinds()),
    *(pytest.param(kind, options, 3, marks=pytest.mark.slow) for kind in OPTIONS for options in OPTIONS[kind]),
    *[("parallel", {}, 1), ("eagle3", {}, 1)],
]


def step_batch(documents: int) -> dict[str, Tensor]:
    """Return two rows of 96 tokens in `documents` documents each."""
    generator, packed = torch.Generator().manual_seed(3), []
    for _ in range(2):
        parts = []
        for length in [len(part) for part in torch.arange(96).tensor_split(documents)]:
            ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
            parts.append({"input_ids": ids, "loss_mask": [int(t % 5 != 2) for t in range(length)]})
        packed.append(pack_documents(parts) if documents > 1 else parts[0])
    return collate_right_padded(packed)


def count_step(kind: str, options: dict[str, Any], documents: int) -> type[GhostDevice]:
    """Count waits and launches of a step's forward in bf16 autocast: the batch's labels, the target, the drafter."""
    target = tiny_target(num_hidden_layers=4).bfloat16()
    drafter = tiny_drafter_of(kind, target, **options).train()
    batch = step_batch(documents)
    with ghost_device() as ghosts:
        drafter.to("cuda:0").attach(target.to("cuda:0"))
        batch = {name: value.to("cuda:0") for name, value in batch.items()}
        ids, positions, mask = batch["input_ids"], batch.get("position_ids"), batch["loss_mask"]
        ghosts.counting = True
        with torch.no_grad():
            groups = drafter.groups(ids, mask, positions)
            counts = drafter.label_counts(groups)
            features, teacher = drafter.training_features(target, ids, positions)
            with torch.autocast("cuda", torch.bfloat16):
                drafter(ids, features, mask, positions, teacher, counts, groups)
        ghosts.counting = False
    return ghosts


@pytest.mark.parametrize(("kind", "options", "documents"), CASES)
def test_step_waits_twice(kind: str, options: dict[str, Any], documents: int) -> None:
    """transformers reads whether rows are packed, in each forward of the target; we read the number of rows."""
    ghosts = count_step(kind, options, documents)
    forwards_of_the_target = 2 if kind == "medusa2" else 1
    assert dict(ghosts.counts).get(("back", "tolist")) == 1, ghosts.lines
    assert ghosts.counts["back", "item"] == forwards_of_the_target, ghosts.lines
    assert ghosts.of("back") == forwards_of_the_target + 1, ghosts.lines
    assert {what for kind, what in ghosts.counts if kind == "in"} <= {NOT_WAITED_FOR}, ghosts.lines
