"""The decoding loop: accepted tokens, stopping, and sampling from the target's distribution end to end."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.scripted import Scripted, V
from support.table_decoder import DepthsDecoder, Path, TableDecoder, draw_rows, random_table
from support.tiny_models import smallest_llama
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith.errors import UserError
from draftsmith.eval.decoding import generate as generate_module
from draftsmith.eval.decoding.generate import AnswerRecord, Round, generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession, TargetStep
from draftsmith.eval.methods import drafter as builders_module
from draftsmith.eval.methods.drafter import BestFirst, Chain, Static, TreeBuilder, TreeDrafter
from draftsmith.eval.trees import verify as verify_module
from draftsmith.eval.trees.enumeration import Outcomes
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.decoding.decoders import ALL_TOKENS, TokenColumns
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.features import target_features

GREEDY = Sampling()
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return smallest_llama(1, V, max_position_embeddings=48)


@pytest.fixture
def session(target: LlamaForCausalLM) -> Iterator[TargetSession]:
    with TargetSession(target, 48) as session:
        yield session


def generate_greedy(session: TargetSession, tokens: int) -> list[int]:
    return generate(session, Autoregressive(), PROMPT, GREEDY, tokens).ids


def generate_until(session: TargetSession, method: Any, end: int, **options: Any) -> AnswerRecord:
    return generate(session, method, PROMPT, GREEDY, 20, {end, V + 5}, **options)


@pytest.mark.parametrize(
    ("spoil_depth", "accept_lengths", "drafts", "tried"),
    [(None, [5, 5, 5], [4, 4, 4], 4 * 3), (1, [1] * 15, [0] * 15, 14), (3, [3] * 5, [2] * 5, 3 * 5 - 1)],
)
def test_drafts_that_are_always_never_or_sometimes_right(
    session: TargetSession, spoil_depth: int | None, accept_lengths: list[int], drafts: list[int], tried: int
) -> None:
    """16 tokens, the first from the prefill, 15 in rounds of five, one or three.

    Verification reaches every accepted draft token and the rejected one after it, if any. The last spoiled tree is cut
    to the remaining tokens: no draft token at depth 3, or none at all.
    """
    answer = generate_greedy(session, 24)
    out = generate(session, Scripted(answer, spoil_depth), PROMPT, GREEDY, 16)
    assert out.ids == answer[:16]
    assert (out.accept_lengths, out.draft_lengths, out.tried) == (accept_lengths, drafts, tried)
    assert (out.rounds, out.accepted_drafts) == (len(accept_lengths), sum(drafts))
    assert max(out.draft_depths) == 4
    assert (out.draft_depths[-1] < 4) == (spoil_depth is not None)


def test_token_limit_cuts_the_last_round(session: TargetSession) -> None:
    """1 + 5 + 2: the last tree is cut to the one draft token that can be committed with the target's own."""
    answer = generate_greedy(session, 45)
    out = generate(session, Scripted(answer, None), PROMPT, GREEDY, 8)
    assert (out.ids, out.accept_lengths, out.draft_lengths) == (answer[:8], [5, 2], [4, 1])
    assert generate(session, Scripted(answer, None), PROMPT, GREEDY, 1).rounds == 0
    assert (
        generate(session, Scripted([*answer, 1, 1, 1, 1], None), PROMPT, GREEDY, 45).ids == answer
    )  # the last position
    with pytest.raises(UserError, match="prompt of 3 tokens and an answer of 46 do not fit into a session of 48"):
        generate(session, Autoregressive(), PROMPT, GREEDY, 46)


def test_tokens_outside_the_draft_vocabulary(session: TargetSession) -> None:
    """One token cannot be drafted: it is counted as a round's own token, and if it caused a rejection.

    Rounds of three end at every third token, the last with a tree cut so that none is rejected; rounds of five are
    accepted in full and end without a rejection.
    """
    answer = generate_greedy(session, 24)
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


def test_end_token_cuts_the_round_and_on_round_gets_every_one(session: TargetSession) -> None:
    answer = generate_greedy(session, 24)
    end = next(token for index, token in enumerate(answer) if index >= 8 and token not in answer[:index])
    rounds: list[Round] = []
    out = generate_until(session, Scripted(answer, 3), end, on_round=rounds.append)
    assert out.ids == answer[: answer.index(end) + 1]
    assert [round_.kept for round_ in rounds] == out.accept_lengths
    place = 1
    for round_ in rounds:
        assert round_.committed == answer[place : place + round_.kept]
        assert round_.logits.shape == (len(round_.tree), V)
        place += round_.kept
    assert place == len(out.ids)
    first = generate_until(session, Scripted(answer, None), answer[0])
    assert (first.ids, first.rounds) == (answer[:1], 0)


# ---- sampling: the distribution of whole answers, by enumeration of all random outcomes in the loop ----

SMALL_V, DEPTHS = 3, 2
BUILDERS: dict[str, TreeBuilder] = {
    "chain": Chain(),
    "static, top-k": Static([[0], [1], [0, 0]]),
    "best_first": BestFirst(nodes=4, branch=2),
    "grown chain": Chain(),
    "grown static": Static([[0], [1], [0, 0]]),
    "grown best_first": BestFirst(nodes=4, branch=2),
    "grown, top-k": Static([[0], [1], [2], [0, 0], [2, 0]]),
    "grown, two tokens of three": Static([[0], [1], [0, 0]]),
}


class TableSession:
    """Stand-in for a `TargetSession` whose logits [V] after every partial answer are in a table."""

    device, deepest_draft = torch.device("cpu"), 256

    def __init__(self, logits_of: dict[Path, Tensor]) -> None:
        self._logits_of = logits_of

    def check_room(self, prompt_ids: list[int], new_tokens: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def prefill(self, prompt_ids: list[int]) -> TargetStep:
        self._answer: Path = ()
        return TargetStep(self._logits_of[()][None], torch.zeros(len(prompt_ids), 1))

    def forward_tree(self, tree: DraftTree) -> TargetStep:
        self._tree = tree
        paths = [tuple(tree.tokens[step] for step in tree.shape.path_to(node)) for node in range(len(tree))]
        logits = torch.stack([self._logits_of[(*self._answer, *path)] for path in paths])
        return TargetStep(logits, torch.zeros(len(tree), 1))

    def commit(self, path: list[int]) -> None:
        self._answer += tuple(self._tree.tokens[node] for node in path)


def enumerate_answers(
    answer: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Return every possible answer with its probability, over the first token, all drafts and all verifications."""
    scripts: list[list[int]] = [[]]
    while scripts:
        chooser = Outcomes(scripts.pop())

        def first(logits: Tensor, sampling: Sampling, _: Any, chooser: Outcomes = chooser) -> int:
            return int(chooser.draw(sampling.probabilities(logits)))

        def rows(q: Tensor, _: Any, chooser: Outcomes = chooser) -> Tensor:
            return torch.stack([chooser.draw(row) for row in q])

        monkeypatch.setattr(generate_module, "first_token", first)
        monkeypatch.setattr(verify_module, "RandomChooser", lambda _, chooser=chooser: chooser)
        monkeypatch.setattr(builders_module, "drawn", rows)
        monkeypatch.setattr(builders_module, "draw_without_replacement", partial(draw_rows, chooser))
        ids = answer()
        scripts += chooser.branches
        yield chooser.probability, tuple(ids)


@pytest.mark.parametrize("name", BUILDERS)
def test_sampled_answers_have_the_targets_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact for all answers over up to two rounds, or four of deterministic trees."""
    sampling, builder = Sampling(0.8, top_k=2 if "top-k" in name else 0), BUILDERS[name]
    columns = TokenColumns(torch.tensor([0, 2]), SMALL_V) if "two tokens" in name else ALL_TOKENS
    new_tokens = 5 if isinstance(builder, BestFirst) else 3
    target = random_table(5, SMALL_V, new_tokens + DEPTHS)
    drafts = {path: 0.6 * target[path] + 0.6 * noise for path, noise in random_table(6, SMALL_V, DEPTHS).items()}
    sizes: set[int] = set()

    def answer() -> list[int]:
        decoder: Any = TableDecoder(drafts, DEPTHS, columns)
        if not name.startswith("grown"):
            decoder = DepthsDecoder(torch.stack([drafts[()], drafts[0,]]))
        method = TreeDrafter("noisy", decoder, builder, sampling)
        session: Any = TableSession(target)
        return generate(session, method, PROMPT, sampling, new_tokens, on_round=lambda r: sizes.add(len(r.tree))).ids

    joint = torch.zeros([SMALL_V] * new_tokens, dtype=torch.float64)
    for probability, ids in enumerate_answers(answer, monkeypatch):
        joint[ids] += probability
    wanted = torch.ones_like(joint)
    for ids in itertools.product(range(SMALL_V), repeat=new_tokens):
        for length, token in enumerate(ids):
            wanted[ids] *= sampling.probabilities(target[ids[:length]])[token]
    torch.testing.assert_close(joint, wanted, atol=1e-12, rtol=0)
    assert len(sizes) > 1


class OneOfTwo(Autoregressive):
    """Method that proposes a wrong sibling before every right token, and stores observed features."""

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


def test_method_observes_features_of_the_accepted_path(target: LlamaForCausalLM, session: TargetSession) -> None:
    """They are those at the token before each committed one, as in one forward over the whole answer."""
    answer = generate_greedy(session, 16)
    method = OneOfTwo(answer)
    out = generate(session, method, PROMPT, GREEDY, 10)
    assert out.ids == answer[:10]
    assert out.accept_lengths == [3, 3, 3]
    seen = torch.cat(method.seen)
    expected = target_features(target, torch.tensor([[*PROMPT, *answer]]))[0, len(PROMPT) - 1 :]
    torch.testing.assert_close(seen, expected[: len(seen)], atol=1e-5, rtol=1e-5)
    assert len(seen) >= 7
