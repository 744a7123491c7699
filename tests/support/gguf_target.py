"""Targets as the GGUF files that llama.cpp serves, with their tokenizers."""

import json
from pathlib import Path
from typing import Any

import gguf
from transformers import PreTrainedModel

from draftsmith.models.formats.llamacpp import Key, architecture_of, write_gguf
from draftsmith.models.formats.reading import Checkpoint


def tokenizer_keys(tokenizer: Any, vocabulary: int) -> list[Key]:
    """Return the GGUF keys of a byte-level BPE tokenizer."""
    kinds = gguf.GGUFValueType
    names = [tokenizer.convert_ids_to_tokens(number) or f"[unused{number}]" for number in range(vocabulary)]
    special = set(tokenizer.all_special_ids)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    keys = {
        "model": ("gpt2", [kinds.STRING]),
        "pre": ("gpt-2", [kinds.STRING]),
        "tokens": (names, [kinds.ARRAY, kinds.STRING]),
        "token_type": (
            [int(gguf.TokenType.CONTROL if n in special else gguf.TokenType.NORMAL) for n in range(vocabulary)],
            [kinds.ARRAY, kinds.INT32],
        ),
        "merges": ([" ".join(pair) for pair in merges], [kinds.ARRAY, kinds.STRING]),
        "eos_token_id": (tokenizer.eos_token_id, [kinds.UINT32]),
        "add_bos_token": (False, [kinds.BOOL]),
    }
    found = [(f"tokenizer.ggml.{name}", value, types) for name, (value, types) in keys.items()]
    return [*found, ("tokenizer.chat_template", tokenizer.get_chat_template(), [kinds.STRING])]


def embedded_gguf(
    folder: Path, target: PreTrainedModel, tokenizer: Any, template: str | None = None, dtype: str = "f32"
) -> Path:
    """Write a target like a draft model of all its layers, with its chat template or another."""
    config, file = target.config.to_dict(), folder / "target.gguf"
    tensors = {name: value.float() for name, value in target.state_dict().items()}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    keys = tokenizer_keys(tokenizer, config["vocab_size"])
    if template is not None:
        keys[-1] = (keys[-1][0], template, keys[-1][2])
    write_gguf(file, Checkpoint(config, tensors), architecture_of("draft-simple", config), config, keys, dtype)
    return file
