"""A GGUF file as the target: equal logits, converted once, cached by the hash of its content."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftsmith.errors import UserError
from draftsmith.models.target import gguf_file
from draftsmith.models.target.gguf_file import converted_folder
from draftsmith.models.target.loading import load_target, weights_hash
from draftsmith.recipes.schema import TargetRecipe

gguf = pytest.importorskip("gguf")
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
HEADS, KV_HEADS = 4, 2


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=262, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def interleave_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows for RoPE: llama.cpp rotates neighbouring rows, transformers the two halves of a head."""
    return weight.unflatten(0, (heads, 2, -1)).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(file: Path, model: LlamaForCausalLM, architecture: str = "llama", quantized: bool = False) -> None:
    """Write the names of llama.cpp's converter, in F32 or, if `quantized`, Q8_0, with a byte-level vocabulary."""
    writer, config = gguf.GGUFWriter(str(file), architecture), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + number) for number in range(256 - len(letters))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "<unk>", "<pad>", *letters, "ab", "cd"])
    writer.add_token_types([3] * 4 + [1] * 258)
    writer.add_token_merges(["a b", "c d"])  # transformers 5.17 reads an array of one as a string
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            weight = interleave_halves(weight, HEADS if "q_proj" in name else KV_HEADS)
        stem, _, suffix = name.rpartition(".")
        kind = (
            gguf.GGMLQuantizationType.Q8_0
            if quantized and weight.shape[-1] % 32 == 0
            else gguf.GGMLQuantizationType.F32
        )
        name = f"{names.get_name(stem)}.{suffix}"
        writer.add_tensor(name, gguf.quants.quantize(weight.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def recipe(tmp_path: Path) -> TargetRecipe:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    return TargetRecipe(model=str(tmp_path), gguf_file="tiny.gguf", device="cpu")


@torch.no_grad()
def test_logits_equal_those_of_the_model(recipe: TargetRecipe) -> None:
    target, tokenizer = load_target(recipe)
    ids = torch.arange(20)[None] * 11 % 261
    torch.testing.assert_close(target(ids).logits, tiny_llama()(ids).logits, rtol=1e-5, atol=1e-5)
    assert target.dtype == torch.float32
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.eos_token, tokenizer.decode(tokenizer("Hi, you").input_ids)) == ("</s>", "Hi, you")


def test_quantized_weights_are_unpacked_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), quantized=True)
    recipe = TargetRecipe(model=str(tmp_path), gguf_file="tiny.gguf", dtype="bfloat16")
    weights = AutoModelForCausalLM.from_pretrained(converted_folder(recipe), dtype="auto").state_dict()
    for name, weight in tiny_llama().state_dict().items():
        step = weight.abs().max() * (1 / 127 + 1 / 256)  # of Q8_0, and of bf16
        assert (weights[name].float() - weight).abs().max() <= step, name
    assert caplog.messages == []


def test_converted_folder_is_an_ordinary_checkpoint(recipe: TargetRecipe) -> None:
    """vLLM and others load it: its config has no quantization."""
    folder = converted_folder(recipe)
    assert '"quantization_config"' not in (folder / "config.json").read_text()
    AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
    assert weights_hash(recipe) is not None


def test_other_content_or_dtype_gets_another_folder(recipe: TargetRecipe) -> None:
    first = converted_folder(recipe)
    half = converted_folder(recipe.model_copy(update={"dtype": "bfloat16"}))
    assert AutoModelForCausalLM.from_pretrained(half, dtype="auto").dtype == torch.bfloat16
    write_gguf(Path(recipe.model) / "tiny.gguf", tiny_llama(seed=1))
    assert len({first, half, converted_folder(recipe)}) == 3


def test_killed_conversion_is_repeated(recipe: TargetRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", kill)
        with pytest.raises(KeyboardInterrupt):
            converted_folder(recipe)
    assert converted_folder(recipe).is_dir()


def test_unreadable_files_are_reported(recipe: TargetRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"target\.gguf_file other\.gguf is not in .*: GGUF files there are tiny\.gguf"):
        converted_folder(recipe.model_copy(update={"gguf_file": "other.gguf"}))
    write_gguf(Path(recipe.model) / "rwkv.gguf", tiny_llama(), architecture="rwkv6")
    with pytest.raises(UserError, match=r"target\.gguf_file .*rwkv\.gguf cannot be loaded \(.*rwkv6"):
        converted_folder(recipe.model_copy(update={"gguf_file": "rwkv.gguf"}))
    (Path(recipe.model) / "broken.gguf").write_bytes(b"GGUF no more")
    with pytest.raises(UserError, match=r"broken\.gguf cannot be loaded"):
        converted_folder(recipe.model_copy(update={"gguf_file": "broken.gguf"}))
    monkeypatch.setattr(gguf_file, "is_gguf_available", lambda: False)
    with pytest.raises(UserError, match=r"needs the package gguf to be read: pip install 'draftsmith\[gguf\]'"):
        converted_folder(recipe.model_copy(update={"dtype": "float64"}))
