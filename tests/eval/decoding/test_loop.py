"""The loop: what counts as kept, where it stops, and that sampling keeps the target's distribution end to end."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.scripted import Scripted, V
from support.tiny_models import smallest_llama
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith.eval.decoding.answer import TIMELINE_ROUNDS, AnswerRecord
from draftsmith.eval.decoding.loop import Round, generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import DrafterMethod
from draftsmith.eval.methods.specinfer import SpecInfer
from draftsmith.eval.trees.adaptive import AdaptiveTree
from draftsmith.eval.trees.builders import (
    BestFirstBuilder,
    ChainBuilder,
    MarginalBuilder,
    StaticBuilder,
    TreeBuilder,
)
from draftsmith.eval.trees.growers import BestFirstGrower, ChainGrower, StaticGrower
from draftsmith.eval.trees.round_costs import RoundCosts
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.eval.trees.tree import DraftTree, TreeShape
from draftsmith.models.decoding.protocols import StepwiseDecoder
from draftsmith.models.decoding.token_columns import ALL_TOKENS, TokenColumns
from draftsmith.models.target.features import target_features
from draftsmith.recipes.errors import UserError

GREEDY = Sampling()
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return smallest_llama(1, V, max_position_embeddings=48)


@pytest.fixture
def session(target: LlamaForCausalLM) -> Iterator[TargetSession]:
    with TargetSession(target, 48) as session:
        yield session


def answer_of(session: TargetSession, tokens: int) -> list[int]:
    return generate(session, Autoregressive(), PROMPT, GREEDY, tokens).ids


def test_never_always_sometimes(session: TargetSession) -> None:
    """16 tokens, the first from the prefill, 15 in rounds: five at a time, one at a time, or three at a time."""
    answer = answer_of(session, 24)
    for spoil_depth, accept_lengths, drafts in [
        (None, [5, 5, 5], [4, 4, 4]),
        (1, [1] * 15, [0] * 15),
        (3, [3] * 5, [2] * 5),
    ]:
        out = generate(session, Scripted(answer, spoil_depth), PROMPT, GREEDY, 16)
        assert out.ids == answer[:16]
        assert out.accept_lengths == accept_lengths
        assert out.draft_lengths == drafts
        assert sum(out.accept_lengths) + 1 == len(out.ids)
        assert (out.rounds, out.accepted_drafts) == (len(accept_lengths), sum(drafts))
        assert out.wall_time_s >= out.prefill_s + sum(out.round_s)
        assert sum(out.round_s) == pytest.approx(out.draft_s + out.verify_s + out.choose_s + out.commit_s)
        assert len(out.round_s) == out.rounds
        assert len(out.phases_s) == min(out.rounds, TIMELINE_ROUNDS)
        assert [sum(phases) for phases in out.phases_s] == pytest.approx(out.round_s, abs=1e-6)
        assert 0 < out.first_token_s < out.prefill_s


def test_the_limit_cuts_the_last_round(session: TargetSession) -> None:
    """1 + 5 + 2: the last tree is cut to the one drafted token that can be kept beside the target's own."""
    answer = answer_of(session, 24)
    out = generate(session, Scripted(answer, None), PROMPT, GREEDY, 8)
    assert out.ids == answer[:8]
    assert out.accept_lengths == [5, 2]
    assert out.draft_lengths == [4, 1]
    assert generate(session, Scripted(answer, None), PROMPT, GREEDY, 1).rounds == 0


def test_tried_positions(session: TargetSession) -> None:
    """Every accepted one and the rejected one after it; none where the path is used up, or where the answer ends."""
    answer = answer_of(session, 24)
    for spoil_depth, tried in [(None, 4 * 3), (1, 15), (3, 3 * 5)]:
        out = generate(session, Scripted(answer, spoil_depth), PROMPT, GREEDY, 16)
        # The last tree of the spoiled ones is cut to what is still wanted: no drafted token at depth 3, or none at all.
        assert out.tried == tried - (spoil_depth is not None)
        assert max(out.draft_depths) == 4
        assert (out.draft_depths[-1] < 4) == (spoil_depth is not None)
    end = next(token for index, token in enumerate(answer) if index >= 2 and token not in answer[:index])
    out = generate(session, Scripted(answer, 4), PROMPT, GREEDY, 20, {end})
    assert out.tried <= sum(out.draft_lengths) + out.rounds


def test_tokens_outside_the_draft_vocabulary(session: TargetSession) -> None:
    """One token cannot be drafted: it is counted where it is a round's own, and where it stood against drafts.

    Rounds of three end at every third token, the last with its tree cut to nothing to reject; rounds of five are kept
    in full, and end at no rejection.
    """
    answer = answer_of(session, 24)
    missing = answer[6]
    columns = TokenColumns(torch.tensor([token for token in range(V) if token != missing]), V)
    for spoil_depth, own_tokens, rejecting in [(3, answer[3:16:3], 4), (None, answer[5:16:5], 0)]:
        method: Any = Scripted(answer, spoil_depth)
        assert generate(session, method, PROMPT, GREEDY, 16).ended_outside is None
        method.columns = columns
        out = generate(session, method, PROMPT, GREEDY, 16)
        assert out.outside_tokens == own_tokens.count(missing)
        assert out.ended_outside == [i for i, token in enumerate(own_tokens[:rejecting]) if token == missing]
    assert missing in answer[3:15:3]


def test_every_round_is_handed_over(session: TargetSession) -> None:
    """Accepted paths and what was kept of them, the last one cut by the end token; no answer differs for it."""
    answer = answer_of(session, 24)
    end = next(token for index, token in enumerate(answer) if index >= 8 and token not in answer[:index])
    rounds: list[Round] = []
    out = generate(session, Scripted(answer, 3), PROMPT, GREEDY, 20, {end}, on_round=rounds.append)
    assert out.ids == answer[: answer.index(end) + 1]
    assert [round_.kept for round_ in rounds] == out.accept_lengths
    place = 1
    for round_ in rounds:
        path, tree = round_.verdict.path, round_.tree
        committed = [*(tree.tokens[node] for node in path[1:]), round_.verdict.next_token]
        assert committed[: round_.kept] == answer[place : place + round_.kept]
        assert round_.logits.shape == (len(tree), V)
        place += round_.kept


def test_each_phase_has_its_own_time(session: TargetSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves only where each phase does its work."""
    from draftsmith.eval.decoding import loop

    now = [0.0]

    def taking(seconds: float, function: Any) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            now[0] += seconds
            return function(*arguments, **options)

        return timed

    answer = answer_of(session, 24)
    method = Scripted(answer, None)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(loop, "verify", taking(4.0, loop.verify))
    monkeypatch.setattr(method, "start", taking(32.0, method.start))
    monkeypatch.setattr(method, "propose", taking(1.0, method.propose))
    for name, seconds in (("prefill", 64.0), ("forward_tree", 2.0), ("commit", 8.0)):
        monkeypatch.setattr(session, name, taking(seconds, getattr(session, name)))
    out = generate(session, method, PROMPT, GREEDY, 16)
    assert (out.first_token_s, out.prefill_s) == (64.0, 96.0)
    assert (out.draft_s, out.verify_s, out.choose_s, out.commit_s) == (3.0, 6.0, 12.0, 24.0)
    assert out.round_s == [15.0] * 3
    assert out.wall_time_s == 96.0 + 45.0


def test_an_end_token_cuts_the_round(session: TargetSession) -> None:
    answer = answer_of(session, 24)
    end = next(token for index, token in enumerate(answer) if index >= 2 and token not in answer[:index])
    place = answer.index(end)
    out = generate(session, Scripted(answer, None), PROMPT, GREEDY, 20, {end, V + 5})
    assert out.ids == answer[: place + 1]
    assert sum(out.accept_lengths) + 1 == len(out.ids)
    first = generate(session, Scripted(answer, None), PROMPT, GREEDY, 20, {answer[0]})
    assert (first.ids, first.rounds) == (answer[:1], 0)


def test_features_are_those_that_predicted_the_tokens(target: LlamaForCausalLM, session: TargetSession) -> None:
    """After any mix of accepted paths, the drafter has been shown the feature before each token."""
    answer = answer_of(session, 24)
    seen: list[Tensor] = []

    class Watching(Scripted):
        def start(self, prompt_ids: list[int], features: Tensor) -> None:
            super().start(prompt_ids, features)
            seen.clear()

        def observe(self, committed_ids: list[int], features: Tensor) -> None:
            super().observe(committed_ids, features)
            seen.append(features)

    for spoil_depth in (None, 1, 2):
        method = Watching(answer, spoil_depth)
        generate(session, method, PROMPT, GREEDY, 12)
        features = torch.cat(seen)
        with torch.inference_mode():
            sequence = torch.tensor([PROMPT + method.observed])
            wanted = target.model(sequence).last_hidden_state[0, len(PROMPT) - 1 : -1]
        torch.testing.assert_close(features, wanted, atol=1e-6, rtol=1e-5)


def test_prompt_and_answer_must_fit(session: TargetSession) -> None:
    with pytest.raises(UserError, match="prompt of 3 tokens and an answer of 46 do not fit into a session of 48"):
        generate(session, Autoregressive(), PROMPT, GREEDY, 46)


def test_up_to_the_last_position(session: TargetSession) -> None:
    answer = answer_of(session, 45)
    out = generate(session, Scripted([*answer, 1, 1, 1, 1], None), PROMPT, GREEDY, 45)
    assert out.ids == answer
    assert len(answer) == 45


class Noise:
    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        pass

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        pass


class NoisyDecoder(Noise):
    """Drafts from fixed logits [G, V], as good or bad as they may be."""

    def __init__(self, logits: Tensor, columns: TokenColumns) -> None:
        self._logits, self.columns = logits if columns.ids is None else logits[:, columns.ids], columns

    def draft(self) -> Tensor:
        return self._logits


class NoisyStepwiseDecoder(Noise):
    """Drafts from logits that are fixed for each path: by_path [V + 1, V], row 0 for the first token."""

    num_depths = 2

    def __init__(self, by_path: Tensor, columns: TokenColumns) -> None:
        self._by_path, self.columns = by_path if columns.ids is None else by_path[:, columns.ids], columns

    def begin(self) -> Tensor:
        return self._by_path[:1]

    def expand(self, tokens: Tensor | list[int], parents: list[int]) -> Tensor:
        assert parents == [0] * len(tokens)
        return self._by_path[torch.as_tensor(tokens) + 1]


PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0]]
BUILDERS: dict[str, TreeBuilder] = {
    "chain": ChainBuilder(),
    "static": StaticBuilder(PATHS),
    "best_first": BestFirstBuilder(nodes=5, branch=3),
    "grown chain": ChainGrower(),
    "grown static": StaticGrower(PATHS),
    "grown best_first": BestFirstGrower(nodes=5, branch=3),
    "adaptive": BestFirstBuilder(nodes=5, branch=3),
}
COSTS = RoundCosts(((1, 1.0), (2, 1.02), (6, 1.4)), draft=0.1)


@torch.inference_mode()
def third_token_distribution(target: LlamaForCausalLM, sampling: Sampling) -> Tensor:
    """[V]: exact, over all first and second tokens."""
    first = sampling.probabilities(target(torch.tensor([PROMPT])).logits[0, -1])
    pairs = torch.tensor([[*PROMPT, a, b] for a in range(V) for b in range(V)])
    logits = target(pairs).logits
    second = sampling.probabilities(logits[::V, len(PROMPT)])
    third = sampling.probabilities(logits[:, -1]).view(V, V, V)
    return torch.einsum("a,ab,abc->c", first, second, third)


def noisy_method(name: str, sampling: Sampling, generator: torch.Generator, columns: TokenColumns) -> Method:
    noise = torch.Generator().manual_seed(3)

    def stepwise() -> StepwiseDecoder:
        return NoisyStepwiseDecoder(torch.randn(1 + V, V, generator=noise, dtype=torch.float64), columns)

    if name == "merged":
        return SpecInfer("noisy", [stepwise(), stepwise()], [2, 1], 2, sampling, generator)
    builder = BUILDERS[name]
    marginals = torch.randn(2, V, generator=noise, dtype=torch.float64)
    decoder: Any = NoisyDecoder(marginals, columns) if isinstance(builder, MarginalBuilder) else stepwise()
    adaptive = AdaptiveTree(COSTS) if name == "adaptive" else None
    return DrafterMethod("noisy", decoder, builder, sampling, generator, adaptive=adaptive)


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*BUILDERS, "merged"])
@pytest.mark.parametrize("columns", [ALL_TOKENS, TokenColumns(torch.tensor([1, 2, 5, 6, 9]), V)])
@pytest.mark.parametrize("at_once", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sampling_keeps_the_distribution(
    target: LlamaForCausalLM,
    session: TargetSession,
    name: str,
    temperature: float,
    columns: TokenColumns,
    at_once: bool,
) -> None:
    """Chi-square of the third token over 700 answers; the 0.1 % quantile for 10 degrees of freedom is 29.6."""
    sampling = Sampling(temperature)
    generator = torch.Generator().manual_seed(4)
    method = noisy_method(name, sampling, generator, columns)
    answers, rounds = 700, 0
    counts = torch.zeros(V, dtype=torch.float64)
    for _ in range(answers):
        out: AnswerRecord = generate(session, method, PROMPT, sampling, 3, (), generator, at_once=at_once)
        counts[out.ids[2]] += 1
        rounds += out.rounds
    assert rounds < 2 * answers, "no draft was ever accepted, so nothing was tested"
    expected = third_token_distribution(target, sampling) * answers
    assert expected.min() > 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 29.6


class OneOfTwo(Autoregressive):
    """Proposes a wrong sibling before every right token, and keeps the features that it is shown."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__()
        self._answer = answer
        self.seen: list[Tensor] = []
        self._length = 0

    def propose(self) -> DraftTree:
        right = self._answer[self._length : self._length + 2]
        wrong = [(token + 1) % V for token in right]
        return DraftTree([self._newest, wrong[0], right[0], wrong[1], right[1]], TreeShape.of((-1, 0, 0, 2, 2)))

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        super().observe(committed_ids, features)
        self._length += len(committed_ids)
        self.seen.append(features)


def test_a_method_is_shown_the_features_of_the_accepted_path(target: LlamaForCausalLM, session: TargetSession) -> None:
    """Which are those at the token before each committed one, as one forward over the whole answer has them."""
    answer = answer_of(session, 16)
    method = OneOfTwo(answer)
    out = generate(session, method, PROMPT, GREEDY, 10)
    assert out.ids == answer[:10]
    assert out.accept_lengths == [3, 3, 3]
    seen = torch.cat(method.seen)
    expected = target_features(target, torch.tensor([[*PROMPT, *answer]]))[0, len(PROMPT) - 1 :]
    torch.testing.assert_close(seen, expected[: len(seen)], atol=1e-5, rtol=1e-5)
    assert len(seen) >= 7
