"""Comparison of a greedy answer with the target's: the first difference, and whether rounding explains it.

Rounding depends on the number of tokens in a forward, so a draft tree's forward and single steps do not give the same
bits, and if two logits are nearly equal either may turn out larger. In fp32 that is rare; in half precision an answer
of some dozens of tokens often has such a position. After it the two answers continue different prefixes.

A difference is a tie if the found token's logit equals the target's largest one within the noise between correct ways
of computing the same logits: in one forward, in blocks after a KV cache like a draft tree, and token by token as
without a draft. Any other difference is a bug: the answer is not the target's.

Shapes: P prompt, n answer tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.eval.bench.records import MethodResult, QuestionRecord
from draftsmith.eval.bench.spec_bench import SpecBench
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.verify import DraftTree, TreeShape

TIE_NOISE = 2.0  # a gap of up to this multiple of the noise is a tie
NEAR = 8  # the noise is the largest difference over this many largest logits
BLOCKS_TOKENS = (8, 1)  # the slower block size only if the first does not explain the gap


@dataclass
class Divergence:
    """First difference between a greedy answer and the target's.

    position: index of the token. expected, found: token ids of the target's answer and of the other one. gap: largest
    logit minus the lower logit of these two tokens. noise: largest difference between correct computations of logits.
    """

    question_id: int | str
    position: int
    expected: int
    found: int
    gap: float
    noise: float

    @property
    def is_tie(self) -> bool:
        return self.gap <= TIE_NOISE * self.noise


@dataclass
class RecordedDivergence(Divergence):
    """First difference between an answer in `records.jsonl` and the baseline's, with the answer's run and turn."""

    run: int
    turn: int
    arm: str  # `method@temperature`


def first_difference(expected: list[int], actual: list[int]) -> int | None:
    """Return the index of the first token in which two answers differ; None if they are equal."""
    if expected == actual:
        return None
    pairs = enumerate(zip(expected, actual, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(expected), len(actual)) - 1)


@torch.inference_mode()
def divergence_at(
    position: int,
    target: PreTrainedModel,
    session: TargetSession,
    question_id: int | str,
    prompt: list[int],
    expected: list[int],
    actual: list[int],
    blocks_tokens: Sequence[int] = BLOCKS_TOKENS,
) -> Divergence:
    """Measure gap and noise of the target's logits where a greedy answer (`actual`) first differs from `expected`.

    Args:
        position: Index of the difference, see `first_difference`.
        session: Session of the target, long enough for the prompt with `expected`.
        blocks_tokens: Sizes of the blocks in which the answer is recomputed; tried until one explains the gap.
    """
    ids = torch.tensor([[*prompt, *expected[:position]]], device=target.device)
    at_once_v = target(input_ids=ids, use_cache=False).logits[0, -1].float()
    largest = at_once_v.topk(min(NEAR, len(at_once_v)))
    gap = float(largest.values[0] - at_once_v[[expected[position], actual[position]]].min())
    # The noise is at least the rounding of the logits themselves.
    spacing = torch.finfo(target.dtype).eps * float(largest.values[0].abs())
    parted = Divergence(question_id, position, expected[position], actual[position], gap, spacing)
    for block_tokens in blocks_tokens:
        in_blocks_v = _logits_in_blocks(session, prompt, expected[:position], block_tokens).float()
        parted.noise = max(parted.noise, float((at_once_v - in_blocks_v)[largest.indices].abs().max()))
        if parted.is_tie:
            break
    return parted


def _logits_in_blocks(session: TargetSession, prompt: list[int], answer: list[int], block_tokens: int) -> Tensor:
    """Return the logits [V] after the answer, computed block by block."""
    step = session.prefill(prompt)
    start = 0
    while start < len(answer):
        block = answer[start : start + min(block_tokens, session.deepest_draft + 1)]
        start += len(block)
        step = session.forward_tree(DraftTree(block, TreeShape.chain(len(block) - 1)))
        session.commit(list(range(len(block))))
    return step.logits[-1]


def differing_answers(record: QuestionRecord) -> Iterator[tuple[str, MethodResult, MethodResult]]:
    """Yield (method@temperature, its answers, the baseline's) for lossless greedy methods whose answers differ."""
    for key in record.answers:
        answer, baseline = record.with_baseline(key)
        if answer.temperature == 0 and answer.lossless and answer.ids != baseline.ids:
            yield key, answer, baseline


def find_divergences(
    bench: SpecBench, records: Iterable[QuestionRecord], known: Iterable[RecordedDivergence]
) -> list[RecordedDivergence]:
    """Find the first difference of every greedy answer that is not the baseline's; `known` ones are not measured.

    A later turn's prompt contains the earlier answers, so only the first turn that differs can be compared.
    """
    turns_by_id = {question.question_id: question.turns for question in bench.questions}
    by_place = {
        (each.run, each.arm, each.turn, each.question_id, each.position, each.expected, each.found): each
        for each in known
    }
    measured: dict[tuple[object, ...], Divergence] = {}
    divergences: list[RecordedDivergence] = []
    for record in records:
        question_id = record.question_id
        for key, answer, baseline in differing_answers(record):
            for turn, (theirs, ours) in enumerate(zip(baseline.turns, answer.turns, strict=False)):
                position = first_difference(theirs.ids, ours.ids)
                if position is None:
                    continue
                place = (record.run, key, turn, question_id, position, theirs.ids[position], ours.ids[position])
                if place not in by_place:
                    same = (question_id, turn, *theirs.ids[: position + 1], ours.ids[position])
                    if same not in measured:
                        prompt = bench.prompt_ids(
                            turns_by_id[question_id], [str(each.text) for each in baseline.turns[:turn]]
                        )
                        measured[same] = divergence_at(
                            position, bench.target, bench.session, question_id, prompt, theirs.ids, ours.ids
                        )
                    by_place[place] = RecordedDivergence(**asdict(measured[same]), run=record.run, turn=turn, arm=key)
                divergences.append(by_place[place])
                break
    return divergences
