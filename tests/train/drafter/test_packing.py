"""Packing: rows are nearly full, every document is in one row, and the target separates documents."""

from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import VOCABULARY, tiny_target
from transformers import BloomConfig, BloomForCausalLM

from draftsmith.errors import UserError
from draftsmith.models.target.features import target_features
from draftsmith.train.drafter.rows import check_packing, collate_right_padded, pack_by_length, pack_documents

# Typical lengths of conversations: many short ones, a few that fill a row.
LENGTHS = np.random.default_rng(0).lognormal(4.6, 0.8, 500).astype(int).clip(8, 512).tolist()


def test_packing_by_hand() -> None:
    """Rows of 10: 12 and 9 stay alone; 6 and 6 start rows; 4 fills the later of them, and 3 fits into the other."""
    assert pack_by_length([3, 6, 12, 4, 6, 9], 10) == [[2], [5], [1, 0], [4, 3]]
    assert pack_by_length([], 10) == []
    assert pack_by_length([5, 5, 5], 10) == [[0, 1], [2]]


def test_every_document_is_in_one_row_and_rows_are_full() -> None:
    rows = pack_by_length(LENGTHS, 512)
    assert sorted(index for row in rows for index in row) == list(range(len(LENGTHS)))
    sums = [sum(LENGTHS[index] for index in row) for row in rows]
    assert max(sums) <= 512
    assert len(rows) == -(-sum(LENGTHS) // 512)  # the minimum number of rows
    assert pack_by_length(LENGTHS, 512) == rows


def test_packed_row_restarts_positions() -> None:
    packed = pack_documents(
        [{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}, {"input_ids": [8, 9], "loss_mask": [1, 1]}]
    )
    assert packed["input_ids"].tolist() == [5, 6, 7, 8, 9]
    assert packed["loss_mask"].tolist() == [0, 0, 1, 1, 1]
    assert packed["position_ids"].tolist() == [0, 1, 2, 0, 1]
    batch = collate_right_padded([packed, pack_documents([{"input_ids": [4, 3], "loss_mask": [0, 1]}])])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo2", "phi3", "gpt2"]
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_features_equal_those_of_single_documents(model_type: str, attention: str) -> None:
    changes: dict[str, Any] = {"sliding_window": 4} if model_type in ("mistral", "gemma2", "phi3") else {}
    target = tiny_target(model_type, **changes)
    target.set_attn_implementation(attention)
    check_packing(target)
    parts = [torch.randint(3, VOCABULARY, (length,)) for length in (7, 12, 1, 5)]
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    packed = target_features(target, torch.cat(parts)[None], None, positions[None])[0]
    alone = torch.cat([target_features(target, part[None])[0] for part in parts])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def test_target_that_cannot_separate_documents_is_refused() -> None:
    """BLOOM uses ALiBi and takes no position ids."""
    torch.manual_seed(0)
    target = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)).eval()
    with pytest.raises(UserError, match=r"`data.packing`: a target of type bloom cannot .* set data.packing=false"):
        check_packing(target)
