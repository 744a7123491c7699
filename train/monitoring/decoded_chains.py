"""A real decode on prompts kept out of training: the target answers greedily, the drafter drafts chains of its own.

The drafter works through its own decoder and cache, as in `eval/decoding/loop.py`, and reads its own drafts where its
kind does. At T = 0 whatever is drafted the target's answer is committed, so the answer and its features are computed
first, once while the target stays as it is, and the rounds are replayed on them.

Shapes: S tokens, F features, G depths, V' columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.decoding.protocols import DrafterDecoder, StepwiseDecoder
from draftsmith.models.target.features import target_features


@dataclass(frozen=True)
class GreedyAnswer:
    """ids_s: the prompt and what the target says; features_sf: AT each of them; prompt_tokens: of the prompt."""

    ids_s: Tensor
    features_sf: Tensor
    prompt_tokens: int


def first_prompts(rows: Dataset) -> list[Tensor]:
    """[P] of each row: its tokens up to the first that carries loss."""
    masks = [torch.tensor(mask) for mask in rows["loss_mask"]]
    prompts = [torch.tensor(ids)[: int(mask.argmax())] for ids, mask in zip(rows["input_ids"], masks, strict=True)]
    return [prompt for prompt in prompts if len(prompt)]


@torch.no_grad()
def greedy_answers(
    drafter: Drafter, target: PreTrainedModel, prompts: Sequence[Tensor], max_new_tokens: int
) -> list[GreedyAnswer]:
    """The target's own answers to prompts [P]; without those of one token, where nothing is drafted."""
    end_ids = target.generation_config.eos_token_id if target.generation_config is not None else None
    greedy = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=end_ids, pad_token_id=0)
    answers = []
    for prompt_p in prompts:
        ids_1p = prompt_p.to(target.device)[None]
        ids_1s = target.generate(ids_1p, attention_mask=torch.ones_like(ids_1p), generation_config=greedy)
        if ids_1s.shape[1] >= ids_1p.shape[1] + 2:
            features = target_features(target, ids_1s, layers=drafter.feature_layers)
            answers.append(GreedyAnswer(ids_1s[0], features[0], len(prompt_p)))
    return answers


@torch.no_grad()
def decoded_chains(drafter: Drafter, answers: Sequence[GreedyAnswer]) -> tuple[int, int]:
    """Tokens committed, and rounds, of greedy chains over all answers. The first token comes from the prefill."""
    tokens = rounds = 0
    for answer in answers:
        ids_s, features_sf, newest = answer.ids_s, answer.features_sf, answer.prompt_tokens
        decoder = drafter.decoder(len(ids_s) + drafter.config.num_depths + 1)
        decoder.start(ids_s[:newest], features_sf[:newest])
        decoder.observe(ids_s[newest : newest + 1], features_sf[newest - 1 : newest])
        said, last = ids_s.tolist(), len(ids_s) - 1
        while newest < last:
            drafted, accepted = _chain(decoder), 0
            while accepted < len(drafted) and newest + 1 + accepted <= last:
                if drafted[accepted] != said[newest + 1 + accepted]:
                    break
                accepted += 1
            committed = min(accepted + 1, last - newest)
            begin, end = newest + 1, newest + 1 + committed
            decoder.observe(ids_s[begin:end], features_sf[begin - 1 : end - 1])
            tokens, rounds, newest = tokens + committed, rounds + 1, newest + committed
    return tokens, rounds


def _chain(decoder: DrafterDecoder | StepwiseDecoder) -> list[int]:
    """The drafter's most likely tokens, one below the other."""
    if not isinstance(decoder, StepwiseDecoder):
        return decoder.columns.tokens(decoder.draft().argmax(-1).tolist())
    chain = decoder.columns.tokens(decoder.begin().argmax(-1).tolist())
    while len(chain) < decoder.num_depths:
        logits = decoder.expand([chain[-1]], [len(chain) - 1])
        chain += decoder.columns.tokens(logits.argmax(-1).tolist())
    return chain
