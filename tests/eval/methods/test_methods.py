"""Methods without training: each drafts as in its paper, and none changes the target's greedy tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.table_decoder import leaf_paths
from support.tiny_models import VOCABULARY, tiny_target
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from draftsmith.errors import UserError
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.draft_model import DraftModelDecoder
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.eval.methods.lookahead import Lookahead
from draftsmith.eval.methods.ngram import NgramModel
from draftsmith.eval.methods.prompt_lookup import PromptLookup
from draftsmith.eval.methods.registry import DecodingSetting, make_method
from draftsmith.eval.trees.verify import DraftTree, follow
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import MethodConfig

GREEDY = Sampling()
PROMPT = [5, 9, 33, 12, 5, 9, 40, 5, 9]
NO_FEATURES = torch.zeros(0)


def made(folder: Path, kind: str, **keys: Any) -> Method:
    recipe = MethodConfig.model_validate({"name": "x", "kind": kind, **keys})
    return make_method(DecodingSetting(recipe, tiny_target(), None, folder, 64, GREEDY))


class TestPromptLookup:
    def draft_tokens(self, ids: list[int], match: str = "earliest", partial: bool = False, **options: int) -> list[int]:
        method = PromptLookup("x", match=match, partial=partial, **options)
        method.start(ids[:3], NO_FEATURES)
        method.observe(ids[3:], NO_FEATURES)
        return method.propose().tokens

    def test_spec_bench_drafts_all_tokens_or_none(self) -> None:
        """Four tokens follow the 3-gram, but five the shorter 2-gram 2 3, which occurred before."""
        ids = [2, 3, 5, 1, 2, 3, 6, 1, 2, 3]
        assert self.draft_tokens(ids, num_tokens=4) == [3, 6, 1, 2, 3]
        assert self.draft_tokens(ids, num_tokens=5) == [3, 5, 1, 2, 3, 6]
        assert self.draft_tokens(ids, num_tokens=9) == [3]
        assert self.draft_tokens(ids, num_tokens=9, partial=True) == [3, 6, 1, 2, 3]
        # ... and more than the n-gram has.
        assert self.draft_tokens([1, 2, 3, 4, 1, 2, 3], num_tokens=1) == [3, 4]
        assert self.draft_tokens([1, 2, 3, 1, 2, 3], num_tokens=1, max_ngram=3) == [3, 1]

    @pytest.mark.parametrize("seed", range(6))
    def test_prompt_lookup_equals_transformers(self, seed: int) -> None:
        """The reference for `earliest` and `partial` is transformers' class."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, (12,), generator=generator)
        theirs = PromptLookupCandidateGenerator(None, num_output_tokens=4, max_matching_ngram_size=2, max_length=99)
        assert self.draft_tokens(ids.tolist(), num_tokens=4, max_ngram=2, partial=True) == [
            int(ids[-1]),
            *theirs.get_candidates(ids[None])[0][0, len(ids) :].tolist(),
        ]


class TestNgram:
    ROWS = (
        (np.array([1, 2, 3, 1, 2, 4, 1, 2, 3]), np.array([0, 1, 1, 1, 1, 1, 1, 1, 1])),
        (np.array([9, 2]), np.array([0, 1])),
    )

    def counts(self, order: int, context: list[int]) -> dict[int, float]:
        logits = NgramModel(self.ROWS, order, vocab_size=10).logits(context)
        return {token: round(float(logits[token].exp()), 4) for token in range(10) if logits[token] > -torch.inf}

    def test_counts_are_exact(self) -> None:
        assert self.counts(1, [7, 7]) == {1: 2, 2: 4, 3: 2, 4: 1}  # the masked first tokens do not count
        assert self.counts(2, [2]) == {3: 2, 4: 1}
        assert self.counts(3, [1, 2]) == {3: 2, 4: 1}
        assert self.counts(3, [3, 1]) == {2: 1}

    def test_backs_off_to_shorter_ngrams(self) -> None:
        assert self.counts(3, [8, 2]) == {3: 2, 4: 1}  # to the bigram
        assert self.counts(3, [8, 8]) == self.counts(1, [])  # to the unigram
        assert self.counts(3, []) == self.counts(1, [])

    def test_too_many_ngrams_are_refused(self) -> None:
        with pytest.raises(ValueError, match="4-grams over 100000"):
            NgramModel(self.ROWS, 4, 100_000)
        with pytest.raises(ValueError, match="no token has a loss mask of 1; run `draftsmith distill"):
            NgramModel([(ids, 0 * mask) for ids, mask in self.ROWS], 2, 10)

    def test_missing_tokens_are_reported(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="holds no tokens to count n-grams in: run `draftsmith distill"):
            made(tmp_path / "nowhere", "ngram")


class TestLookahead:
    def test_column_becomes_an_ngram_and_a_guess(self) -> None:
        method = Lookahead("x", level=4, window=3, guesses=2, from_prompt=False)
        method.start([10, 11, 12], NO_FEATURES)
        method.observe([20], NO_FEATURES)
        method._levels = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        tree = method.propose()
        following = {6: 30, 7: 31, 8: 32}
        logits = torch.zeros(len(tree), 40)
        for node, token in enumerate(tree.tokens):
            logits[node, following.get(token, 0)] = 1.0
        method.read_logits(tree, logits)
        assert method._levels == [[3, 4, 5], [6, 7, 8], [30, 31, 32]]
        assert {first: list(known) for first, known in method._pool.items()} == {
            20: [(3, 6, 30)],
            1: [(4, 7, 31)],
            2: [(5, 8, 32)],
        }
        method.observe([1], NO_FEATURES)
        guessed = method.propose()
        assert [1, 4, 7, 31] in [[guessed.tokens[node] for node in path] for path in leaf_paths(guessed)]

    def test_window_fills_level_by_level(self) -> None:
        """W=2, N=4: 4 tokens of the prompt; each of the first two rounds adds a level and drops a column."""
        method = Lookahead("x", level=4, window=2, guesses=1)
        method.start([10, 11, 12], NO_FEATURES)
        method.observe([20], NO_FEATURES)
        assert [len(level) for level in method._levels] == [4]
        _, a, b, c = method._levels[0]

        def run(first: int) -> DraftTree:
            """Run a round: the target's token is `first` at the root, and one more at every node of the next column."""
            tree = method.propose()
            logits = torch.zeros(len(tree), 60)
            for number, node in enumerate(method._last_nodes):
                logits[node, first + number] = 1.0
            method.read_logits(tree, logits)
            return tree

        assert run(30).tokens == [20, a, b, c]
        assert method._levels == [[a, b, c], [31, 32, 33]]
        tree = run(40)
        assert [[tree.tokens[node] for node in path] for path in leaf_paths(tree)] == [
            [20, 31],
            [20, b, 32],
            [20, b, c, 33],
        ]
        assert method._levels == [[b, c], [32, 33], [41, 42]]
        assert not method._pool
        run(50)
        assert method._levels == [[32, 33], [41, 42], [50, 51]]
        assert method._pool == {20: {(32, 41, 50): None}, c: {(33, 42, 51): None}}

    @pytest.mark.parametrize(("accept_window", "accepted"), [(False, []), (True, [1, 4])])
    def test_guess_of_the_window_is_accepted_only_with_the_option(
        self, accept_window: bool, accepted: list[int]
    ) -> None:
        """The target's tokens after the root are 1 4 7; 1 4 is a column of the window, later an n-gram of the pool."""
        method = Lookahead("x", level=3, window=2, guesses=2, accept_window=accept_window)
        method.start([10], NO_FEATURES)
        method.observe([20], NO_FEATURES)
        method._levels = [[0, 1], [3, 4]]

        def accepted_tokens() -> list[int]:
            tree = method.propose()
            next_ids = {20: 1, 1: 4, 4: 7}
            verification = follow(tree, lambda node: next_ids.get(tree.tokens[node], 0))
            return [tree.tokens[node] for node in verification.path[1:]]

        assert accepted_tokens() == accepted
        method._remember([20, 1, 4])
        assert accepted_tokens() == [1, 4]


class TestDraftModel:
    @pytest.fixture
    def draft(self) -> PreTrainedModel:
        return tiny_target(num_hidden_layers=1).double()

    def test_draft_logits_equal_a_plain_forward(self, draft: PreTrainedModel) -> None:
        """Every logit equals a plain forward over its path, after fully, partly and never accepted paths.

        Also where the target's own token was drafted, in a node that the tree dropped.
        """
        decoder, committed = DraftModelDecoder(draft, 3, 64, VOCABULARY), [5, 9, 33]
        decoder.start(torch.tensor(committed), NO_FEATURES)

        def check(logits: torch.Tensor, *paths: list[int]) -> None:
            for path, row in zip(paths, logits, strict=True):
                plain = draft(torch.tensor([committed + path])).logits[0, -1].float()
                torch.testing.assert_close(row, plain, atol=1e-5, rtol=1e-5)

        for accepted in ([12], [8, 4, 40], [7, 6, 41], [7, 3, 42], [43], [8, 44], [7], [8, 4]):
            decoder.observe(torch.tensor(accepted), NO_FEATURES)
            committed += accepted
            check(decoder.begin(), [])
            check(decoder.expand([7, 8], [0, 0]), [7], [8])
            check(decoder.expand([6, 4, 3], [1, 2, 1]), [7, 6], [8, 4], [7, 3])
        decoder.observe(torch.tensor([9]), NO_FEATURES)
        committed.append(9)
        check(decoder.begin(), [])
        for depth in range(1, 4):  # a chain needs no mask
            check(decoder.expand([depth], [depth - 1]), [*range(1, depth + 1)])

    def test_target_as_its_own_draft_model_is_always_right(self) -> None:
        target = tiny_target().double()
        method = build_tree_drafter(MethodConfig(name="x"), DraftModelDecoder(target, 4, 64, VOCABULARY), GREEDY)
        with TargetSession(target, 64) as session:
            out = generate(session, method, PROMPT, GREEDY, 40)
        assert out.accept_lengths == [5] * 7 + [4]  # gamma + 1 per round, and the rest of 39

    def test_smaller_and_larger_vocabularies(self) -> None:
        for size in (VOCABULARY - 7, VOCABULARY + 7):
            draft = tiny_target(vocab_size=size).double()
            decoder = DraftModelDecoder(draft, 3, 64, VOCABULARY)
            decoder.start(torch.tensor([1, 2, 3]), NO_FEATURES)
            logits = decoder.begin()
            assert logits.shape == (1, VOCABULARY)
            assert torch.isfinite(logits[0, : min(size, VOCABULARY)]).all()
            assert (logits[0, size:] == -torch.inf).all()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "promt_lookup"}, "kind `promt_lookup` does not exist: use drafter, draft_model, lookahead, ngram"),
        (
            {"kind": "prompt_lookup", "options": {"ngram": 3}},
            r"method x: unknown key `options\.ngram`: did you mean `max_ngram`\?",
        ),
        (
            {"kind": "lookahead", "options": {"zzz": 3}},
            r"unknown key `options\.zzz`: valid keys there are accept_window, from_prompt, guesses, level, window",
        ),
        (
            {"kind": "prompt_lookup", "options": {"max_ngram": 0}},
            r"key `options\.max_ngram`: input should be greater than or equal to 1, not 0",
        ),
        ({"kind": "draft_model"}, r"method x: key `options\.model` is missing: add it"),
        (
            {"kind": "draft_model", "options": {"model": "/no/such/model"}},
            r"draft model /no/such/model cannot be loaded \(.*\): give a folder with a transformers",
        ),
    ],
)
def test_invalid_options_are_reported(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        made(tmp_path, **keys)


def test_lookahead_does_not_learn_from_cut_trees() -> None:
    method = Lookahead("x", level=3, window=2, guesses=1)
    method.start(PROMPT, NO_FEATURES)
    method.observe([5], NO_FEATURES)
    levels = method._levels
    tree: DraftTree = method.propose().cut_to_depth(1)
    method.read_logits(tree, torch.zeros(len(tree), VOCABULARY))
    assert method._levels is levels
    assert not method._pool
