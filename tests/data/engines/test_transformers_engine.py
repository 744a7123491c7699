"""The transformers engine: batches change no answer, greedy is the argmax, sampling follows p."""

from typing import Any

import pytest
import torch
from support import tiny_tokenizers as templates
from support.tiny_models import tiny_chat_llama
from support.tiny_tokenizers import tiny_tokenizer
from transformers import LlamaForCausalLM

from draftsmith.data.engines.engine import Completion, EngineSetting, GenerationSettings, Request, open_engine
from draftsmith.data.engines.transformers_engine import GumbelNoise, TransformersEngine
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe


@pytest.fixture(scope="module")
def tiny_llama() -> LlamaForCausalLM:
    return tiny_chat_llama()


PROMPTS = [[5, 9, 30], [7], [100, 200, 300, 40, 50, 60, 70], [8, 8], [33, 44, 55, 66]]
SAMPLED = GenerationSettings(1.2, 50, 0.95, 24)


def answers_of(engine: TransformersEngine, sampling: GenerationSettings, seed: int = 3) -> list[Completion]:
    for key, prompt in enumerate(PROMPTS):
        engine.submit(Request(str(key), prompt, [], sampling, seed + key))
    outcomes: dict[str, Any] = {}
    while len(outcomes) < len(PROMPTS):
        outcomes |= dict(engine.collect())
    return [outcomes[str(key)] for key in range(len(PROMPTS))]


@pytest.mark.parametrize("sampling", [GenerationSettings(max_new_tokens=24), SAMPLED])
def test_batched_equals_unbatched(tiny_llama: LlamaForCausalLM, sampling: GenerationSettings) -> None:
    """Greedy, and sampled too, since each row has its own generator."""
    tokenizer = tiny_tokenizer(templates.CHATML)
    one_by_one, batched = (TransformersEngine(tiny_llama, tokenizer, size) for size in (1, 3))
    expected = answers_of(one_by_one, sampling)
    assert answers_of(batched, sampling) == expected
    assert len({tuple(completion.token_ids or []) for completion in expected}) == len(PROMPTS)
    if sampling.temperature:
        assert answers_of(batched, sampling, seed=4) != expected


def test_a_batch_is_of_like_length_and_nobody_waits_for_ever(tiny_llama: LlamaForCausalLM) -> None:
    engine = TransformersEngine(tiny_llama, tiny_tokenizer(templates.CHATML), 2)
    for key, length in enumerate((3, 40, 4, 39, 5)):
        engine.submit(Request(str(key), [7] * length, [], GenerationSettings(max_new_tokens=2), 0))
    batches = [{key for key, _ in engine.collect()} for _ in range(3)]
    assert batches == [{"0", "2"}, {"1", "3"}, {"4"}]


def test_greedy_is_the_models_argmax_despite_its_generation_defaults(tiny_llama: LlamaForCausalLM) -> None:
    """A repetition penalty in generation_config.json would have us distil another distribution than p."""
    tiny_llama.generation_config.repetition_penalty = 5.0
    try:
        engine = TransformersEngine(tiny_llama, tiny_tokenizer(templates.CHATML), 2)
        engine.submit(Request("0", [5, 9, 30], [], GenerationSettings(max_new_tokens=12), 0))
        completion = engine.collect()[0][1]
        assert isinstance(completion, Completion)
        assert tiny_llama.generation_config.repetition_penalty == 5.0
    finally:
        tiny_llama.generation_config.repetition_penalty = None
    ids = [5, 9, 30]
    for token_id in completion.token_ids or []:
        assert token_id == int(tiny_llama(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token_id)


def test_an_answer_ends_with_the_first_end_token(tiny_llama: LlamaForCausalLM) -> None:
    """1 = </s> ends an answer and is the padding too: a row that has ended stands beside longer ones, and is cut."""
    tokenizer = tiny_tokenizer(templates.CHATML)
    tokenizer.pad_token = "</s>"
    engine = TransformersEngine(tiny_llama, tokenizer, 4)
    free = answers_of(engine, GenerationSettings(max_new_tokens=24))
    engine.end_ids = sorted({free[0].token_ids[3], 1})  # stop the first row early; others go on beside its padding
    stopped = answers_of(engine, GenerationSettings(max_new_tokens=24))
    for before, after in zip(free, stopped, strict=True):
        ends = [t for t, token_id in enumerate(before.token_ids) if token_id in engine.end_ids]
        length = ends[0] + 1 if ends else len(before.token_ids)
        assert after.token_ids == before.token_ids[:length]
        assert after.finish_reason == ("stop" if ends else "length")
    assert stopped[0].finish_reason == "stop"


def test_sampling_follows_p() -> None:
    """Chi-square of 20,000 rows' argmax against p = (0.5, 0.3, 0.15, 0.05, 0): the last is masked, as by top-k."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    rows = 20_000
    noisy = GumbelNoise(list(range(rows)), torch.device("cpu"))(torch.empty(0), p.log().repeat(rows, 1))
    observed = torch.bincount(noisy.argmax(-1), minlength=5)
    assert observed[4] == 0
    expected = p[:4] * rows
    assert float(((observed[:4] - expected) ** 2 / expected).sum()) < 16.3  # 3 degrees of freedom, p = 0.001


def test_engine_options() -> None:
    for options, sentence in (
        ({"batchsize": 4}, r"unknown key `data\.distill\.options\.batchsize`: did you mean `batch_size`\?"),
        ({"batch_size": 0}, r"key `data\.distill\.options\.batch_size`: .* greater than or equal to 1"),
    ):
        recipe = Recipe.model_validate({"name": "test", "data": {"distill": {"options": options}}})
        setting = EngineSetting(recipe, None, "", (1,), lambda: None)
        with pytest.raises(UserError, match=sentence), open_engine(setting):
            pass
