"""Measures a finished embedded target on held-out modules and writes its model card.

Everything is measured on the exported checkpoint, in fp32, on conversations about modules that training never saw.
Shapes: B prompts of a batch, S tokens, V vocabulary.
"""

from __future__ import annotations

import math
import platform
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.data.stdlib.conversations import build_conversations
from draftsmith.train.embedded_target.build import collate, pack_rows

MAX_NEW_TOKENS = 192
REPEATED_RUN_TOKENS = 8
PERPLEXITY_ROWS = 64
BATCH_PROMPTS = 16
SHOWN_SAMPLES = 4


@dataclass
class TargetFigures:
    """What the card reports. Shares are fractions of the prompts; `exact_by_category` compares with the reference."""

    perplexity: float
    parameter_count: int
    architecture: str
    prompt_count: int = 0
    answer_tokens: float = 0.0
    looping_share: float = 0.0
    truncated_share: float = 0.0
    exact_by_category: dict[str, float] = field(default_factory=dict)
    samples: list[tuple[str, str]] = field(default_factory=list)


def has_repeated_ngram(ids: Sequence[int], n: int = REPEATED_RUN_TOKENS) -> bool:
    runs = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
    return len(set(runs)) < len(runs)


@torch.inference_mode()
def heldout_perplexity(model: PreTrainedModel, tokenizer: Any, conversations: Sequence[dict[str, Any]]) -> float:
    """exp of the mean loss over assistant tokens (answers and their end tokens), fp32 softmax."""
    rows = pack_rows(tokenizer, conversations, row_tokens=512, user_token_weight=0.0)[:PERPLEXITY_ROWS]
    loss_sum, token_count = 0.0, 0
    for start in range(0, len(rows), 4):
        batch = collate(rows[start : start + 4])
        weights_bs = batch.pop("loss_weights")[:, 1:]
        logits_bsv = model(**batch, use_cache=False).logits[:, :-1]
        labels = batch["input_ids"][:, 1:][weights_bs > 0]
        loss_sum += torch.nn.functional.cross_entropy(
            logits_bsv[weights_bs > 0].float(), labels, reduction="sum"
        ).item()
        token_count += len(labels)
    return math.exp(loss_sum / token_count)


@torch.inference_mode()
def greedy_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[dict[str, str]]]
) -> list[list[int]]:
    """Greedy answer ids for each prompt, end token included when it was reached."""
    tokenizer.padding_side = "left"
    answers: list[list[int]] = []
    for start in range(0, len(prompts), BATCH_PROMPTS):
        encoded = tokenizer.apply_chat_template(
            list(prompts[start : start + BATCH_PROMPTS]),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            padding=True,
            return_tensors="pt",
        )
        output_bs = model.generate(
            **encoded, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, pad_token_id=tokenizer.pad_token_id
        )
        for ids in output_bs[:, encoded["input_ids"].shape[1] :].tolist():
            end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
            answers.append(ids[:end])
    return answers


def measure_target(folder: Path, prompt_count: int = 240, seed: int = 0) -> TargetFigures:
    """Loads the checkpoint in `folder` and measures it on `prompt_count` held-out conversations' last turns."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    conversations = build_conversations(seed, "heldout")
    config = model.config
    figures = TargetFigures(
        perplexity=heldout_perplexity(model, tokenizer, conversations),
        parameter_count=model.num_parameters(),
        architecture=(
            f"hidden size {config.hidden_size}, {config.num_hidden_layers} layers, {config.num_attention_heads} heads "
            f"of {config.head_dim} ({config.num_key_value_heads} key/value), {config.vocab_size} tokens, "
            f"{config.max_position_embeddings} positions"
        ),
    )
    asked = conversations[:prompt_count]
    answers = greedy_answers(model, tokenizer, [conversation["messages"][:-1] for conversation in asked])
    figures.prompt_count = len(asked)
    figures.answer_tokens = sum(map(len, answers)) / len(answers)
    figures.looping_share = sum(map(has_repeated_ngram, answers)) / len(answers)
    figures.truncated_share = sum(ids[-1] != tokenizer.eos_token_id for ids in answers) / len(answers)
    exact: dict[str, list[bool]] = defaultdict(list)
    for conversation, ids in zip(asked, answers, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        exact[conversation["category"]].append(text == conversation["messages"][-1]["content"])
        if len(figures.samples) < SHOWN_SAMPLES and conversation["category"] not in ("docstring", "source"):
            figures.samples.append((conversation["messages"][-2]["content"], text))
    figures.exact_by_category = {name: sum(hits) / len(hits) for name, hits in sorted(exact.items())}
    return figures


def write_target_card(folder: Path, figures: TargetFigures, training_note: str) -> None:
    """Writes `README.md`; `training_note` is one sentence with the steps and minutes of the run."""
    template = Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    card = environment.from_string(template).render(
        figures=figures,
        max_new_tokens=MAX_NEW_TOKENS,
        training_note=training_note,
        python=".".join(platform.python_version_tuple()[:2]),
    )
    (folder / "README.md").write_text(card + "\n", encoding="utf-8")
