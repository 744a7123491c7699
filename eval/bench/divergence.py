"""Where a greedy answer parts from the target's, and whether that is a numerical tie or a bug.

Rounding depends on how many tokens are computed at once, so a draft tree's forward and single steps do not give the
same bits, and where two logits are nearly equal either may come out larger. In fp32 that is rare; in half precision an
answer of some dozens of tokens often has such a place. After it the two answers are answers to different prefixes.

Of a tie, the token that was found has a logit as large as the target's largest, within the noise between correct ways
of computing the same logits: all at once, in blocks after a cache as a draft tree's, and token by token as without a
draft.

Shapes: P prompt, n answer tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.eval.bench.records import MethodRecord, QuestionRecord
from draftsmith.eval.bench.spec_bench import SpecBench
from draftsmith.eval.decoding.loop import TargetSession
from draftsmith.eval.trees.verify import DraftTree, TreeShape

TIE_NOISE = 2.0  # a gap of up to so many times the noise is a tie
NEAR = 8  # largest logits, of which the noise is the largest
BLOCKS_TOKENS = (8, 1)  # the slower one only where the first does not explain the gap


@dataclass
class Divergence:
    """Where a greedy answer first differed, in logits: `gap` from the largest one down to the token that was found;
    `noise` of correct computations."""

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
    """The divergence of one answer in `records.jsonl`."""

    run: int
    turn: int
    arm: str  # `method@temperature`


def first_difference(expected: list[int], found: list[int]) -> int | None:
    """Find where two answers first differ; None if they do not."""
    if expected == found:
        return None
    pairs = enumerate(zip(expected, found, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(expected), len(found)) - 1)


@torch.inference_mode()
def divergence_at(
    position: int,
    target: PreTrainedModel,
    session: TargetSession,
    question_id: int | str,
    prompt: list[int],
    expected: list[int],
    found: list[int],
    blocks_tokens: Sequence[int] = BLOCKS_TOKENS,
) -> Divergence:
    """Measure by how little the target decided where a greedy answer parts from the expected one.

    Args:
        position: See `first_difference`.
        session: Of the target, long enough for `expected` after its prompt.
        blocks_tokens: Tokens of the answer in one forward after the cache, tried in turn until one explains the gap.
    """
    ids = torch.tensor([[*prompt, *expected[:position]]], device=target.device)
    at_once_v = target(input_ids=ids, use_cache=False).logits[0, -1].float()
    largest = at_once_v.topk(min(NEAR, len(at_once_v)))
    gap = float(largest.values[0] - at_once_v[[expected[position], found[position]]].min())
    # The logits themselves are rounded.
    spacing = torch.finfo(target.dtype).eps * float(largest.values[0].abs())
    parted = Divergence(question_id, position, expected[position], found[position], gap, spacing)
    for block_tokens in blocks_tokens:
        in_blocks_v = _logits_in_blocks(session, prompt, expected[:position], block_tokens).float()
        parted.noise = max(parted.noise, float((at_once_v - in_blocks_v)[largest.indices].abs().max()))
        if parted.is_tie:
            break
    return parted


def _logits_in_blocks(session: TargetSession, prompt: list[int], answer: list[int], block_tokens: int) -> Tensor:
    """The logits [V] after the answer, computed block by block."""
    step = session.prefill(prompt)
    for start in range(0, len(answer), block_tokens):
        block = answer[start : start + block_tokens]
        step = session.forward_tree(DraftTree(block, TreeShape.chain(len(block) - 1)))
        session.commit(list(range(len(block))))
    return step.logits[-1]


def differing_answers(record: QuestionRecord) -> Iterator[tuple[str, MethodRecord, MethodRecord]]:
    """Yield (method@temperature, its answers, the baseline's) where a lossless greedy method's answers differ."""
    for key in record.answers:
        answer, baseline = record.beside_baseline(key)
        if answer.temperature == 0 and answer.lossless and answer.ids != baseline.ids:
            yield key, answer, baseline


def find_divergences(
    bench: SpecBench, records: Iterable[QuestionRecord], known: Iterable[RecordedDivergence]
) -> list[RecordedDivergence]:
    """Find the first differing place of every greedy answer that is not the baseline's; known ones stay as they are.

    A later turn's prompt has the answers before it, so that only the first turn which differs can be compared.
    """
    turns_of = {question.question_id: question.turns for question in bench.questions}
    by_place = {
        (each.run, each.arm, each.turn, each.question_id, each.position, each.expected, each.found): each
        for each in known
    }
    measured: dict[tuple[object, ...], Divergence] = {}
    found: list[RecordedDivergence] = []
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
                            turns_of[question_id], [str(each.text) for each in baseline.turns[:turn]]
                        )
                        measured[same] = divergence_at(
                            position, bench.target, bench.session, question_id, prompt, theirs.ids, ours.ids
                        )
                    by_place[place] = RecordedDivergence(**asdict(measured[same]), run=record.run, turn=turn, arm=key)
                found.append(by_place[place])
                break
    return found
