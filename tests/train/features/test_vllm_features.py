"""vLLM's files become our rows: streams in our order, the final norm put on. vLLM itself needs a GPU."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny_target
from support.tiny_runs import save_target

from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetRecipe
from draftsmith.train.features import vllm_engine as vllm_features
from draftsmith.train.features.vllm_engine import VllmFeatures, refuse_without_vllm, row_features, vllm_layers

LAYERS = (1, 3, -1)


def written_by_vllm(target: torch.nn.Module, row: list[int], file: Path) -> dict[str, torch.Tensor]:
    """The connector's file of a request: unnormed streams [S, L, D] in ascending order, and the prompt."""
    streams = [target_features(target, torch.tensor([row]), layers=(layer,))[0] for layer in (1, 3, 4)]
    save_file({"hidden_states": torch.stack(streams, dim=1), "token_ids": torch.tensor(row)}, file)
    return load_file(file)


def test_a_request_becomes_a_row(tmp_path: Path) -> None:
    target, row = tiny_target(num_hidden_layers=4), [5, 9, 33, 12, 40, 7]
    assert vllm_layers(LAYERS, 4) == vllm_layers((-1, 3, 1), 4) == [1, 3, 4]
    written = written_by_vllm(target, row, tmp_path / "request")
    for layers in (LAYERS, (-1, 1, 3), (3, 4, 1)):
        found = row_features(written, row, layers, 4, target.base_model.norm)
        expected = target_features(target, torch.tensor([row]), layers=layers)[0]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_another_request_is_refused(tmp_path: Path) -> None:
    target, row = tiny_target(num_hidden_layers=4), [5, 9, 33]
    written = written_by_vllm(target, row, tmp_path / "request")
    for other, layers in (([5, 9, 34], LAYERS), (row[:2], LAYERS), (row, (1, -1))):
        with pytest.raises(UserError, match=r"vLLM wrote hidden states of shape \[3, 3, 32\] for a row of"):
            row_features(written, other, layers, 4, target.base_model.norm)


def test_without_vllm_or_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for found, message in ((None, "needs vLLM: pip install"), (object(), "needs a CUDA device")):
        monkeypatch.setattr(vllm_features.importlib.util, "find_spec", lambda _, found=found: found)
        with pytest.raises(UserError, match=f"data.features.engine vllm {message}"):
            refuse_without_vllm()


@pytest.mark.cuda
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_vllm_extracts_what_transformers_computes(tmp_path: Path) -> None:
    """A Llama with heads of 64, which vLLM's kernels know; bf16 on both sides, so equal to a few of its steps."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    save_target(tmp_path / "target", **sizes)
    recipe = TargetRecipe(model=str(tmp_path / "target"), dtype="bfloat16", device="cpu")
    target, _ = load_target(recipe)
    rows = [[3 + i % 50 for i in range(length)] for length in (30, 7, 19)]
    engine = VllmFeatures(recipe, target, LAYERS, 30, tmp_path)
    found = dict(engine.features(rows))
    assert list((tmp_path / "vllm.partial").iterdir()) == []
    for number, row in enumerate(rows):
        expected = target_features(target, torch.tensor([row]), layers=LAYERS)[0].float()
        difference = (found[number].float() - expected).norm() / expected.norm()
        assert difference < 2**-6
