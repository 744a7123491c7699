"""Answers from `transformers`' own `generate`: no extra dependency, any causal language model, CPU or GPU.

Prompts of like length are padded on the left, in batches. Rows that have ended do not cost for long: whenever
half of a batch has ended, the other half goes on alone with its part of the KV cache. Sampling is by the Gumbel-max
trick with one generator a row, seeded by its request: argmax(log p + g) with g Gumbel is a draw
from p, so an answer does not depend on the batch that it was generated in, and a resumed run samples what an
uninterrupted one would have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.data.engines.engine import Completion, EngineSetting, GenerationSettings, Outcome, Request
from draftsmith.data.tokens.end_ids import answer_end_ids
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Section

BATCHES_AT_ONCE = 4


class TransformersEngine:
    """Batched generation with a loaded target.

    Args:
        model: The target, in eval mode.
        tokenizer: Its tokenizer; only its end and padding tokens are used.
        batch_size: Rows of one forward pass.
    """

    class Options(Section):
        """`batch_size`: rows of one forward pass."""

        batch_size: int = Field(16, ge=1)

    def __init__(self, model: Any, tokenizer: Any, batch_size: int) -> None:
        self.model = model
        self.batch_size = batch_size
        self.concurrency = batch_size * BATCHES_AT_ONCE
        self.max_length_tokens: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.end_ids = answer_end_ids(model.generation_config, tokenizer)
        # Whatever pads is masked on the left, and cut off behind the end token on the right: it may well be the eos.
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end_ids[0]
        self._waiting: list[Request] = []

    @classmethod
    def make(cls, options: Options, setting: EngineSetting) -> TransformersEngine:
        return cls(setting.load_target(), setting.tokenizer, options.batch_size)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def collect(self) -> list[tuple[str, Outcome]]:
        """The answers of one batch: the request that has waited longest, and those most like it in length."""
        length = len(self._waiting[0].prompt_ids)
        nearest = sorted(self._waiting, key=lambda request: abs(len(request.prompt_ids) - length))
        batch = nearest[: self.batch_size]
        taken = {request.key for request in batch}
        completions = self._generate_batch(batch)
        self._waiting = [request for request in self._waiting if request.key not in taken]
        return [(request.key, completion) for request, completion in zip(batch, completions, strict=True)]

    def close(self) -> None:
        self._waiting = []

    def _generate_batch(self, batch: list[Request]) -> list[Completion]:
        """Answers of B requests. Whenever half of the rows have ended the others go on without them."""
        prompts, settings = [request.prompt_ids for request in batch], batch[0].settings
        device, width = self.model.device, max(len(prompt) for prompt in prompts)
        input_ids = torch.full((len(prompts), width), self.pad_id, dtype=torch.long)  # [B, P]
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, width - len(prompt) :] = 1
        input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
        processors = row_processors([request.seed for request in batch], settings, device)
        rows, cache = torch.arange(len(prompts)), DynamicCache(config=self.model.config)
        completions: list[Completion | None] = [None] * len(prompts)
        while len(rows):
            wanted = width + settings.max_new_tokens - input_ids.shape[1]
            sequences = self._continue(input_ids, attention_mask, cache, wanted, processors)
            alive = []
            for index, (row, ids) in enumerate(zip(rows.tolist(), sequences[:, width:].tolist(), strict=True)):
                end = next((place for place, token_id in enumerate(ids) if token_id in self.end_ids), None)
                if end is not None:
                    completions[row] = Completion(ids[: end + 1], "stop")
                elif len(ids) == settings.max_new_tokens:
                    completions[row] = Completion(ids, "length")
                else:
                    alive.append(index)
            if not alive:
                break
            kept = torch.tensor(alive)
            rows, input_ids = rows[kept], sequences[kept.to(device)]
            grown = input_ids.new_ones(len(alive), input_ids.shape[1] - attention_mask.shape[1])
            attention_mask = torch.cat([attention_mask[kept.to(device)], grown], dim=1)
            cache.batch_select_indices(kept.to(device))
            for noise in processors[-1:]:
                noise.generators = [noise.generators[index] for index in alive]
        return [completion for completion in completions if completion is not None]

    def _continue(
        self, input_ids: Tensor, attention_mask: Tensor, cache: Cache, max_new_tokens: int, processors: Any
    ) -> Tensor:
        """Generate until half of the rows [B, S] have ended; the cache grows. Returns [B, S + new]."""
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=self.end_ids,
            pad_token_id=self.pad_id,
            use_cache=True,
        )
        try:
            with torch.inference_mode(), _only_these_settings(self.model, config):
                return self.model.generate(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    past_key_values=cache,
                    logits_processor=processors,
                    stopping_criteria=StoppingCriteriaList([HalfEnded(self.end_ids, input_ids.shape[1])]),
                )
        except torch.cuda.OutOfMemoryError:
            raise UserError(
                f"the GPU's memory does not hold {len(input_ids)} answers at once: lower "
                f"data.distill.options.batch_size (now {self.batch_size}) and run the same command again"
            ) from None


@contextmanager
def _only_these_settings(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Generate from p itself: the model's own defaults (a repetition penalty, a top-k) would be merged in otherwise."""
    defaults = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = defaults


class HalfEnded(StoppingCriteria):
    """Stops the whole batch once at least half of its rows have produced an end token (one row: once it has)."""

    def __init__(self, end_ids: list[int], prompt_width: int) -> None:
        self.end_ids = end_ids
        self.prompt_width = prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        end_ids = torch.tensor(self.end_ids, device=input_ids.device)
        ended = torch.isin(input_ids[:, self.prompt_width :], end_ids).any(dim=1)  # [B]
        return ended | (2 * ended.sum() >= len(ended))


def row_processors(seeds: list[int], settings: GenerationSettings, device: torch.device) -> LogitsProcessorList:
    """Of a batch: none for greedy decoding; else temperature, top-k, top-p and, last of all, Gumbel noise."""
    if settings.temperature == 0:
        return LogitsProcessorList()
    processors = LogitsProcessorList([TemperatureLogitsWarper(settings.temperature)])
    if settings.top_k > 0:
        processors.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        processors.append(TopPLogitsWarper(settings.top_p))
    processors.append(GumbelNoise(seeds, device))
    return processors


class GumbelNoise(LogitsProcessor):
    """Adds independent Gumbel noise to each row's logits, from that row's own generator: rows may be taken out."""

    def __init__(self, seeds: list[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = torch.empty_like(scores, dtype=torch.float32)  # [B, V]
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores.float() - noise.clamp_min(torch.finfo(torch.float32).tiny).log()


ENGINE = TransformersEngine
