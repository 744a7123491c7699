"""Train the embedded target, then measure it on held-out modules.

    python embedded_target/train.py [--output-dir FOLDER] [--work-dir FOLDER] [--max-steps N] [--compile]

After Ctrl-C the same command resumes from the last checkpoint in the work folder; later steps are lost.

Rows: whole conversations are packed into rows of 512 tokens; positions restart at each conversation and a 4-D mask
keeps conversations from seeing each other, so a row equals its conversations run alone.
Loss: weighted cross entropy in fp32; assistant tokens (content and end token) weigh 1, user tokens 0.3, which teach the
language.

Shapes: B rows, S tokens of a row, V vocabulary.
"""

from __future__ import annotations

import argparse
import io
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import zstandard
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

ROOT = Path(__file__).resolve().parents[1]
CONVERSATIONS = ROOT / "data" / "embedded" / "conversations.jsonl.zst"
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
# Small on purpose: at so few tokens per parameter, twice the tokens in the same hour are worth more than twice the
# parameters (Chinchilla's fit puts 4 M parameters 0.4 nats below 7 M at this compute).
MODEL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": True,
}
ROW_TOKENS = 512
ROWS_PER_STEP = 4
USER_TOKEN_WEIGHT = 0.3
MAX_STEPS = 4520  # 7.7 epochs
DECAY_FRAC = 0.6  # of the steps, at the end
MEASURED_PROMPTS, MEASURED_ROWS = 240, 64
MAX_NEW_TOKENS = 192
REPEATED_RUN_TOKENS = 8

Record = dict[str, Any]


def read_conversations(split: str) -> list[Record]:
    """Read the shipped conversations of a split, `train` or `heldout`."""
    with CONVERSATIONS.open("rb") as stream:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(stream), encoding="utf-8")
        return [record for record in map(json.loads, lines) if record["split"] == split]


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with the chat template; the end-of-turn token is eos, there is no bos."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"],
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
        model_max_length=MODEL["max_position_embeddings"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def pack_rows(
    tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Record], user_token_weight: float
) -> list[Record]:
    """Pack whole conversations, the longest first, each into the first row with room; longer ones are left out.

    Each row: `input_ids`, `position_ids`, `segments` (conversation number within the row, -1 for padding) and
    `loss_weights` (weight of predicting this very token; 0 for a conversation's first token and for padding).
    """
    encoded = [
        tokenizer.apply_chat_template(c["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        for c in conversations
    ]
    rows: list[Record] = []
    for one in sorted(encoded, key=lambda one: -len(one["input_ids"])):
        ids = one["input_ids"]
        if len(ids) > ROW_TOKENS:
            continue
        row = next((row for row in rows[-400:] if len(row["input_ids"]) + len(ids) <= ROW_TOKENS), None)
        if row is None:
            row = {"input_ids": [], "position_ids": [], "segments": [], "loss_weights": []}
            rows.append(row)
        row["segments"] += [max(row["segments"], default=-1) + 1] * len(ids)
        row["input_ids"] += ids
        row["position_ids"] += range(len(ids))
        row["loss_weights"] += [0.0] + [1.0 if answer else user_token_weight for answer in one["assistant_masks"][1:]]
    fillers = {"input_ids": tokenizer.pad_token_id, "position_ids": 0, "segments": -1, "loss_weights": 0.0}
    return [{key: row[key] + [fill] * (ROW_TOKENS - len(row[key])) for key, fill in fillers.items()} for row in rows]


def collate(rows: Sequence[Record]) -> dict[str, Tensor]:
    """Stack rows; `attention_mask` [B, 1, S, S] is True where a token may be seen (same conversation, not later)."""
    batch = {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "position_ids", "loss_weights")}
    segments_bs = torch.tensor([row["segments"] for row in rows])
    same_bss = segments_bs[:, :, None] == segments_bs[:, None, :]
    batch["attention_mask"] = torch.tril(same_bss)[:, None]
    return batch


class TargetTrainer(Trainer):
    """A Trainer with the weighted next-token loss."""

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        inputs = dict(inputs)
        weights_bs = inputs.pop("loss_weights")[:, 1:]
        outputs = model(**inputs, use_cache=False)
        counted = weights_bs > 0
        losses = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1][counted].float(), inputs["input_ids"][:, 1:][counted], reduction="none"
        )
        weights = weights_bs[counted]
        loss = (losses * weights).sum() / weights.sum()
        return (loss, outputs) if return_outputs else loss


def train(options: argparse.Namespace, conversations: list[Record]) -> None:
    """Train on the conversations and write model, tokenizer and template to `options.output_dir`."""
    tokenizer = train_tokenizer([message["content"] for c in conversations for message in c["messages"]])
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL, bos_token_id=None, **ends))
    arguments = TrainingArguments(
        output_dir=str(options.work_dir),
        use_cpu=not torch.cuda.is_available(),
        max_steps=options.max_steps,
        per_device_train_batch_size=ROWS_PER_STEP,
        learning_rate=2e-3,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": int(DECAY_FRAC * options.max_steps), "decay_type": "linear"},
        warmup_steps=min(100, options.max_steps // 10),
        weight_decay=0.05,
        adam_beta2=0.95,
        torch_compile=options.compile,
        logging_steps=25,
        save_steps=200,
        save_total_limit=1,
        label_names=["loss_weights"],
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
    )
    rows = pack_rows(tokenizer, conversations, USER_TOKEN_WEIGHT)
    trainer = TargetTrainer(model=model, args=arguments, data_collator=collate, train_dataset=rows)
    checkpoint = get_last_checkpoint(options.work_dir) if Path(options.work_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=checkpoint)
    model.to(torch.bfloat16)
    model.config.use_cache = True  # the Trainer turned it off
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=256, **ends)
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)
    # Transformers 5 writes names that release 4 (and engines built on it) cannot read; both read these.
    file = options.output_dir / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens", SPECIAL_TOKENS[2:])
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@torch.inference_mode()
def measure(folder: Path, conversations: list[Record]) -> dict[str, Any]:
    """Measure the exported checkpoint, in fp32: the perplexity of answers, and greedy answers to last turns."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loss_sum, loss_tokens = 0.0, 0
    for row in pack_rows(tokenizer, conversations, 0.0)[:MEASURED_ROWS]:
        batch = collate([row])
        counted_bs = batch.pop("loss_weights")[:, 1:] > 0
        logits = model(**batch, use_cache=False).logits[:, :-1][counted_bs]
        labels = batch["input_ids"][:, 1:][counted_bs]
        loss_sum += torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum").item()
        loss_tokens += len(labels)
    lengths, looping, cut, exact = [], [], [], defaultdict(list)
    for conversation in conversations[:MEASURED_PROMPTS]:
        *turns, answer = conversation["messages"]
        prompt = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**prompt, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        ids = output[0, prompt["input_ids"].shape[1] :].tolist()
        runs = [tuple(ids[at : at + REPEATED_RUN_TOKENS]) for at in range(len(ids) - REPEATED_RUN_TOKENS + 1)]
        lengths.append(len(ids))
        looping.append(len(set(runs)) < len(runs))
        cut.append(ids[-1] != tokenizer.eos_token_id)
        exact[conversation["category"]].append(tokenizer.decode(ids, skip_special_tokens=True) == answer["content"])
    return {
        "perplexity of the assistant tokens": math.exp(loss_sum / loss_tokens),
        "mean answer length, tokens": sum(lengths) / len(lengths),
        f"answers that repeat a run of {REPEATED_RUN_TOKENS} tokens": sum(looping) / len(looping),
        "answers cut by the length limit": sum(cut) / len(cut),
        "exact": {category: sum(hits) / len(hits) for category, hits in sorted(exact.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=ROOT / "models" / "embedded_target")
    parser.add_argument(
        "--work-dir", type=Path, default=Path("runs") / "target", help="folder of checkpoints to resume from"
    )
    parser.add_argument("--max-steps", type=int, default=MAX_STEPS)
    parser.add_argument("--conversations", type=int, help="read only the first N of each split, for a trial")
    parser.add_argument("--compile", action="store_true", help="compile the training step")
    options = parser.parse_args()
    train(options, read_conversations("train")[: options.conversations])
    figures = measure(options.output_dir, read_conversations("heldout")[: options.conversations])
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
