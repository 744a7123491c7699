"""Answers as text, round by round: the pieces add up to the answer, and draft tokens are marked."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.scripted import Scripted, V
from support.tiny_models import smallest_llama

from draftsmith.eval.bench.traced import Trace, TracedAnswer, TracedRound
from draftsmith.eval.decoding.generate import Round, generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.verify import DraftTree, TreeShape, Verification
from draftsmith.models.sampling import Sampling

PROMPT = [1, 2, 3]


class Letters:
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(97 + token) for token in ids)


@pytest.fixture(scope="module")
def session() -> Iterator[TargetSession]:
    with TargetSession(smallest_llama(1, V, max_position_embeddings=48), 48) as session:
        yield session


def trace_answer(session: TargetSession, method: Any, tokens: int) -> tuple[list[int], TracedAnswer]:
    trace = Trace(TracedAnswer("scripted@0", "scripted", 1, "math", "?"), Letters())
    out = generate(session, method, PROMPT, Sampling(), tokens, on_round=trace.on_round)
    return out.ids, trace.answer


@pytest.mark.parametrize(("spoil_depth", "drafted_kept"), [(None, [4, 4, 4]), (3, [2] * 5), (1, [0] * 15)])
def test_traced_texts_add_up_to_the_answer(
    session: TargetSession, spoil_depth: int | None, drafted_kept: list[int]
) -> None:
    answer = generate(session, Autoregressive(), PROMPT, Sampling(), 24).ids
    ids, found = trace_answer(session, Scripted(answer, spoil_depth), 16)
    pieces = [found.first]
    for round_ in found.rounds:
        pieces += [*round_.accepted, round_.own or ""]
    assert "".join(pieces) == Letters().decode(ids, False)
    assert [len(round_.accepted) for round_ in found.rounds] == drafted_kept
    if spoil_depth == 3:  # the draft token at depth 3 is rejected, and the target's own token is in its place
        first = found.rounds[0]
        assert first.num_drafted == 4
        assert first.own == chr(97 + answer[3])
        assert first.rejected[0] == chr(97 + (answer[3] + 1) % V)
        assert len(first.rejected) == 2  # and the one after it


def test_answer_that_ends_within_a_path_has_no_target_token(session: TargetSession) -> None:
    answer = generate(session, Autoregressive(), PROMPT, Sampling(), 24).ids
    end = next(token for index, token in enumerate(answer) if index in (2, 3, 4) and token not in answer[:index])
    trace = Trace(TracedAnswer("scripted@0", "scripted", 1, "math", "?"), Letters())
    out = generate(session, Scripted(answer, None), PROMPT, Sampling(), 16, {end}, on_round=trace.on_round)
    assert trace.answer.rounds[-1].own is None
    assert trace.answer.rounds[-1].rejected == []
    assert len(trace.answer.rounds[-1].accepted) == out.accept_lengths[-1] == answer.index(end)


def test_rejected_path_begins_at_the_first_child_of_the_last_accepted_node() -> None:
    """The tree is 0 - 1 - 2 - 4 with 3 beside 1; 1 is accepted, then 2 and 4 are rejected."""
    tree = DraftTree([0, 1, 2, 3, 4], TreeShape.of((-1, 0, 1, 0, 2)))
    trace = Trace(TracedAnswer("x@0", "x", 1, "math", "?"), Letters())
    trace.on_round(Round(tree, torch.empty(0), Verification([0, 1], 9), 2, torch.empty(0)))
    trace.on_round(Round(tree, torch.empty(0), Verification([0, 3], 9), 2, torch.empty(0)))
    assert trace.answer.rounds == [TracedRound(4, ["b"], ["c", "e"], "j"), TracedRound(4, ["d"], [], "j")]
