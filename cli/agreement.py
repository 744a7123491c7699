"""Check that an engine accepts as many draft tokens as our own decoder, for the same chain and greedy answers.

Our drafter is replayed on the engine's answers (`eval/bench/replay.py`), so that both commit the same tokens. Known
differences are left out: tokens that an engine accepts past an answer's end, llama.cpp's last rounds without a draft,
and the drafter's row for a conversation's first token. The target's own token of a round counts on both sides. A larger
difference than rounding can cause means that the engine computes other drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from draftsmith.eval.bench.replay import accepted_lengths
from draftsmith.eval.engines.load_test import ArmResult
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.features import target_features
from draftsmith.recipes.schema import MethodConfig

MOST_APART = 0.02  # of tau
CAUSES = "docs/guides/serving.md#what-goes-wrong-by-what-you-see"


@dataclass(frozen=True)
class Agreement:
    """Tau of a chain of `depth` draft tokens, in the engine and in our own loop."""

    depth: int
    answers: int
    engine_tau: float
    own_tau: float

    def sentence(self, engine: str) -> str:
        """Return the comparison in one line; a difference above `MOST_APART` points to likely causes."""
        apart = abs(self.engine_tau / self.own_tau - 1)
        figures = (
            f"a chain of {self.depth} draft tokens commits {self.engine_tau:.3f} tokens a round in {engine} and "
            f"{self.own_tau:.3f} in draftsmith's loop, on the same {self.answers} answers ({apart:.1%} apart)"
        )
        if apart <= MOST_APART:
            return f"Accepts here what it accepts there: {figures}."
        return f"DOES NOT ACCEPT HERE WHAT IT ACCEPTS THERE: {figures}; likely causes are in {CAUSES}."


@torch.inference_mode()
def compare_with_own_chain(
    result: ArmResult,
    target: PreTrainedModel,
    drafter: Drafter,
    counts_last_rounds: bool,
    lacks_first_row: bool = False,
) -> Agreement | None:
    """Replay our chain on an engine's greedy answers and compare acceptance; None if the engine drafted nothing.

    Args:
        drafter: The drafter that was exported, attached to the target.
        counts_last_rounds: The engine drafts for an answer's last token too, and counts that round.
        lacks_first_row: The engine's drafter does not read a conversation's first token; our chain then omits it too.
    """
    counts, answers = result.counts, [answer for answer in result.answers if len(answer.ids) > 1]
    if not counts.drafts or not answers:
        return None
    depth = len(counts.accepted_by_depth) or round(counts.drafted_tokens / counts.drafts)
    drafter.reads_first_token &= not lacks_first_row
    longest = max(len(answer.prompt_ids) + len(answer.ids) for answer in answers)
    decoder = drafter.decoder(longest + depth)
    chain = build_tree_drafter(MethodConfig(name="chain", max_depth=depth), decoder, Sampling())
    lengths: list[int] = []
    for answer in answers:
        ids, first = [*answer.prompt_ids, *answer.ids], len(answer.prompt_ids)
        ids_1s = torch.tensor([ids], device=target.device)
        features_sf = target_features(target, ids_1s, layers=drafter.feature_layers)[0]
        of_answer = accepted_lengths(chain, ids, features_sf, first, len(ids) - 1)
        # A last round that commits one token starts with one token missing, for which our chain drafts nothing.
        lengths += of_answer if counts_last_rounds or of_answer[-1] > 1 else of_answer[:-1]
    if not lengths:
        return None
    committed = sum(len(answer.ids) - 1 for answer in result.answers) / counts.drafts
    return Agreement(
        depth=depth,
        answers=len(answers),
        engine_tau=committed if counts_last_rounds else 1 + counts.accepted_tokens / counts.drafts,
        own_tau=sum(lengths) / len(lengths),
    )
