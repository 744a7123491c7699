"""The transformers engine: batching changes no answer, a free row is filled immediately, greedy is the argmax."""

import dataclasses
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
import torch
from support.half_right import TINY, greedy_reference
from support.openai_setup import run
from support.tiny_models import HYBRIDS, long_rope, smallest_llama, tiny_target
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from draftsmith.data.engines.engine import Completion, GenerationSettings, Request
from draftsmith.data.engines.transformers_engine import TransformersEngine
from draftsmith.errors import UserError


@pytest.fixture(scope="module")
def tiny_llama() -> LlamaForCausalLM:
    return smallest_llama(
        0, 340, hidden_size=32, intermediate_size=64, max_position_embeddings=128, initializer_range=0.6,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip


END_IDS = (1,)
PROMPTS = [[5, 9, 30], [7], [100, 200, 300, 40, 50, 60, 70], [8, 8], [33, 44, 55, 66]]
GREEDY, SAMPLED = GenerationSettings(max_new_tokens=24), GenerationSettings(1.2, 50, 0.95, 24)


def make_engine(target: Any, batch_size: int, end_ids: Collection[int] = END_IDS) -> TransformersEngine:
    return TransformersEngine(target, batch_size, 84, tuple(end_ids))


def generate_answers(engine: TransformersEngine, settings: GenerationSettings, seed: int = 3) -> list[Completion]:
    batch = [Request(str(key), prompt, settings, seed + key) for key, prompt in enumerate(PROMPTS)]
    outcomes: dict[str, Any] = run(engine, batch)
    return [outcomes[request.key] for request in batch]


def test_finished_row_is_refilled_before_the_next_forward(tiny_llama: LlamaForCausalLM) -> None:
    """An answer ends with the first end token; the forwards are those of the rows that are then refilled."""
    forwards, settings = [], GenerationSettings(max_new_tokens=12)
    hook = tiny_llama.register_forward_hook(lambda *_, **__: forwards.append(1), with_kwargs=True)
    free = generate_answers(make_engine(tiny_llama, 1), settings)
    ends = {completion.token_ids[2] for completion in free[1:]}  # type: ignore[index]
    alone = generate_answers(make_engine(tiny_llama, 1, ends), settings)
    for whole, ended in zip(free, alone, strict=True):
        ids = whole.token_ids or []
        length = next((place for place, token_id in enumerate(ids, start=1) if token_id in ends), None)
        assert ended == Completion(ids[:length], "length" if length is None else "stop")
    forwards.clear()
    together = generate_answers(make_engine(tiny_llama, 2, ends), settings)
    hook.remove()
    assert together == alone
    lengths = [len(completion.token_ids or []) for completion in alone]
    # Each prompt is prefilled alone, which gives its answer's first token.
    rounds, rows, waiting = 0, [], [length - 1 for length in lengths]
    while rows or waiting:
        while waiting and len(rows) < 2:
            rows.append(waiting.pop(0))
        if all(rows):
            rounds += 1
            rows = [left - 1 for left in rows]
        rows = [left for left in rows if left]
    assert len(forwards) == len(PROMPTS) + rounds


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED])
def test_next_turn_continues_in_its_row(tiny_llama: LlamaForCausalLM, settings: GenerationSettings) -> None:
    """Only new tokens are prefilled, whichever rows end meanwhile; the answers are those of a whole prompt."""
    ends = [t for t in range(340) if t % 6 == 1]
    settings = dataclasses.replace(settings, max_new_tokens=6)
    engine, asked = make_engine(tiny_llama, len(PROMPTS), ends), {}
    read: list[int] = []
    hook = tiny_llama.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    prompts, turns = dict(enumerate(PROMPTS)), Counter()  # type: ignore[var-annotated]
    for key, prompt in prompts.items():
        engine.submit(Request(str(key), prompt, settings, key))
    while len(turns) < len(PROMPTS) or min(turns.values()) < 3:
        for name, outcome in engine.collect():
            assert isinstance(outcome, Completion)
            assert outcome.token_ids
            key = int(name)
            asked[tuple(prompts[key]), 10 * turns[key] + key] = outcome
            turns[key] += 1
            if turns[key] < 3:
                prompts[key] = [*prompts[key], *outcome.token_ids, 9, 50 + key]
                engine.submit(Request(name, prompts[key], settings, 10 * turns[key] + key))
    hook.remove()
    # A first turn is prefilled whole, a later one from its answer's last token on: that and two tokens.
    assert sorted(n for n in read if n > 1) == sorted([len(p) for p in PROMPTS if len(p) > 1] + [3] * 10)
    alone = make_engine(tiny_llama, 1, ends)
    for (prompt, seed), outcome in asked.items():
        alone.submit(Request("x", list(prompt), settings, seed))
        assert alone.collect() == [("x", outcome)]


@pytest.mark.parametrize("name", TINY)
def test_greedy_is_the_argmax_despite_generation_defaults(name: str) -> None:
    """With a repetition penalty from generation_config.json we would distil a distribution other than p."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(TINY[name]).double().eval()
    target.generation_config.repetition_penalty = 5.0
    prompts = [[token % 97 for token in prompt] for prompt in PROMPTS]
    settings = GenerationSettings(max_new_tokens=8)
    batch = [Request(str(key), prompt, settings, 0) for key, prompt in enumerate(prompts)]
    outcomes = run(make_engine(target, 3, ()), batch)
    for key, prompt in enumerate(prompts):
        ids = [*prompt]
        for _ in range(8):
            ids.append(int(target(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert outcomes[str(key)] == Completion(ids[len(prompt) :], "length")


def test_answers_across_a_switch_of_rope_are_refused() -> None:
    """RoPE has parameters for each type of layer."""
    rope = {"full_attention": long_rope(60), "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"}}
    with pytest.raises(UserError, match=r"one beyond 60 tokens, and prompt and answer may have 84: lower the sum of"):
        make_engine(tiny_target("gemma3_text", rope_parameters=rope), 2)


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_keep_their_recurrent_states(name: str) -> None:
    """Rows end, move and go on with a next turn; each answer is the one of its whole prompt alone."""
    target, new_tokens = tiny_target(name), (2, 5, 3)
    engine, prompts = make_engine(target, 3, ()), [[5, 9, 30], [7], [3, 8, 12, 40, 50], [8, 8]]
    waiting = {str(key): (prompt, list(new_tokens)) for key, prompt in enumerate(prompts)}
    for key, (prompt, lengths) in waiting.items():
        lengths[:] = lengths[int(key) % 3 :] + lengths[: int(key) % 3]
        engine.submit(Request(key, prompt, GenerationSettings(max_new_tokens=lengths.pop(0)), 0))
    answers = 0
    while answers < len(prompts) * len(new_tokens):
        for key, outcome in engine.collect():
            prompt, lengths = waiting[key]
            assert isinstance(outcome, Completion)
            assert outcome.token_ids == greedy_reference(target, prompt, len(outcome.token_ids or []))
            answers += 1
            prompt += [*outcome.token_ids, 9, 50]
            if lengths:
                engine.submit(Request(key, prompt, GenerationSettings(max_new_tokens=lengths.pop(0)), 0))


def test_every_request_uses_its_own_settings(tiny_llama: LlamaForCausalLM) -> None:
    """Greedy and sampled rows of several lengths share a batch, and reuse rows that had other settings."""
    every = [GREEDY, SAMPLED, GenerationSettings(1.2, 1, 1.0, 9), GenerationSettings(max_new_tokens=5)]
    alone = [generate_answers(make_engine(tiny_llama, 1, ()), settings) for settings in every]
    batch = [
        Request(f"{number}.{key}", prompt, settings, 3 + key)
        for number, settings in enumerate(every)
        for key, prompt in enumerate(PROMPTS)
    ]
    outcomes: dict[str, Any] = run(make_engine(tiny_llama, 3, ()), batch)
    for number, settings in enumerate(every):
        answers = [outcomes[f"{number}.{key}"] for key in range(len(PROMPTS))]
        assert answers == alone[number]
        assert {len(answer.token_ids) for answer in answers} == {settings.max_new_tokens}
    assert generate_answers(make_engine(tiny_llama, 3, ()), SAMPLED, seed=4) != alone[1]
    # With top_k 1 only the most likely token can be drawn.
    for greedy, sampled, top_1, short in zip(*alone, strict=True):
        assert greedy.token_ids[:9] == top_1.token_ids
        assert greedy.token_ids[:5] == short.token_ids
        assert greedy.token_ids != sampled.token_ids
