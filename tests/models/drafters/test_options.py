"""Invalid options of every kind: the message names the key, the value and the way out."""

from typing import Any

import pytest
from support.tiny_models import tiny_target

from draftsmith.errors import UserError
from draftsmith.models.base.registry import load_drafter_class

TARGET_LAYERS = 4
LOSSES = "loss`: must be ce, kl, tv, or some of these with a weight each, as in `{ce: 0.1, tv: 1.8}`"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("parallel", {"num_mask": 4}, "unknown key `drafter.options.num_mask`: did you mean `num_masks`"),
    ("parallel", {"inputs": "hiden"}, "inputs`: input should be 'embedding', 'hidden' or 'both', not 'hiden'"),
    ("parallel", {"intermediate_size": 4096}, "`: must be at most .*, the width of the target's MLPs, not 4096"),
    ("parallel", {"feature_layers": [1, 0]}, r"list of ascending layer numbers from 0 to 3 \(and -1 .*not \[1, 0\]"),
    ("parallel", {"depth_weights": [1.0, 0.5]}, r"must be one positive number d, for the weights .*, not \[1.0, 0.5\]"),
    (
        "eagle",
        {"num_masks": 4},
        "unknown key `drafter.options.num_masks`: valid keys there are attention, class",
    ),
    ("eagle3", {"feature_layers": [1, 4]}, r"feature_layers`: must be a list of ascending .* 0 to 3, not \[1, 4\]"),
    ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "`fc_norm` and `norm_before_fc` exclude each other"),
    ("eagle3", {"draft_vocab_size": 62}, "draft_vocab_size`: must be at most the target's vocabulary of 61 .*, not 62"),
    (
        "medusa2",
        {"lora_targets": ["q_proj", "query"]},
        r"no linear layer `query`; use some of down_proj, .*all-linear`",
    ),
    ("medusa2", {"lora_targets": "q_proj"}, "lora_targets`: must be `all-linear` or a list .*, not 'q_proj'"),
    ("dflash", {"mask_token_id": -1}, "mask_token_id`: must be a token id from 0 to 60, not -1"),
    ("dflash", {"block_size": 6, "sliding_window": 6}, "`sliding_window` must be greater than 6, the positions of a"),
    ("eagle3", {"draft_depth": 8, "sliding_window": 8}, "`sliding_window` must be greater than 8, the positions of a"),
    ("hydra", {"sliding_window": 9}, "that of the layer over the prefix: set `prefix_attention: true`"),
    ("dflash2", {"conv_group_size": 12}, "conv_group_size`: must divide the target's hidden size, 32"),
    ("dflash2", {"markov_rank": 4}, "markov_rank`: must be 0: the selector reads the previous token"),
    ("dflash2", {"draft_vocab_size": 8}, "selector_top_k`: must be at most `draft_vocab_size`, 8"),
    ("dflash2", {"selector_top_k": 62}, "selector_top_k`: must be at most the target's vocabulary of 61"),
    ("parallel", {"loss": {"ce": 1, "lk_alpha": 1}}, "options.loss`: `lk_alpha` was removed: use `tv`"),
    ("parallel", {"dpace_alpha": 0.5}, "key `drafter.options.dpace_alpha` was removed: use `until_first_error: true`"),
    *(("parallel", {"loss": wrong}, LOSSES) for wrong in ("mse", {"ce": 1, "mse": 1}, {"ce": 0}, {})),
]


@pytest.mark.parametrize(("kind", "options", "message"), WRONG)
def test_invalid_options_are_reported(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_drafter_class(kind).from_target(tiny_target(num_hidden_layers=TARGET_LAYERS), options)
