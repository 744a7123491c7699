"""Answers from `transformers`' own `generate`: no extra dependency, any causal language model, CPU or GPU.

Prompts are sorted by length and padded on the left, in batches. Sampling is by the Gumbel-max trick with one generator
a row, seeded by the recipe's seed and the prompt: argmax(log p + g) with g Gumbel is a draw from p, so an answer does
not depend on the batch that it was generated in, and a resumed run samples what an uninterrupted one would have.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.data.chat_tokens import template_end_token
from draftsmith.data.engine import AnswerSampling, Completion
from draftsmith.recipes.errors import UserError

BATCHES_AT_ONCE = 4


class TransformersEngine:
    """Batched generation with a loaded target.

    Args:
        model: The target, in eval mode.
        tokenizer: Its tokenizer; only its end and padding tokens are used.
        batch_size: Rows of one forward pass.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int) -> None:
        self.model = model
        self.batch_size = batch_size
        self.concurrency = batch_size * BATCHES_AT_ONCE
        self.max_length_tokens: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.end_ids = answer_end_ids(model, tokenizer)
        # Whatever pads is masked on the left, and cut off behind the end token on the right: it may well be the eos.
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end_ids[0]

    def generate(self, prompts: list[list[int]], sampling: AnswerSampling) -> list[Completion]:
        """One completion for each prompt, in the prompts' order."""
        completions: list[Completion | None] = [None] * len(prompts)
        # Longest first: a batch size that does not fit in memory fails at once, not after hours.
        by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]), reverse=True)
        for start in range(0, len(by_length), self.batch_size):
            rows = by_length[start : start + self.batch_size]
            for row, completion in zip(rows, self._generate_batch([prompts[r] for r in rows], sampling), strict=True):
                completions[row] = completion
        return [completion for completion in completions if completion is not None]

    def _generate_batch(self, prompts: list[list[int]], sampling: AnswerSampling) -> list[Completion]:
        width = max(len(prompt) for prompt in prompts)
        input_ids = torch.full((len(prompts), width), self.pad_id, dtype=torch.long)  # [B, P]
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, width - len(prompt) :] = 1
        device = self.model.device
        config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,
            eos_token_id=self.end_ids,
            pad_token_id=self.pad_id,
            use_cache=True,
        )
        try:
            with torch.inference_mode(), _only_these_settings(self.model, config):
                output = self.model.generate(
                    input_ids=input_ids.to(device),
                    attention_mask=attention_mask.to(device),
                    logits_processor=_sampler(prompts, sampling, device),
                )  # [B, P + new]
        except torch.cuda.OutOfMemoryError:
            raise UserError(
                f"the GPU's memory does not hold {len(prompts)} answers at once: lower data.distill.batch_size "
                f"(now {self.batch_size}) and run the same command again"
            ) from None
        return [self._completion(new_ids) for new_ids in output[:, width:].tolist()]

    def _completion(self, new_ids: list[int]) -> Completion:
        for position, token_id in enumerate(new_ids):
            if token_id in self.end_ids:
                return Completion(new_ids[: position + 1], "stop")
        return Completion(new_ids, "length")


def answer_end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends an answer: the eos tokens of model and tokenizer, and the one the chat template writes."""
    of_model = model.generation_config.eos_token_id
    candidates = [*(of_model if isinstance(of_model, list) else [of_model]), tokenizer.eos_token_id]
    candidates.append(template_end_token(tokenizer))
    end_ids = sorted({token_id for token_id in candidates if token_id is not None})
    if not end_ids:
        raise UserError(
            "the target has no end-of-sequence token (generation_config, tokenizer and chat template name none): "
            "set tokenizer.eos_token and save the tokenizer beside the model"
        )
    return end_ids


@contextmanager
def _only_these_settings(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Generate from p itself: the model's own defaults (a repetition penalty, a top-k) would be merged in otherwise."""
    defaults = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = defaults


def _sampler(prompts: list[list[int]], sampling: AnswerSampling, device: torch.device) -> LogitsProcessorList:
    """Nothing for greedy decoding; else temperature, top-k, top-p and the noise whose argmax is a sample."""
    processors = LogitsProcessorList()
    if sampling.temperature == 0:
        return processors
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    processors.append(GumbelNoise([_row_seed(prompt, sampling.seed) for prompt in prompts], device))
    return processors


def _row_seed(prompt: list[int], seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{prompt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # generators take 63 bits


class GumbelNoise(LogitsProcessor):
    """Adds independent Gumbel noise to each row's logits, from that row's own generator."""

    def __init__(self, seeds: list[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(scores, dtype=torch.float32)  # [B, V]
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores.float() - noise.clamp_min(torch.finfo(torch.float32).tiny).log()
