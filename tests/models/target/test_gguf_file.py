"""A GGUF file as the target: equal logits, converted once, cached by the hash of its content."""

import logging
import os
from pathlib import Path

import gguf
import pytest
import torch
from support.gguf_target import embedded_gguf
from support.tiny_models import smallest_llama
from support.tiny_tokenizers import CHATML, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from draftsmith.errors import UserError
from draftsmith.models.target import gguf_file
from draftsmith.models.target.gguf_file import converted_folder
from draftsmith.models.target.loading import load_ends, load_target, weights_hash
from draftsmith.recipes.schema import TargetRecipe

TOKENIZER = tiny_tokenizer(CHATML)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    return smallest_llama(seed, 340, hidden_size=32, num_attention_heads=4, num_key_value_heads=2).float()


@pytest.fixture
def recipe(tmp_path: Path) -> TargetRecipe:
    embedded_gguf(tmp_path, tiny_llama(), TOKENIZER)
    return TargetRecipe(model=str(tmp_path), gguf_file="target.gguf", device="cpu")


@torch.no_grad()
def test_logits_equal_those_of_the_model(recipe: TargetRecipe) -> None:
    """The file is written as an export is, and read by transformers."""
    target, tokenizer = load_target(recipe)
    ids = torch.arange(20)[None] * 11 % 340
    torch.testing.assert_close(target(ids).logits, tiny_llama()(ids).logits, rtol=1e-5, atol=1e-5)
    assert target.dtype == torch.float32
    assert tokenizer.chat_template == CHATML
    assert (tokenizer.eos_token, tokenizer.decode(tokenizer("Hi, you").input_ids)) == ("</s>", "Hi, you")
    ends = load_ends(recipe)
    assert torch.equal(ends.lm_head.weight, target.lm_head.weight)
    assert torch.equal(ends.model.norm.weight, target.model.norm.weight)
    assert len(ends.model.layers) == 0


def test_quantized_weights_are_unpacked_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    embedded_gguf(tmp_path, tiny_llama(), TOKENIZER, dtype="q8_0")
    recipe = TargetRecipe(model=str(tmp_path), gguf_file="target.gguf", dtype="bfloat16")
    weights = AutoModelForCausalLM.from_pretrained(converted_folder(recipe), dtype="auto").state_dict()
    for name, weight in tiny_llama().state_dict().items():
        step = weight.abs().max() * (1 / 127 + 1 / 256)  # of Q8_0, and of bf16
        assert (weights[name].float() - weight).abs().max() <= step, name
    assert [record.name for record in caplog.records] == [gguf_file.logger.name]


def test_converted_folder_is_an_ordinary_checkpoint(recipe: TargetRecipe) -> None:
    """vLLM and others load it: its config has no quantization."""
    folder = converted_folder(recipe)
    assert '"quantization_config"' not in (folder / "config.json").read_text()
    AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
    assert weights_hash(recipe) is not None


@pytest.mark.skipif(os.name != "posix", reason="needs permissions of files")
def test_cut_or_writable_folder_is_converted_again(recipe: TargetRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a umask that lets the group write, which the converted files do not keep."""
    before = os.umask(0o002)
    folder = converted_folder(recipe)
    os.umask(before)
    weights, tokenizer = folder / "model.safetensors", folder / "tokenizer.json"
    whole, converted = weights.read_bytes(), list[Path]()
    convert = gguf_file._convert
    monkeypatch.setattr(gguf_file, "_convert", lambda *given: (converted.append(given[2]), convert(*given)))
    assert (converted_folder(recipe), converted) == (folder, [])
    for spoil in (
        lambda: weights.write_bytes(whole[:-100]),
        lambda: tokenizer.write_bytes(tokenizer.read_bytes()[:50]),
        lambda: tokenizer.unlink(),
        lambda: weights.chmod(0o666),
        lambda: (folder / gguf_file.SUM_FILE).unlink(),
    ):
        spoil()
        del converted[:]
        assert (converted_folder(recipe), converted) == (folder, [folder])
        assert weights.read_bytes() == whole


def test_unreadable_files_are_reported(recipe: TargetRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"target\.gguf_file other\.gguf is not in .*: GGUF files there are target\.gguf"
    ):
        converted_folder(recipe.model_copy(update={"gguf_file": "other.gguf"}))
    writer = gguf.GGUFWriter(Path(recipe.model) / "rwkv.gguf", "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"target\.gguf_file .*rwkv\.gguf cannot be loaded \(.*rwkv6"):
        converted_folder(recipe.model_copy(update={"gguf_file": "rwkv.gguf"}))
    (Path(recipe.model) / "broken.gguf").write_bytes(b"GGUF no more")
    with pytest.raises(UserError, match=r"broken\.gguf cannot be loaded"):
        converted_folder(recipe.model_copy(update={"gguf_file": "broken.gguf"}))
    monkeypatch.setattr(gguf_file, "is_gguf_available", lambda: False)
    with pytest.raises(UserError, match=r"needs the package gguf: pip install -e '\.\[gguf\]'"):
        converted_folder(recipe.model_copy(update={"dtype": "float64"}))
