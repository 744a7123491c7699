"""Exports in real vLLM: each kind loads, changes no greedy token, and is accepted by position as in our decoder.

The drafters are trained for a moment on the very answers that they are measured on: enough that every depth is accepted
now and then.
"""

import gc
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.served_drafters import SERVED
from support.vllm_server import vllm_environment

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.formats.export import export_drafter
from draftsmith.models.formats.served import drafted_tokens, speculative_config
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import EMBEDDED_TARGET, load_target
from draftsmith.recipes.schema import TargetRecipe
from draftsmith.train.features.online import training_features

__all__ = ["vllm_environment"]  # fixture
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]
QUESTIONS, NEW_TOKENS, LONGEST_DRAFT = 12, 48, 3
TRAINING_STEPS, STEPS_WITH_MASKS = 60, 400  # masks learn slowly


@dataclass
class Setup:
    target: Any
    prompts: list[list[int]]
    answers: list[list[int]]  # greedy, past the length that is compared


@pytest.fixture(scope="module")
def setup() -> Setup:
    target, tokenizer = load_target(TargetRecipe(model="embedded", dtype="float32", device="cpu"))
    asked = [question.turns[0] for question in load_questions("embedded")][:QUESTIONS]
    prompts = [prompt_token_ids(tokenizer, [Turn("user", text)]) for text in asked]
    answers, _ = answered(prompts, NEW_TOKENS + LONGEST_DRAFT + 1, None)
    return Setup(target, prompts, answers)


def answered(
    prompts: list[list[int]], new_tokens: int, speculative: dict[str, Any] | None
) -> tuple[list[list[int]], dict[str, Any]]:
    """Greedy answers of this length, and the counters of drafting."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(EMBEDDED_TARGET), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20, disable_log_stats=False, speculative_config=speculative,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    counters: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name != metric.name:
            counters[name] = metric.values if hasattr(metric, "values") else metric.value
    del llm
    gc.collect()
    return [list(output.outputs[0].token_ids) for output in outputs], counters


def trained(kind: str, options: dict[str, Any], setup: Setup) -> Drafter:
    torch.manual_seed(5)
    drafter = load_drafter_class(kind).from_target(setup.target, options)
    if options.get("draft_vocab_size"):
        said = torch.tensor([token for answer in setup.answers for token in answer])
        drafter.choose_draft_tokens(torch.bincount(said, minlength=setup.target.config.vocab_size))
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=2e-3)
    drafter.train()
    rows = [torch.tensor([prompt + answer]) for prompt, answer in zip(setup.prompts, setup.answers, strict=True)]
    for step in range(STEPS_WITH_MASKS if "num_masks" in options else TRAINING_STEPS):
        ids = rows[step % len(rows)]
        loss_mask = torch.zeros_like(ids)
        loss_mask[:, len(setup.prompts[step % len(rows)]) :] = 1
        features, teacher = training_features(drafter, setup.target, ids)
        loss = drafter(ids, features, loss_mask, teacher_features=teacher).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.freeze()


def chain(decoder: Any, depth: int) -> list[int]:
    """Greedy tokens of the next depths."""
    if hasattr(decoder, "draft"):
        logits = decoder.draft()[:depth]
        return decoder.columns.tokens(logits.argmax(-1).tolist())
    tokens: list[int] = []
    logits = decoder.begin()
    for place in range(depth):
        tokens += decoder.columns.tokens(logits.argmax(-1).tolist())
        if place + 1 < depth:
            logits = decoder.expand(tokens[-1:], [place])
    return tokens


def our_counts(drafter: Drafter, setup: Setup) -> tuple[int, list[int]]:
    """Rounds, and accepted drafts by position, of a chain in our decoder."""
    depth = drafted_tokens(drafter.config)
    rounds, accepted = 0, [0] * depth
    for prompt, answer in zip(setup.prompts, setup.answers, strict=True):
        ids = torch.tensor(prompt + answer)
        features = target_features(setup.target, ids.unsqueeze(0), layers=drafter.feature_layers)[0]
        decoder = drafter.decoder(len(ids))
        known = len(prompt)
        decoder.start(ids[:known], features[:known])
        new = 1  # the prefill's own
        while known - len(prompt) < NEW_TOKENS:
            decoder.observe(ids[known : known + new], features[known - 1 : known + new - 1])
            known += new
            if known - len(prompt) >= NEW_TOKENS:
                break
            right = [a == b for a, b in zip(chain(decoder, depth), ids[known:].tolist(), strict=False)]
            count = right.index(False) if False in right else depth
            rounds += 1
            for place in range(count):
                accepted[place] += 1
            new = count + 1
    return rounds, accepted


@pytest.mark.parametrize("name", SERVED)
def test_served_as_in_our_decoder(name: str, setup: Setup, tmp_path: Path) -> None:
    kind, to, options = SERVED[name]
    drafter = trained(kind, options, setup)
    made = export_drafter(drafter, to, tmp_path / "served", str(EMBEDDED_TARGET), tmp_path)
    speculative = speculative_config(drafter.config, str(tmp_path / "served"))
    answers, counters = answered(setup.prompts, NEW_TOKENS, speculative)
    assert answers == [answer[:NEW_TOKENS] for answer in setup.answers]
    rounds, accepted = our_counts(drafter, setup)
    print(name, "vLLM:", counters, "ours:", rounds, accepted)
    assert made.num_speculative_tokens == len(accepted) == 3
    assert min(accepted) > 0
    assert (counters["drafts"], list(counters["accepted_tokens_per_pos"])) == (rounds, accepted)
