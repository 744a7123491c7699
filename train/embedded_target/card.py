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
    figures = TargetFigures(
        perplexity=heldout_perplexity(model, tokenizer, conversations),
        parameter_count=model.num_parameters(),
        architecture=describe_architecture(model.config),
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


def describe_architecture(config: Any) -> str:
    return (
        f"hidden size {config.hidden_size}, {config.num_hidden_layers} layers, {config.num_attention_heads} heads of "
        f"{config.head_dim} ({config.num_key_value_heads} key/value), {config.vocab_size} tokens, "
        f"{config.max_position_embeddings} positions"
    )


def write_card(folder: Path, figures: TargetFigures, training_note: str) -> None:
    """Writes `README.md`; `training_note` is one sentence with the steps and minutes of the run."""
    exact = "\n".join(f"| {name} | {share:.0%} |" for name, share in figures.exact_by_category.items())
    samples = "\n\n".join(
        f"**user**\n\n````text\n{question}\n````\n\n**assistant**\n\n````text\n{answer}\n````"
        for question, answer in figures.samples
    )
    card = CARD.format(
        millions=figures.parameter_count / 1e6,
        architecture=figures.architecture,
        perplexity=figures.perplexity,
        prompts=figures.prompt_count,
        answer_tokens=figures.answer_tokens,
        looping=figures.looping_share,
        truncated=figures.truncated_share,
        max_new_tokens=MAX_NEW_TOKENS,
        exact=exact,
        samples=samples,
        training_note=training_note,
        python=".".join(platform.python_version_tuple()[:2]),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, tiny, python]
---

# The embedded target

A {millions:.1f} M-parameter Llama chat model about the Python standard library. It exists so that draftsmith runs
on any machine, without a download: it is a real, trained target whose text a drafter can learn, not a useful assistant.
It knows the form of its answers; what it fills in is often invented, and copying from the prompt is unreliable.

Architecture: `LlamaForCausalLM`, {architecture}, byte-level BPE, tied embeddings.
Chat template with `{{% generation %}}` marks; `<|end|>` is the end of a turn and the eos token, `<|pad|>` is distinct
from it, there is no bos token.

## Training

From nothing, on conversations that `data/stdlib/conversations.py` builds from the docstrings and sources of the
machine's standard library (here Python {python}): questions from memory, questions about a source in the prompt,
several turns about one function, quoting from documentation snippets, rewriting and summaries. About one module in ten
is held out. {training_note}

Rebuild it on two CPU cores with `make target` (`recipes/target.yaml` sets the budget in minutes).

## Figures

Measured on held-out modules, greedy, at most {max_new_tokens} new tokens, over {prompts} prompts.

| figure | value |
|---|---|
| perplexity of the assistant tokens | {perplexity:.2f} |
| mean answer length, tokens | {answer_tokens:.0f} |
| answers that repeat a run of 8 tokens | {looping:.1%} |
| answers cut by the length limit | {truncated:.1%} |

Share of answers that are exactly the reference. `docstring` and `source` ask for text from memory about modules that
were never seen, so about nothing can be right there; the others could be read off the prompt, which a model this small
learns only in part.

| category | exact |
|---|---|
{exact}

## Samples

Held-out prompts, greedy answers.

{samples}

## Licence

The weights are under Apache-2.0. The training text is derived from the Python standard library, copyright Python
Software Foundation, under the PSF License Version 2; answers can quote it.
"""
