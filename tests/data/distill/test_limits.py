"""A target's length and vocabulary limits by its config; rows beyond them are reported before training."""

from pathlib import Path
from typing import Any

import datasets
import pytest
from support.tiny_models import long_rope
from transformers import DogeConfig, Gemma3TextConfig, GPT2Config, LlamaConfig, Mistral3Config

from draftsmith.data.distill.limits import TargetLimits, check_tokens, target_limits
from draftsmith.errors import UserError

MISTRAL = {"model_type": "mistral", "vocab_size": 9, "max_position_embeddings": 32}


def llama(**rope: Any) -> LlamaConfig:
    parameters = {"rope_theta": 1e4, **rope} if rope else None
    return LlamaConfig(vocab_size=100, max_position_embeddings=64, rope_parameters=parameters)


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        (llama(), (100, 64)),
        (GPT2Config(vocab_size=7, n_positions=48), (7, 48)),
        (llama(rope_type="yarn", factor=4.0), (100, 256)),
        (llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=16), (100, 64)),
        (llama(rope_type="llama3", factor=8.0, original_max_position_embeddings=8, low_freq_factor=1.0,
               high_freq_factor=4.0), (100, 64)),
        (Mistral3Config(text_config=MISTRAL), (9, 32)),
        (llama(rope_type="dynamic", factor=4.0), (100, 64)),
        (llama(**long_rope(24)), (100, 64, 24)),
        (Gemma3TextConfig(vocab_size=100, head_dim=8, max_position_embeddings=64, rope_parameters={
            "full_attention": long_rope(24), "sliding_attention": {"rope_theta": 1e4}}), (100, 64, 24)),
        (DogeConfig(vocab_size=100, max_position_embeddings=64, keep_window_size=32), (100, 32)),
    ],
    ids=["llama", "gpt2", "yarn", "yarn of fewer", "llama3", "wrapper", "dynamic", "longrope", "nested", "doge"],
)  # fmt: skip
def test_limits_are_read_from_the_config(config: Any, limits: tuple[int, ...]) -> None:
    assert target_limits(config) == TargetLimits(*limits)


def test_rows_beyond_the_limits_of_the_target_are_reported() -> None:
    rows = datasets.Dataset.from_dict({"input_ids": [[3, 9], [1, 2, 4, 5]]})
    folder = Path("data/tokens")
    check_tokens(rows, TargetLimits(10, 4), folder)
    check_tokens(rows, TargetLimits(), folder)
    with pytest.raises(
        UserError, match=r"data/tokens has the token id 9, and the target's embedding has 9 rows: use the"
    ):
        check_tokens(rows, TargetLimits(9, 4), folder)
    with pytest.raises(
        UserError, match=r"has a row of 4 tokens, but the target has 3 positions: set data.max_length_tok"
    ):
        check_tokens(rows, TargetLimits(10, 3), folder)
    with pytest.raises(UserError, match=r"RoPE changes for all rows of a batch with one beyond 2 tokens: set .* to 2 "):
        check_tokens(rows, TargetLimits(10, 9, 2), folder)
    negative = datasets.Dataset.from_dict({"input_ids": [[3, -1]]})
    with pytest.raises(UserError, match="has the token id -1, and no token has one below 0"):
        check_tokens(negative, TargetLimits(), folder)
