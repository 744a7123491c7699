"""Training of the embedded target: tokenizer, packed rows, model, Trainer, export.

Rows: whole conversations are packed into rows of `row_tokens`; positions restart at each conversation and a 4-D mask
keeps conversations from seeing each other, so a row equals its conversations run alone.
Loss: weighted cross entropy in fp32; assistant tokens (content and end token) weigh 1, user tokens less.

Shapes: B rows, S tokens of a row, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer

from draftsmith.recipes.run_folder import share_as_usual
from draftsmith.recipes.target_schema import ModelSection

END_TOKEN, PAD_TOKEN = "<|end|>", "<|pad|>"
SPECIAL_TOKENS = [PAD_TOKEN, END_TOKEN, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '<|assistant|>\n' -}}"
    "{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{{- '\n' -}}"
    "{%- else -%}"
    "{{- '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)


def train_tokenizer(texts: Sequence[str], model: ModelSection) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the chat template; the end-of-turn token is eos, there is no bos."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=model.vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=SPECIAL_TOKENS[2:],
        clean_up_tokenization_spaces=False,
        model_max_length=model.max_position_embeddings,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(model: ModelSection, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        **model.model_dump(exclude={"rope_theta"}),
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and its 0/1 assistant mask (answer and end token)."""
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return encoded["input_ids"], encoded["assistant_masks"]


def pack_rows(
    tokenizer: PreTrainedTokenizerFast,
    conversations: Sequence[dict[str, Any]],
    row_tokens: int,
    user_token_weight: float,
) -> list[dict[str, list[Any]]]:
    """First-fit-decreasing packing of whole conversations; those longer than a row are left out.

    Each row: `input_ids`, `position_ids`, `segments` (conversation number within the row, -1 for padding) and
    `loss_weights` (weight of predicting this very token; 0 for a conversation's first token and for padding).
    """
    encoded = [encode(tokenizer, conversation["messages"]) for conversation in conversations]
    encoded = [pair for pair in encoded if len(pair[0]) <= row_tokens]
    bins: list[list[tuple[list[int], list[int]]]] = []
    room: list[int] = []
    for pair in sorted(encoded, key=lambda pair: -len(pair[0])):
        size = len(pair[0])
        index = next((i for i in range(max(0, len(room) - 400), len(room)) if room[i] >= size), None)
        if index is None:
            bins.append([])
            room.append(row_tokens)
            index = len(bins) - 1
        bins[index].append(pair)
        room[index] -= size
    return [_row(pairs, row_tokens, user_token_weight, tokenizer.pad_token_id) for pairs in bins]


def _row(
    pairs: Sequence[tuple[list[int], list[int]]], row_tokens: int, user_token_weight: float, pad_id: int
) -> dict[str, list[Any]]:
    row: dict[str, list[Any]] = {"input_ids": [], "position_ids": [], "segments": [], "loss_weights": []}
    for segment, (ids, mask) in enumerate(pairs):
        row["input_ids"] += ids
        row["position_ids"] += range(len(ids))
        row["segments"] += [segment] * len(ids)
        row["loss_weights"] += [0.0] + [1.0 if answer else user_token_weight for answer in mask[1:]]
    missing = row_tokens - len(row["input_ids"])
    for key, filler in (("input_ids", pad_id), ("position_ids", 0), ("segments", -1), ("loss_weights", 0.0)):
        row[key] += [filler] * missing
    return row


def collate(rows: Sequence[dict[str, list[Any]]]) -> dict[str, Tensor]:
    """Stacks rows; `attention_mask` [B, 1, S, S] is True where a token may be seen (same conversation, not later)."""
    batch = {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "position_ids", "loss_weights")}
    segments_bs = torch.tensor([row["segments"] for row in rows])
    same_bss = segments_bs[:, :, None] == segments_bs[:, None, :]
    batch["attention_mask"] = torch.tril(same_bss)[:, None]
    return batch


class TargetTrainer(Trainer):
    """Trainer with the weighted next-token loss."""

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        weights_bs = inputs["loss_weights"][:, 1:]
        outputs = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            attention_mask=inputs["attention_mask"],
            use_cache=False,
        )
        counted = weights_bs > 0
        losses = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1][counted].float(), inputs["input_ids"][:, 1:][counted], reduction="none"
        )
        weights = weights_bs[counted]
        loss = (losses * weights).sum() / weights.sum()
        return (loss, outputs) if return_outputs else loss


def export_target(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, dtype: torch.dtype
) -> None:
    """Writes model, tokenizer, template and generation settings so that Transformers and vLLM load the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().to(dtype) for name, value in model.state_dict().items()}
    copy = LlamaForCausalLM(LlamaConfig.from_dict(model.config.to_dict())).to(dtype)
    copy.load_state_dict(state)
    copy.config.dtype = dtype
    copy.config.use_cache = True  # the Trainer turned it off
    copy.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    copy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _keep_portable_names(folder)
    share_as_usual(folder)


def _keep_portable_names(folder: Path) -> None:
    """Transformers 5 writes names that release 4 (and engines built on it) cannot read; both read these."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens", SPECIAL_TOKENS[2:])
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
